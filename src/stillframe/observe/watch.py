"""The current state of a run, read from the files in its root by another process, on any node that sees them."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass

from stillframe.checkpoint.events import event_files
from stillframe.checkpoint.notes import read_tiers
from stillframe.checkpoint.survey import Survey, survey
from stillframe.errors import StorageError
from stillframe.format.events import InFlight, Save, decode_lines
from stillframe.observe.history import RankHistory, in_order, newest
from stillframe.observe.tiers import Standing, standings
from stillframe.store import is_url, open_store
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Store, read_range

_PHASES = ("staging", "flushing", "sealed")
_LINE_BYTES = 4096
"""The first line of a file of events, which tells of its keeper, is shorter."""
_NEWEST = 8
"""How many of the newest steps are surveyed; those in flight are among them."""
_LAST, _PACED = 3, 20
"""So many saves are told of, and so many iterations counted for the pace."""


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
    """Bytes per second since the previous frame."""
    sealed: int
    """How many ranks have sealed it."""
    lagging: tuple[int, ...]
    """The ranks that have not, once another has."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A run at one moment.  Figures of the last run, if no run is active."""

    at_s: float
    root: str
    is_running: bool
    state: str
    """``training``, ``finishing`` (only keepers are left) or ``ended``."""
    world_size: int
    is_closed: bool
    """All ranks ended with ``close()``."""
    alive: int
    """Ranks whose keeper is alive, according to the locks."""
    step: int | None
    """The newest step that was passed to ``save()``."""
    moving: tuple[Moving, ...]
    committed: int | None
    committed_age_s: float | None
    saves: int
    """Committed."""
    failed: int
    blocked_s: float
    """Of the rank that was blocked longest."""
    cost: float | None
    """The share of the time that it was blocked."""
    arena_bytes: int
    arena_used_bytes: int
    """Of the rank whose arena is fullest."""
    at_risk_s: float | None
    """Training that would be lost if every process died now: since the last committed ``save()``, or the start."""
    tiers: tuple[Standing, ...]
    iterations_per_s: float | None = None
    """Of the last ones, on the slowest rank."""
    checkpoint_bytes: int | None = None
    """Of the newest, over all ranks."""
    free_bytes: int | None = None
    """What is left in the file system of the root; of an object store nothing is known."""
    last: tuple[Done, ...] = ()
    """The newest that were committed, the newest first."""


@dataclass(frozen=True, slots=True)
class Done:
    """A save that was committed, on the rank where it took longest."""

    step: int
    seconds: float
    """From ``save()`` to the commit."""
    blocked_s: float


