"""A wait that lasts is told: who is waited for, and until when.

Whoever keeps a person waiting for a server, a tier or a keeper makes a :class:`Wait`, and takes a turn of it whenever
it has looked in vain.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from stillframe.latch import LOOK_S, later

logger = logging.getLogger("stillframe")

TELL_S = 5.0
"""So long it may last before it is told of."""
_AGAIN_S = 60.0
_SAME_S = 20.0
"""Whoever was told of is not told of again so soon: several waits may follow one another."""

_T = TypeVar("_T")
_told_s: dict[str, float] = {}
"""When each was told of last."""


class Wait:
    """``whom``: what is waited for.  ``limit_s``: for so long at most; ``None``: as long as it gets on.

    Thread: one.
    """

    def __init__(self, whom: str, limit_s: float | None) -> None:
        self._whom = whom
        self._began_s = time.monotonic()
        self._due_s = self._began_s + TELL_S
        self._end_s = None if limit_s is None else self._began_s + limit_s

    def until(self, limit_s: float | None) -> None:
        """It ends in so many seconds from now."""
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def turn(self, doing: str = "") -> None:
        """Tell of it, if it is time.  ``doing``: what is known of the reason.  Never raises."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        told_s = _told_s.get(self._whom, -_SAME_S)
        if now_s - told_s < _SAME_S:
            self._due_s = told_s + _SAME_S
            return
        self._due_s, _told_s[self._whom] = now_s + _AGAIN_S, now_s
        left_s = None if self._end_s is None else max(self._end_s - now_s, 1.0)
        until = "as long as it gets on" if left_s is None else f"{left_s:.0f} s more at most"
        why = f": {doing}" if doing else ""
        with contextlib.suppress(Exception):  # of a log handler
            logger.warning("waiting for %s%s (%.0f s so far; %s)", self._whom, why, now_s - self._began_s, until)


def waited(work: Callable[[], _T], wait: Wait) -> _T:
    """What ``work`` gives or raises, from a thread of its own: so Ctrl-C ends the wait at once, whatever it hangs in.

    What was begun may still be done after that.
    """
    answer = later(work)
    while not answer.wait(LOOK_S):
        wait.turn()
    return answer.get()
