"""What was issued arrives: a thread that waits for copies, and has their chunks handed to the keeper.

The stager's thread only issues.  So a save that is requested while an earlier one is still being copied is issued at
once, and no fence waits for bytes.

Invariants:
- chunks are dealt with in the order in which they were issued, a few at a time, so that one wait and one turn of the
  interpreter serve several of them; then the end of their save, once;
- of a save that has failed no chunk is handed over;
- in host memory a copy is done when it is issued: while nothing else is under way, its chunks take no other thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from stillframe.latch import is_running, join
from stillframe.save.device import Device, Ticket
from stillframe.save.job import Job

MAX_BATCH = 4
"""Chunks that are waited for together: 64 MiB are a few milliseconds of any link worth its name."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A chunk whose copies are issued."""

    chunk: int
    span: int
    nbytes: int
    tickets: Mapping[Device, Ticket]
    """For its copies; none if they are done."""
    late: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]] = field(default=())
    """Copies from host memory to make when the tickets are reached: from, and to."""


_Item: TypeAlias = "tuple[Job, Filled | None]"


class Work(Protocol):
    """What is done with what arrives."""

    def hand_over(self, job: Job, batch: list[Filled]) -> None: ...

    def end(self, job: Job) -> None: ...

    def fail(self, job: Job, problem: BaseException) -> None: ...

    def lose_arriving(self, problem: BaseException) -> None: ...


class Arrivals:
    """Thread: :meth:`put` from the stager's; the others from any."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._held: list[_Item | None] = []
        """Taken from the queue, and not dealt with."""
        self._put = 0
        self._dealt = 0
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.batch = MAX_BATCH

    def put(self, job: Job, filled: Filled | None) -> None:
        """A chunk that was issued; ``None``: that was the last of this save.  Blocks only as ``hand_over`` does."""
        if self._put == self._dealt and not (filled and filled.tickets):
            self._deal(job, None if filled is None else [filled])
            return
        self._put += 1
        self._items.put((job, filled))
        if self._thread is None:
            self._start()

    @property
    def is_under_way(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread is not None and is_running(self._thread)

    def has_died(self) -> bool:
        """Whether the thread is gone although nobody has stopped it."""
        return self._thread is not None and not self._is_stopped and not is_running(self._thread)

    def restart(self) -> None:
        """What is in the queue is dealt with; what was in hand is lost."""
        self._start()

    def stop(self, timeout_s: float | None) -> bool:
        """Blocks until all is dealt with.  Tells whether it is."""
        self._is_stopped = True
        thread = self._thread
        if thread is None:
            return True
        self._items.put(None)
        return join(thread, timeout_s)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="stillframe-arrive", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while (item := self._next()) is not None:
            job, filled = item
            batch = None if filled is None else [filled, *self._more(job)]
            try:
                self._deal(job, batch)
            except BaseException as error:  # a bug: no save may hang because of it, and later ones must work
                self._work.lose_arriving(error)
            self._dealt += 1 if batch is None else len(batch)
            del item, job, filled, batch  # while this waits, it keeps nobody's tensors

    def _next(self) -> _Item | None:
        return self._held.pop() if self._held else self._items.get()

    def _more(self, job: Job) -> list[Filled]:
        """Chunks of this save that were issued meanwhile."""
        found: list[Filled] = []
        while len(found) < self.batch - 1:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                break
            if item is None or item[0] is not job or item[1] is None:
                self._held.append(item)
                break
            found.append(item[1])
        return found

    def _deal(self, job: Job, batch: list[Filled] | None) -> None:
        if batch is None:
            self._work.end(job)
        elif job.save.error is None:
            try:
                self._work.hand_over(job, batch)
            except BaseException as error:
                self._work.fail(job, error)


class Pace:
    """Lets so many bytes a second pass.  Thread: one."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._due_s = 0.0

    def wait(self, nbytes: int, look_s: float, is_cancelled: Callable[[], bool]) -> None:
        """Blocks until it is their turn, or nobody wants them any more."""
        while (left_s := self._due_s - time.monotonic()) > 0 and not is_cancelled():
            time.sleep(min(left_s, look_s))
        self._due_s = max(self._due_s, time.monotonic()) + nbytes / self._bytes_s
