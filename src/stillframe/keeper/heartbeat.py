"""The keeper says that it lives, and what it is in: to its trainer, and in its lock's file to the run that comes next.

Neither waits for the storage to answer: the trainer is told by the thread that listens, which touches no storage; the
file is written by a thread of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from stillframe.keeper.commit_loop import or_die
from stillframe.keeper.segment import SegmentWriter
from stillframe.link import liveness
from stillframe.link.liveness import Pulse
from stillframe.store.activity import Activity
from stillframe.units import format_bytes, format_count

_T = TypeVar("_T")


class Heartbeat:
    """``saves``: those that are not settled.  ``tell``: to the trainer, without waiting for it.

    Thread: :meth:`noted` on any; the others on one.
    """

    def __init__(
        self, activity: Activity, saves: Callable[[], Sequence[SegmentWriter]], tell: Callable[[Pulse], None]
    ) -> None:
        self._activity = activity
        self._saves = saves
        self._tell = tell
        self._told, self._noted = itertools.count(1), itertools.count(1)
        self._told_s = time.monotonic()
        self._noting: threading.Thread | None = None

    def noted(self) -> Pulse:
        """The next one for the lock's note."""
        return self._pulse(next(self._noted))

    def _pulse(self, beat: int) -> Pulse:
        """Does not touch the storage."""
        operation, saves = self._activity.oldest(), self._saves()
        said = ["in no storage operation" if operation is None else operation.describe()]
        if saves:
            nbytes = sum(save.begin.data_bytes - save.flushed_bytes for save in saves)
            said.append(f"{format_count(len(saves), 'save')} with {format_bytes(max(nbytes, 0))} to write")
        return Pulse(beat, 0 if operation is None else operation.number, "; ".join(said))

    def beat(self) -> None:
        """Tell the trainer, if it is time."""
        if time.monotonic() - self._told_s >= liveness.BEAT_S:
            self._told_s = time.monotonic()
            self._tell(self._pulse(next(self._told)))

    def beside(self, work: Callable[[], _T]) -> _T:
        """The result of work that is done on another thread, while this one goes on telling that we live."""
        with ThreadPoolExecutor(1, "stillframe-beside") as pool:
            done = pool.submit(work)
            while not wait([done], liveness.BEAT_S / 4).done:
                self.beat()
            return done.result()

    def note(self, note: Callable[[], None]) -> None:
        """Write the lock's note now, and again at every beat until the process ends.  May be called again."""
        if self._noting is None:
            self._noting = threading.Thread(target=or_die, args=(_again, note), name="stillframe-note", daemon=True)
            self._noting.start()


def _again(note: Callable[[], None]) -> None:
    while True:
        note()
        time.sleep(liveness.BEAT_S)
