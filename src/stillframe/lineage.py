"""Which saves lie on the branch that training is on: pure functions of what the epochs say.

A run that restores, is started again, or goes back begins a new *epoch*.  Each epoch goes on from one save, its parent,
so a save of an earlier epoch counts only up to the step where its successor left it.  What lies beyond (an abandoned
branch, the late commit of a paused keeper, a damaged step that training passes again) is off the branch, and can
neither win nor collide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stillframe.model import SaveId


class Row(NamedTuple):
    """An epoch of the past, and the greatest of its steps that counts."""

    epoch: int
    last_step: int


class Branch(NamedTuple):
    """An epoch, and those that it goes on from, the newest first.

    ``epoch``: of it every save counts; ``None`` if there is no epoch yet.
    """

    epoch: int | None
    lineage: tuple[Row, ...] = ()
    parent: SaveId | None = None
    """What the epoch goes on from: no other attempt at that step counts, even if it is committed later."""

    def has(self, save: SaveId) -> bool:
        if save.epoch == self.epoch:
            return True
        if self.parent is not None and (save.step, save.epoch) == (self.parent.step, self.parent.epoch):
            return save == self.parent
        return any(save.epoch == row.epoch and save.step <= row.last_step for row in self.lineage)

    def of(self, saves: Iterable[SaveId]) -> dict[int, list[SaveId]]:
        """Those that lie on it, by step in rising order, for each step the newest first."""
        found: dict[int, list[SaveId]] = {}
        for save in sorted((each for each in saves if self.has(each)), reverse=True):
            found.setdefault(save.step, []).append(save)
        return dict(sorted(found.items()))


def continue_from(parent: SaveId | None, its_lineage: Sequence[Row]) -> tuple[Row, ...]:
    """The lineage of an epoch that goes on from ``parent``, whose own epoch has ``its_lineage``."""
    if parent is None:
        return ()
    rows = [Row(parent.epoch, parent.step)]
    rows += [Row(row.epoch, min(row.last_step, parent.step)) for row in its_lineage if row.epoch < parent.epoch]
    return tuple(rows)


def recover(parents: Mapping[int, SaveId | None], newest: int) -> Branch:
    """The branch of an epoch as far as the parents tell that manifests name, where the epochs' own files are lost."""
    rows: list[Row] = []
    at = parents.get(newest)
    limit = at.step if at is not None else 0
    while at is not None:
        limit = min(limit, at.step)
        rows.append(Row(at.epoch, limit))
        following = parents.get(at.epoch)
        at = following if following is not None and following.epoch < at.epoch else None
    return Branch(newest, tuple(rows), parents.get(newest))
