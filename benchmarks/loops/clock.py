"""When saves begin and end, and when updates end: the same for every framework."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from stillframe.observe.history import RankHistory, histories

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
        self._waits_s: list[float] = []
        self._began_s = self._ended_s = 0.0

    def __enter__(self) -> Clock:
        self._hook = register_optimizer_step_post_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended_s = time.perf_counter()
        self._hook.remove()

    def _note(self, optimizer: Any, *_: Any) -> None:
        if hasattr(optimizer, "optimizers"):
            return  # a container; those in it are noted
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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Before an update, for frameworks that have a call for it."""
        began_s = time.perf_counter()
        yield
        self._waits_s.append(time.perf_counter() - began_s)

    def turn(self, root: Path, rank: int = 0) -> Turn:
        """Of this rank.  ``root``: of stillframe, if there is one; it knows what each update has waited."""
        found = histories(root) if root.exists() else []
        saves_s = self._saves_s[_NOT_COUNTED:-1]  # behind the last there is no update
        waits_s = self._waits_s or [each for history in found if history.rank == rank for each in _waits(history)]
        waits_s = waits_s[-len(saves_s) :] if waits_s else [0.0] * len(saves_s)
        iterations_s = [after - one for one, after in itertools.pairwise(self._updated_s)][_NOT_COUNTED:]
        return Turn(saves_s, waits_s, iterations_s, self._ended_s - self._updated_s[-1])


def _waits(history: RankHistory) -> list[float]:
    """Of each update: what it has waited, with the fences since the one before."""
    waits_s, since_s = [], 0.0
    for update in history.updates:
        since_s += update.waited_s
        if update.begins:
            waits_s.append(since_s)
            since_s = 0.0
    return waits_s


def slowest(turns: Sequence[Turn]) -> Turn:
    """Of the ranks of one turn: they wait for one another, so what blocks one blocks all."""
    lists = [[turn.saves_s for turn in turns], [turn.waits_s for turn in turns], [turn.iterations_s for turn in turns]]
    saves_s, waits_s, iterations_s = ([max(each) for each in zip(*some, strict=True)] for some in lists)
    return Turn(saves_s, waits_s, iterations_s, max(turn.end_s for turn in turns))