class Follower:
    """Follows a run: each look reads what was appended since the one before.  Changes nothing."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = root
        self._read: dict[bytes, int] = {}
        self._histories: dict[tuple[int, str], RankHistory] = {}
        self._before: dict[int, tuple[float, int]] = {}

    def look(self) -> Frame:
        """Raises :class:`NotFoundError` if it is no root."""
        found = survey(self._root, newest=_NEWEST)
        store = open_store(found.root)
        for (rank, run), keys in event_files(store).items():
            own = self._histories.setdefault((rank, run), RankHistory(rank, run))
            for key in keys:
                own.add(decode_lines(self._news(store, key)))
        return self._frame(found, time.time())

    def _news(self, store: Store, key: str) -> bytes:
        """The whole lines that are new.  A file is identified by its first line, because rotation renames it."""
        try:
            first = read_range(store, key, 0, _LINE_BYTES).partition(b"\n")[0]
            at = self._read.get(first, 0)
            info = store.head(key)
            data = read_range(store, key, at, max(info.size - at, 0)) if info is not None else b""
        except StorageError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._read[first] = at + len(whole)
        return whole

    def _frame(self, found: Survey, now_s: float) -> Frame:
        owner = next(iter(found.owners.values()), None)
        ranks = in_order(self._histories.values())
        ranks = newest(ranks) if owner is None else [each for each in ranks if each.run == owner.run]
        world_size = max((each.started.world_size for each in ranks if each.started), default=0)
        moving = self._moving(found, ranks, world_size, now_s)
        steps = [each.step for each in moving] + [save.step for each in ranks for save in each.saves]
        arenas = [(each.progress.arena_used_bytes, each.progress.arena_bytes) for each in ranks if each.progress]
        arena_used_bytes, arena_bytes = max(arenas, default=(0, 0))
        last = _last_commit(ranks)
        notes = read_tiers(open_store(found.root))
        is_running = owner is not None and owner.state == "training"
        return Frame(
            at_s=now_s,
            root=found.root,
            is_running=is_running,
            state=owner.state if owner else "ended",
            world_size=world_size,
            is_closed=all(each.end is not None and each.end.is_closed for each in ranks),
            alive=len(found.owners),
            step=max(steps, default=None),
            moving=moving,
            committed=found.latest,
            committed_age_s=now_s - last.committed_s if last and last.committed_s else None,
            saves=max((len(each.committed) for each in ranks), default=0),
            failed=max((len(each.failed) for each in ranks), default=0),
            blocked_s=max((each.blocked_s for each in ranks), default=0.0),
            cost=max((each.cost for each in ranks if each.cost is not None), default=None),
            arena_bytes=arena_bytes,
            arena_used_bytes=arena_used_bytes,
            at_risk_s=_at_risk_s(ranks, last, now_s) if is_running else None,
            tiers=tuple(standings(notes, list(self._histories.values()), ranks, found.latest)),
            iterations_per_s=min(filter(None, map(_pace, ranks)), default=None) if is_running else None,
            checkpoint_bytes=next((step.bytes for step in reversed(found.with_state("committed"))), None),
            free_bytes=_free_bytes(found.root),
            last=_last_done(ranks),
        )

    def _moving(self, found: Survey, ranks: list[RankHistory], world_size: int, now_s: float) -> tuple[Moving, ...]:
        made = []
        for step, saves in sorted(_in_flight(ranks).items()) if found.owners else ():
            sealed_by = next((each.here for each in found.steps if each.step == step), ())
            flushed_bytes = sum(save.flushed_bytes for save in saves)
            before_s, before_bytes = self._before.get(step, (now_s, 0))
            self._before[step] = now_s, flushed_bytes
            made.append(
                Moving(
                    step=step,
                    phase=min((save.phase for save in saves), key=_PHASES.index),
                    requested_s=min(save.requested_s for save in saves),
                    total_bytes=sum(save.total_bytes for save in saves),
                    staged_bytes=sum(save.staged_bytes for save in saves),
                    flushed_bytes=flushed_bytes,
                    rate=(flushed_bytes - before_bytes) / (now_s - before_s) if now_s > before_s else None,
                    sealed=len(sealed_by),
                    lagging=tuple(sorted(set(range(world_size)) - set(sealed_by))) if sealed_by else (),
                )
            )
        return tuple(made)


def _in_flight(ranks: list[RankHistory]) -> dict[int, list[InFlight]]:
    """The saves in flight, by step; one for each rank."""
    found: dict[int, list[InFlight]] = {}
    for each in ranks:
        if each.end is None and each.progress is not None:
            for save in each.progress.saves:
                found.setdefault(save.step, []).append(save)
    return found


def _last_commit(ranks: list[RankHistory]) -> Save | None:
    committed = [save for each in ranks for save in each.committed]
    return max(committed, key=lambda save: save.committed_s or 0.0, default=None)


def _last_done(ranks: list[RankHistory]) -> tuple[Done, ...]:
    found: dict[int, Done] = {}
    for each in ranks:
        blocked = each.blocked_by()
        for save in each.committed[-_LAST:]:
            took_s = (save.committed_s or save.requested_s) - save.requested_s
            known = found.get(save.step)
            if known is None or known.seconds < took_s:
                found[save.step] = Done(save.step, took_s, blocked[save.step])
    return tuple(found[step] for step in sorted(found, reverse=True)[:_LAST])


def _pace(rank: RankHistory) -> float | None:
    """Iterations a second, as the last ones went; ``None`` if there were none."""
    spans = [end_s - begin_s for begin_s, end_s in rank.iterations()[-_PACED:]]
    usual_s = statistics.median(spans) if spans else 0.0
    return 1 / usual_s if usual_s > 0 else None


def _free_bytes(root: str) -> int | None:
    with contextlib.suppress(StorageError):
        if not is_url(root):
            disk = PosixStore(root).space()
            return disk.f_bavail * disk.f_frsize
    return None


def _at_risk_s(ranks: list[RankHistory], last: Save | None, now_s: float) -> float | None:
    """The time since the state that a restart would find: the last commit, the last restore, or the start."""
    starts = [each.started.at_s for each in ranks if each.started]
    restores = [restore.at_s for each in ranks for restore in each.restores]
    since_s = last.requested_s if last else max(restores, default=None) or min(starts, default=None)
    return max(now_s - since_s, 0.0) if since_s else None
