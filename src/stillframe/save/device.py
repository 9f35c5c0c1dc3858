"""How bytes come off a device: one narrow interface, for host memory and for every accelerator.

The order that must hold, whatever the device:

    compute queued before save()  →  the copies of that save  →  compute queued after the fence

On an accelerator both arrows are events between streams, so the host waits for neither: an
event on the compute stream at ``save()`` (:meth:`Device.mark`), for which the side stream waits
(:meth:`Device.begin`); and an event on the side stream for which the compute stream waits at the
fence (:meth:`Device.order_after`).  In host memory a copy is done when the call returns.

Written on ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, so CUDA, ROCm, XPU and the
rest take one path.  The order is proved on a device of torch's that is made of threads (``tests/device``);
:mod:`stillframe.testing.emulated` implements the same interface without one.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from stillframe.errors import StateError
from stillframe.save.pinning import Runtime, runtime_of
from stillframe.state.memory import as_row, byte_extent, is_byte_row, is_plain
from stillframe.units import MIB

CAPTURE_BYTES = 64 * MIB
"""So much of one device ``save`` copies on that device, for all saves that are not staged together.  More goes to host
memory: an average of all weights would take as much memory again as they do."""
_PIECE_BYTES = 64 * MIB
"""Host memory is taken in pieces: torch keeps pinned memory for reuse, in sizes that are powers of two."""
_SMALL_BYTES = MIB
"""Rows below this size go to host memory together."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Bytes that ``save`` has copied, or queued to be copied: on their device, or in pieces of host memory."""

    pieces: list[torch.Tensor]
    """All but the last are of :data:`_PIECE_BYTES`, if there are several."""
    is_late: bool = False
    """They are in host memory once the compute is done that was queued before the device's mark."""

    def rows(self, start: int, nbytes: int) -> list[torch.Tensor]:
        """The bytes from ``start`` on."""
        if len(self.pieces) == 1:
            return [self.pieces[0][start : start + nbytes]]
        end, found = start + nbytes, []
        while start < end:
            piece, offset = divmod(start, _PIECE_BYTES)
            count = min(end - start, _PIECE_BYTES - offset)
            found.append(self.pieces[piece][offset : offset + count])
            start += count
        return found


class Ticket(Protocol):
    """Stands for copies that were issued."""

    def wait(self) -> None:
        """Blocks the calling thread until they are done."""


