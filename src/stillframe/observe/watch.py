"""A run as it is right now, seen from outside: through the files it writes, from any node that sees them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from stillframe.checkpoint.events import event_files
from stillframe.checkpoint.survey import Survey, survey
from stillframe.format.events import InFlight, decode_lines
from stillframe.observe import history
from stillframe.observe.history import RankHistory

_NEWEST = 8
"""Steps that are looked at: those in flight are among them."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A save in flight, over all ranks."""

    step: int
    phase: str
    requested_s: float
    total_bytes: int
    staged_bytes: int
    flushed_bytes: int
    rate: float | None
    """Bytes a second since the frame before."""
    sealed: int
    """Ranks that have done their part."""
    lagging: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    at_s: float
    root: Path
    is_running: bool
    state: str
    world_size: int
    is_closed: bool
    """The last run that ended said so itself."""
    alive: int
    """Ranks whose keeper lives, as far as locks tell."""
    step: int | None
    """The newest that was asked for."""
    moving: tuple[Moving, ...]
    committed: int | None
    committed_age_s: float | None
    saves: int
    failed: int
    blocked_s: float
    """Of the rank that has waited longest."""
    cost: float | None
    arena_bytes: int
    arena_used_bytes: int
    """Of the rank whose arena is fullest."""
    at_risk_s: float | None
    """Training that would be lost if everything died now: since the last committed ``save()``, or the start."""


class Follower:
    """Reads what has been added since it last looked; changes nothing."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = root
        self._read: dict[bytes, int] = {}
        self._histories: dict[tuple[int, str], RankHistory] = {}
        self._before: dict[int, tuple[float, int]] = {}

    def look(self) -> Frame:
        """Raises :class:`NotFoundError` if it is no root."""
        found = survey(self._root, newest=_NEWEST)
        for (rank, attempt), paths in event_files(found.root).items():
            own = self._histories.setdefault((rank, attempt), RankHistory(rank, attempt))
            for path in paths:
                history.add(own, decode_lines(self._news(path)))
        return self._frame(found, time.time())

    def _news(self, path: Path) -> bytes:
        """Whole lines that are new.  A file is known by its first line: it may get another name."""
        try:
            with path.open("rb") as file:
                first = file.readline()
                at = self._read.get(first, 0)
                file.seek(at)
                data = file.read()
        except OSError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._read[first] = at + len(whole)
        return whole

    def _frame(self, found: Survey, now_s: float) -> Frame:
        ordered = sorted(self._histories.values(), key=lambda each: (each.run.at_s if each.run else 0.0, each.rank))
        holder = next(iter(found.holders.values()), None)
        last = [each for each in ordered if holder is not None and each.attempt == holder.attempt]
        if holder is None and ordered:
            last = history.newest(ordered)
        world_size = max((each.run.world_size for each in last if each.run), default=0)
        committed = [save for each in last for save in each.committed]
        newest = max(committed, key=lambda save: save.committed_s or 0.0, default=None)
        began = min((each.run.at_s for each in last if each.run), default=None)
        resumed = max((restore.at_s for each in last for restore in each.restores), default=None)
        safe_since = newest.requested_s if newest else (resumed or began)
        moving = self._moving(found, last, world_size, now_s) if found.holders else ()
        steps = [each.step for each in moving] + [save.step for each in last for save in each.saves]
        arenas = [(each.progress.arena_used_bytes, each.progress.arena_bytes) for each in last if each.progress]
        used, size = max(arenas, default=(0, 0))
        is_running = holder is not None and holder.state == "training"
        return Frame(
            now_s, found.root, is_running, holder.state if holder else "ended", world_size,
            all(each.end is not None and each.end.is_closed for each in last), len(found.holders),
            max(steps, default=None), moving, found.latest,
            now_s - newest.committed_s if newest and newest.committed_s else None,
            max((len(each.committed) for each in last), default=0), max((len(each.failed) for each in last), default=0),
            max((each.blocked_s for each in last), default=0.0),
            max((each.cost for each in last if each.cost is not None), default=None),
            size, used, max(now_s - safe_since, 0.0) if is_running and safe_since else None,
        )  # fmt: skip

    def _moving(self, found: Survey, last: list[RankHistory], world_size: int, now_s: float) -> tuple[Moving, ...]:
        parts: dict[int, dict[int, InFlight]] = {}
        for each in last:
            if each.end is None and each.progress is not None:
                for save in each.progress.saves:
                    parts.setdefault(save.step, {})[each.rank] = save
        made = []
        for step, by_rank in sorted(parts.items()):
            flushed = sum(save.flushed_bytes for save in by_rank.values())
            here = next((each.here for each in found.steps if each.step == step), ())
            lagging = sorted(set(range(world_size)) - set(here)) if here else []
            phases = [save.phase for save in by_rank.values()]
            phase = next(name for name in ("staging", "flushing", "sealed") if name in phases)
            before = self._before.get(step)
            speed = (flushed - before[1]) / (now_s - before[0]) if before and now_s > before[0] else None
            self._before[step] = now_s, flushed
            made.append(
                Moving(
                    step, phase, min(save.requested_s for save in by_rank.values()),
                    sum(save.total_bytes for save in by_rank.values()),
                    sum(save.staged_bytes for save in by_rank.values()), flushed, speed, len(here), tuple(lagging),
                )
            )  # fmt: skip
        return tuple(made)
