"""How bytes come off a device: one narrow interface, for host memory and for every accelerator.

The order that must hold, whatever the device:

    compute queued before save()  →  the copies of that save  →  compute queued after the fence

On an accelerator both arrows are events between streams, so the host waits for neither: an
event on the compute stream at ``save()`` (:meth:`Device.mark`), for which the side stream waits
(:meth:`Device.begin`); and an event on the side stream for which the compute stream waits at the
fence (:meth:`Device.order_after`).  In host memory a copy is done when the call returns.

Written on ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, so CUDA, ROCm, XPU and the
rest take one path.  :mod:`stillframe.testing.emulated` implements the same interface, and proves the order.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from stillframe.state.memory import as_row, is_plain

logger = logging.getLogger("stillframe")


class Ticket(Protocol):
    """Stands for copies that were issued."""

    def wait(self) -> None:
        """Blocks the calling thread until they are done."""


class Device(Protocol):
    """Thread: ``mark``, ``gather`` and ``order_after`` on the training thread; the others on the stager's."""

    def mark(self) -> Any:
        """A point in the compute queue: all that is queued so far comes before it."""

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
        """Rows of bytes, as they are at this point of the compute queue, end to end on the same device."""

    def begin(self, mark: Any) -> None:
        """Copies issued from now on see what the compute before ``mark`` made."""

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Issue a copy of the sources, end to end, into host bytes; the caller keeps both alive until it is done."""

    def ticket(self) -> Ticket | None:
        """For the copies issued so far; ``None`` if they are done."""

    def order_after(self, ticket: Ticket) -> None:
        """Compute queued from now on waits for the ticket; the host does not."""

    def adopt(self, address: int, nbytes: int) -> None:
        """Make the arena's memory fit for fast copies (pinned)."""


class HostDevice:
    """Host memory.  Large sources go by ``memmove``: ``Tensor.copy_`` would start OpenMP threads
    beside those of training (a GIL-bound loop kept 68 % of its speed beside it, 99 % beside memmove)."""

    def mark(self) -> None:
        return None

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
        into = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # whatever the default device is
        torch.cat(list(sources), out=into)
        return into

    def begin(self, mark: Any) -> None:
        pass

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        source = sources[0]
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

    def adopt(self, address: int, nbytes: int) -> None:
        pass


class _EventTicket:
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class AcceleratorDevice:
    """One device of the accelerator that torch was built for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)

    def mark(self) -> torch.Event:
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> torch.Tensor:
        return torch.cat(list(sources))

    def begin(self, mark: torch.Event) -> None:
        torch.accelerator.set_stream(self._side)  # of this thread only
        self._side.wait_event(mark)

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        # Temporaries belong to the side stream, so the caching allocator reuses them only behind this copy.
        torch.accelerator.set_stream(self._side)
        row = as_row(sources[0]) if len(sources) == 1 else torch.cat(list(sources))
        into.copy_(row, non_blocking=True)

    def ticket(self) -> _EventTicket:
        event = torch.Event(self._device)
        event.record(self._side)
        return _EventTicket(event)

    def order_after(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _EventTicket)
        torch.accelerator.current_stream(self._device).wait_event(ticket.event)

    def adopt(self, address: int, nbytes: int) -> None:
        # torch has no device-neutral host registration.  Without it copies are correct but slower.
        if self._device.type == "cuda":
            code = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
            if int(code) != 0:
                logger.warning("the arena could not be pinned (runtime error %s); staging will be slower", code)


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
