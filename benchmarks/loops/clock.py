"""When saves begin and end, and when updates end: the same for every framework."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from stillframe.observe.history import histories

_NOT_COUNTED = 2
"""The first steps of a turn."""


@dataclass(frozen=True)
class Turn:
    """What was counted.  A save belongs to the wait at the update behind it, so there are as many of both."""

    saves_s: list[float]
    waits_s: list[float]
    iterations_s: list[float]
    end_s: float


class Clock:
    """Notes the times of one turn, which ends with the ``with``.  Thread: the training thread's."""

    def __init__(self) -> None:
        self._saves_s: list[float] = []
        self._updated_s: list[float] = []
        self._began_s = self._ended_s = 0.0

    def __enter__(self) -> Clock:
        self._hook = register_optimizer_step_post_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended_s = time.perf_counter()
        self._hook.remove()

    def _note(self, *_: Any) -> None:
        self._updated_s.append(time.perf_counter())

    def begin_save(self) -> None:
        self._began_s = time.perf_counter()

    def end_save(self) -> None:
        self._saves_s.append(time.perf_counter() - self._began_s)

    @contextmanager
    def saving(self) -> Iterator[None]:
        self.begin_save()
        yield
        self.end_save()

    def turn(self, root: Path) -> Turn:
        """``root``: of stillframe, if there is one; it knows what each update has waited."""
        updates = [update for history in (histories(root) if root.exists() else []) for update in history.updates]
        saves_s = self._saves_s[_NOT_COUNTED:-1]  # behind the last there is no update
        waits_s = [update.waited_s for update in updates[-len(saves_s) :]] if updates else [0.0] * len(saves_s)
        iterations_s = [after - one for one, after in itertools.pairwise(self._updated_s)][_NOT_COUNTED:]
        return Turn(saves_s, waits_s, iterations_s, self._ended_s - self._updated_s[-1])
