"""Waiting that Ctrl-C and signal handlers cannot break.

A signal handler runs between two lines of what the main thread executes, and may raise there.  ``threading.Event``,
``Condition`` and ``Future`` are written in Python: an exception inside one of them can leave its lock taken, and then
the thread that brings the news hangs.  What stands here consists of single operations of the interpreter's own lock, so
that telling never blocks, and a wait that was interrupted leaves nothing behind.

Every wait looks by itself once in a while: no news can be missed for longer than that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from stillframe.errors import DeadlineError, StateError

_T = TypeVar("_T")
LOOK_S = 0.5
"""How often a wait looks by itself."""
_JOIN_S = 0.0005, 0.016
"""The first pause of a join, and the longest."""


class Bell:
    """Wakes the one thread that waits for it, or the next one that does.  Thread: any may ring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # it was rung before, and nobody has heard it yet
            pass

    def wait(self, timeout_s: float) -> None:
        """Blocks until it rings; may return early."""
        self._lock.acquire(timeout=max(timeout_s, 0.0))


class Latch:
    """Opens once.  Thread: any may open it, any may wait."""

    def __init__(self) -> None:
        self.is_open = False
        self._turnstile = threading.Lock()
        self._turnstile.acquire()

    def unlock(self) -> None:
        """May be called again."""
        self.is_open = True
        self._let_through()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until it is open; tells whether it is."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_open:
            left_s = LOOK_S if deadline_s is None else min(deadline_s - time.monotonic(), LOOK_S)
            if left_s <= 0:
                break
            if self._turnstile.acquire(timeout=left_s):
                self._let_through()
        return self.is_open

    def _let_through(self) -> None:
        try:
            self._turnstile.release()
        except RuntimeError:  # nobody holds it: all pass
            pass


def check_may_wait(lock: Any) -> None:
    """Raises :class:`StateError` in a signal handler that has interrupted its thread while that held this ``RLock``:
    whoever brings the news would wait for the lock.

    ``Condition`` asks its lock the same question; it has no public name.
    """
    if lock._is_owned():
        raise StateError("a signal handler cannot wait for a save that its thread is noting: set a flag instead")


def is_running(thread: threading.Thread) -> bool:
    """Whether it has been started and has not ended.

    Not by ``Thread.is_alive`` or ``join``: up to Python 3.12 a signal in one of them can make a living thread count as
    ended, for good.
    """
    return thread in threading.enumerate()


def join(thread: threading.Thread, timeout_s: float | None) -> bool:
    """Blocks until it has ended; tells whether it has."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _JOIN_S[0]
    while is_running(thread):
        left_s = pause_s if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _JOIN_S[1])
    return True


class Answer(Generic[_T]):
    """What another thread will say: a value, or an error.  Thread: one answers, one asks."""

    def __init__(self) -> None:
        self._given = Latch()
        self._value: _T | None = None
        self._error: BaseException | None = None

    def give(self, value: _T) -> None:
        self._value = value
        self._given.unlock()

    def fail(self, error: BaseException) -> None:
        """Does nothing if it has been answered."""
        if not self._given.is_open:
            self._error = error
            self._given.unlock()

    def run(self, work: Callable[[], _T]) -> None:
        """Answer with what ``work`` returns or raises."""
        try:
            self.give(work())
        except BaseException as error:
            self.fail(error)

    @property
    def is_given(self) -> bool:
        return self._given.is_open

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until it is answered; tells whether it is."""
        return self._given.wait(timeout_s)

    def get(self, timeout_s: float | None = None) -> _T:
        """Blocks.  Raises what the other thread met; :class:`DeadlineError` if it has not answered by then."""
        if not self._given.wait(timeout_s):
            raise DeadlineError(f"no answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def later(work: Callable[[], _T]) -> Answer[_T]:
    """What it gives or raises, from a thread of its own that nobody has to wait for."""
    answer: Answer[_T] = Answer()
    threading.Thread(target=answer.run, args=(work,), name="stillframe-later", daemon=True).start()
    return answer
