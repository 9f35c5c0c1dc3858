"""Functions of the job that are called when its saves are committed (:meth:`Save.then`)."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from stillframe.latch import LOOK_S, Latch, is_running, join

logger = logging.getLogger("stillframe")


class Callbacks:
    """Calls one function at a time, on a thread that lives while there are any.  Thread: safe from any.

    Putting one never blocks, so that whoever brings the news of a commit is not held up.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[Any], object], Any]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may come in between
        self._thread: threading.Thread | None = None
        self._count = 0
        """Put, and not returned yet."""
        self._idle = Latch()
        self._idle.unlock()
        self._is_over = False

    def put(self, function: Callable[[Any], object], argument: Any) -> None:
        with self._lock:
            if not self._count:
                self._idle = Latch()
            self._count += 1
            self._waiting.put((function, argument))
            self._start()

    def _start(self) -> None:
        """Have a thread, if one is needed.  If the system gives none, the next look tries again."""
        if self._count and (self._thread is None or not is_running(self._thread)):
            thread = threading.Thread(target=self._run, name="stillframe-then", daemon=True)
            with contextlib.suppress(RuntimeError):
                self._thread = thread
                thread.start()

    def finish(self, timeout_s: float | None) -> bool:
        """Block until all have returned; tells whether they have.  One that asks for this itself waits for nobody."""
        if threading.current_thread() is self._thread:
            return True
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = LOOK_S if deadline_s is None else min(max(deadline_s - time.monotonic(), 0.0), LOOK_S)
            if self._idle.wait(left_s) or left_s <= 0:
                return self._idle.is_open
            with self._lock:
                self._start()

    def end(self, timeout_s: float) -> None:
        """Call no more; wait for the one that runs: a thread inside torch while the interpreter goes aborts it."""
        self._is_over = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            join(thread, timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_over or self._waiting.empty():
                    self._thread = None
                    return
                function, argument = self._waiting.get()
            try:
                function(argument)
            except BaseException as error:  # SystemExit, too: it would end this thread only
                with contextlib.suppress(Exception):
                    logger.warning("then() of %r: the function raised %s: %s", argument, type(error).__name__, error)
            finally:
                with self._lock:
                    self._count -= 1
                    if not self._count:
                        self._idle.unlock()
            del function, argument
