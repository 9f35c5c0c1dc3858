"""A moment in which nothing is asked of a device: for the capture of a graph."""

from __future__ import annotations

import contextlib
import math
import time

from stillframe.errors import DeadlineError
from stillframe.latch import LOOK_S, Answer
from stillframe.save.saves import Saves
from stillframe.save.stager import Stager


def quiesce(saves: Saves, stager: Stager, timeout_s: float | None) -> None:
    """Blocks until every save is staged or has failed, and the arena is pinned.  Raises :class:`DeadlineError`."""
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    saves.wait_all("staged", timeout_s)
    if not stager.wait_idle(deadline_s):
        raise DeadlineError(f"after {timeout_s:g} s saves are still being copied")
    done: Answer[None] = Answer()

    def pin_all() -> None:
        while stager.arena is not None and stager.arena.touch_one():
            pass

    stager.run_soon(lambda: done.run(pin_all))
    while not done.is_given:
        if time.monotonic() >= deadline_s:
            raise DeadlineError(f"after {timeout_s:g} s the arena is still being pinned")
        with contextlib.suppress(DeadlineError):
            done.get(min(LOOK_S, max(deadline_s - time.monotonic(), 0.0)))
        stager.look_after()
    done.get()
