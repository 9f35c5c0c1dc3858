"""An accelerator made of threads: a compute queue, and a copy engine with a bandwidth.

Work is queued and runs later, in order, as on a GPU: the host runs ahead of both queues, and
only events tie one to the other.  So a copy that is issued without waiting for the compute
before it really sees old bytes, and an update that does not wait for the copy really tears it.
As on a GPU, a kernel's writes count in ``tensor._version`` when it is queued, not when it runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from stillframe.save.device import DeviceTable, Gathered, Ticket
from stillframe.state.memory import as_row
from stillframe.state.torch_internals import uncounted_writes


class _Queue:
    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> threading.Event:
        event = threading.Event()
        self._work.put(event.set)
        return event

    def wait_event(self, event: threading.Event) -> None:
        self._work.put(lambda: _ignore(event.wait()))

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class _EmulatedTicket:
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.wait()


class EmulatedDevice:
    """Context manager: while open, tensors made by :meth:`place` count as lying on this device."""

    is_host = False

    def __init__(self, *, copy_bytes_s: float = 25e9) -> None:
        self._copy_bytes_s = copy_bytes_s
        self._compute = _Queue("emulated-compute")
        self._copies = _Queue("emulated-copy-engine")
        self._owned: set[int] = set()

    def __enter__(self) -> EmulatedDevice:
        DeviceTable.owning.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        DeviceTable.owning.remove(self)
        self._compute.stop()
        self._copies.stop()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count this tensor's memory as the device's."""
        self._owned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._owned

    def compute(self, work: Callable[[], object], *writes: torch.Tensor) -> None:
        """Queue a kernel that writes to these tensors: returns at once, runs in order.

        What is not named is written without torch's knowledge, as by the replay of a CUDA graph.
        """

        def kernel() -> None:
            with uncounted_writes():
                work()

        self._compute.put(kernel)
        torch.autograd.graph.increment_version(writes)

    def synchronize(self) -> None:
        self._compute.record().wait()

    def mark(self) -> threading.Event:
        return self._compute.record()

    def gather(self, sources: Sequence[torch.Tensor], nbytes: int) -> Gathered:
        into = self.place(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        self._compute.put(lambda: _fill(sources, into))
        return Gathered([into])

    def begin(self, mark: Any) -> None:
        self._copies.wait_event(mark)

    def copy(self, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        def work() -> None:
            time.sleep(into.numel() / self._copy_bytes_s)
            _fill(sources, into)

        self._copies.put(work)

    def ticket(self) -> _EmulatedTicket:
        return _EmulatedTicket(self._copies.record())

    def order_after(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _EmulatedTicket)
        self._compute.wait_event(ticket.event)

    def runtime(self) -> None:
        return None


def _fill(sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    torch.cat([as_row(source) for source in sources], out=into)


def _ignore(_: object) -> None:
    pass