class Device(Protocol):
    """Thread: ``mark``, ``gather`` and ``order_after`` on the training thread, or on its streams; the others on the
    stager's; ``ticket`` also on that of the arrivals."""

    is_host: bool
    """Its memory is the host's: a copy is done when it is issued."""

    def mark(self) -> Any:
        """A point in the compute queue: all that is queued so far comes before it."""

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> Gathered:
        """Rows of bytes, as they are at this point of the compute queue, end to end."""

    def begin(self, mark: Any) -> None:
        """Copies issued from now on see what the compute before ``mark`` made."""

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Issue a copy of the sources, end to end, into host bytes; the caller keeps both alive until it is done."""

    def ticket(self) -> Ticket | None:
        """For the copies issued so far; ``None`` if they are done."""

    def order_after(self, ticket: Ticket) -> None:
        """Compute queued from now on waits for the ticket; the host does not."""

    def runtime(self) -> Runtime | None:
        """How host memory is pinned for fast copies; ``None`` if it is not."""


class HostDevice:
    """Host memory.  Large sources go by ``memmove``: ``Tensor.copy_`` would start OpenMP threads
    beside those of training (a GIL-bound loop kept 68 % of its speed beside it, 99 % beside memmove)."""

    is_host = True

    def mark(self) -> None:
        return None

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> Gathered:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device is
        torch.cat(list(sources), out=into)
        return Gathered([into])

    def begin(self, mark: Any) -> None:
        pass

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        source = sources[0]
        _check_there(sources)
        if len(sources) > 1:
            torch.cat(list(sources), out=into)
        elif is_plain(source):
            ctypes.memmove(into.data_ptr(), source.data_ptr(), into.numel())
        else:
            into.view(source.dtype).view(source.shape).copy_(source.detach())

    def ticket(self) -> None:
        return None

    def order_after(self, ticket: Ticket) -> None:
        pass

    def runtime(self) -> None:
        return None


def _check_there(sources: Sequence[torch.Tensor]) -> None:
    """Raises :class:`StateError` if ``storage.resize_()`` has given memory back: reading it would kill the process."""
    ends: Iterable[int] = [byte_extent(sources[0])[1]]
    if len(sources) > 1:  # then all are rows of bytes
        ends = map(operator.add, map(torch.Tensor.storage_offset, sources), map(torch.Tensor.numel, sources))
    sizes = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, sources))
    if not all(map(operator.le, ends, sizes)):
        raise StateError(
            "a tensor's storage was resized after save() and before the copy was made: call checkpointer.fence() first"
        )


class _EventTicket:
    """``sleeper``: an event at the same point that the host can wait for asleep, where ``event`` would spin."""

    def __init__(self, event: torch.Event, sleeper: torch.cuda.Event | None) -> None:
        self.event = event
        self._sleeper = sleeper

    def wait(self) -> None:
        (self._sleeper or self.event).synchronize()


def _sleeper(stream: torch.Stream) -> torch.cuda.Event | None:
    """On CUDA ``torch.Event`` takes no ``blocking=True``: who waits for one keeps a core busy.  Its own event does, and
    is recorded on a stream of its own class only.  What other accelerators do is left to their ``synchronize``."""
    if stream.device.type != "cuda":
        return None
    own = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    event = torch.cuda.Event(blocking=True)
    event.record(own)
    return event


class AcceleratorDevice:
    """One device of the accelerator that torch was built for."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gathered: list[weakref.ref[torch.Tensor]] = []

    @functools.cached_property
    def _side(self) -> torch.Stream:
        # Made by the stager's thread: if the device cannot, that costs a save, and raises nothing in training.
        return torch.Stream(self._device)

    def mark(self) -> torch.Event:
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> Gathered:
        alive = [row for each in self._gathered if (row := each()) is not None]
        if nbytes + sum(row.nbytes for row in alive) > CAPTURE_BYTES:
            return _gather_on_host(sources, nbytes)
        row = torch.cat(list(sources))
        self._gathered = list(map(weakref.ref, [*alive, row]))
        return Gathered([row])

    def begin(self, mark: torch.Event) -> None:
        torch.accelerator.set_stream(self._side)  # of this thread only
        self._side.wait_event(mark)

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        # Temporaries belong to the side stream, so the caching allocator reuses them only behind this copy.
        torch.accelerator.set_stream(self._side)
        row = sources[0] if len(sources) == 1 else torch.cat(list(sources))
        if not is_byte_row(row):
            row = as_row(row)
        into.copy_(row, non_blocking=True)

    def ticket(self) -> _EventTicket:
        event = torch.Event(self._device)
        event.record(self._side)
        return _EventTicket(event, _sleeper(self._side))

    def order_after(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _EventTicket)
        torch.accelerator.current_stream(self._device).wait_event(ticket.event)

    def runtime(self) -> Runtime | None:
        return runtime_of(self._device)


def _gather_on_host(sources: Iterable[torch.Tensor], nbytes: int) -> Gathered:
    """The compute queue waits for it, the host does not.  On the device it takes a chunk at most, for small rows."""
    gathered = Gathered([_host_memory(min(_PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, _PIECE_BYTES)], True)
    at = 0
    for row in _joined(sources):
        done = 0
        for into in gathered.rows(at, row.numel()):
            into.copy_(row[done : done + into.numel()], non_blocking=True)
            done += into.numel()
        at += done
    return gathered


def _joined(rows: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same bytes in the same order; small rows are joined."""
    small: list[torch.Tensor] = []
    nbytes = 0
    for row in rows:
        if small and max(row.numel(), nbytes) >= _SMALL_BYTES:
            yield torch.cat(small)
            small, nbytes = [], 0
        if row.numel() >= _SMALL_BYTES:
            yield row
        else:
            small.append(row)
            nbytes += row.numel()
    if small:
        yield torch.cat(small)


def _host_memory(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # this accelerator has none that is pinned, or no more of it: right, but slower
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class OwningDevice(Device, Protocol):
    """A device that says itself which memory is its own, whatever ``tensor.device`` says."""

    def owns(self, tensor: torch.Tensor) -> bool: ...


class DeviceTable:
    """Which :class:`Device` serves a tensor."""

    owning: ClassVar[list[OwningDevice]] = []
    """Asked first.  Empty but for the emulated devices of tests and benchmarks, which add and remove themselves."""

    def __init__(self) -> None:
        self._host = HostDevice()
        self._devices: dict[torch.device, Device] = {}

    def of(self, tensor: torch.Tensor) -> Device:
        if self.owning:
            for owning in self.owning:
                if owning.owns(tensor):
                    return owning
        device = tensor.device
        found = self._devices.get(device)
        if found is None:
            found = self._devices[device] = self._host if device.type == "cpu" else AcceleratorDevice(device)
        return found
