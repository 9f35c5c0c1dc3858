"""The events of a run in order: what each rank did in each run."""

from __future__ import annotations

import bisect
import itertools
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stillframe.checkpoint.events import event_files, read_events
from stillframe.checkpoint.survey import open_root
from stillframe.format.events import (
    Carried,
    End,
    Event,
    KeeperStarted,
    Restore,
    Save,
    SavesInFlight,
    TierTrouble,
    Update,
    Updates,
)

_UNUSUAL = 20
"""An iteration that takes this many times the median is no iteration: events between its ends were dropped."""
_FEW = 10
"""Fewer iterations than this give no median worth showing."""


@dataclass(slots=True)
class RankHistory:
    """What one rank did in one run.  A keeper that was restarted continues the same history."""

    rank: int
    run: str
    started: KeeperStarted | None = None
    saves: list[Save] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    tier_trouble: list[TierTrouble] = field(default_factory=list)
    progress: SavesInFlight | None = None
    """The newest."""
    end: End | None = None

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, KeeperStarted):
                self.started = self.started or event
                self.end = None
            elif isinstance(event, Save):
                self.saves.append(event)
            elif isinstance(event, Updates):
                self.updates += event.updates
            elif isinstance(event, Restore):
                self.restores.append(event)
            elif isinstance(event, Carried):
                self.carried.append(event)
            elif isinstance(event, TierTrouble):
                self.tier_trouble.append(event)
            elif isinstance(event, SavesInFlight):
                self.progress = event
            else:
                self.end = event

    @property
    def committed(self) -> list[Save]:
        return [save for save in self.saves if save.outcome == "committed"]

    @property
    def failed(self) -> list[Save]:
        return [save for save in self.saves if save.outcome != "committed"]

    @property
    def blocked_s(self) -> float:
        """How long training was blocked: in ``save()`` and at fences."""
        return sum(map(save_blocked_s, self.saves)) + sum(update.waited_s for update in self.updates)

    @property
    def span_s(self) -> tuple[float, float] | None:
        """The times of the first and the last update or ``save()``."""
        times = [update.at_s + update.waited_s for update in self.updates] + [save.requested_s for save in self.saves]
        return (min(times), max(times)) if times else None

    def iterations(self) -> list[tuple[float, float]]:
        """From one optimizer step to the next; without any, from one ``fence()`` by hand to the next.

        Where updates were too many to be recorded, iterations are missing.
        """
        steps = [update for update in self.updates if update.begins]
        bounds = steps if len(steps) > 1 else self.updates
        spans = [(one.at_s + one.waited_s, after.at_s) for one, after in itertools.pairwise(bounds)]
        if not spans:
            return []
        usual_s = statistics.median(end_s - begin_s for begin_s, end_s in spans)
        return [(begin_s, end_s) for begin_s, end_s in spans if end_s - begin_s <= _UNUSUAL * usual_s]

    @property
    def cost(self) -> float | None:
        """The share of the time that training was blocked; ``None`` without two events."""
        span = self.span_s
        return self.blocked_s / (span[1] - span[0]) if span and span[1] > span[0] else None

    def blocked_by(self) -> dict[int, float]:
        """Seconds blocked by each step: in its ``save()``, and at the fences until the next ``save()``."""
        ordered = sorted(self.saves, key=lambda save: save.requested_s)
        found = {save.step: save_blocked_s(save) for save in ordered}
        starts = [save.requested_s for save in ordered]
        for update in self.updates:
            before = bisect.bisect_right(starts, update.at_s)
            if before and update.waited_s:
                found[ordered[before - 1].step] += update.waited_s
        return found


def beside_saves(history: RankHistory) -> float | None:
    """The median iteration during a save, divided by that without one; ``None`` if there are too few of either."""
    flights = [(save.requested_s, save.committed_s or save.at_s) for save in history.saves]
    beside: list[float] = []
    alone: list[float] = []
    for begin_s, end_s in history.iterations():
        is_beside = any(start_s < end_s and begin_s < until_s for start_s, until_s in flights)
        (beside if is_beside else alone).append(end_s - begin_s)
    if min(len(beside), len(alone)) < _FEW:
        return None
    return statistics.median(beside) / statistics.median(alone)


def save_blocked_s(save: Save) -> float:
    return (save.returned_s or save.requested_s) - save.requested_s


def rate(save: Save) -> float | None:
    """Bytes per second, from the first byte flushed until all were durable."""
    if save.flush_begin_s is None or save.sealed_s is None or save.sealed_s <= save.flush_begin_s:
        return None
    return save.bytes / (save.sealed_s - save.flush_begin_s)


def histories(root: str | os.PathLike[str]) -> list[RankHistory]:
    """The histories of all ranks and runs that have events in the root, in the order in which they began."""
    store = open_root(root).store
    found = []
    for (rank, run), keys in event_files(store).items():
        found.append(RankHistory(rank, run))
        found[-1].add(read_events(store, keys))
    return in_order(found)


def in_order(found: Iterable[RankHistory]) -> list[RankHistory]:
    return sorted(found, key=lambda each: (each.started.at_s if each.started else 0.0, each.rank))


def newest(found: Sequence[RankHistory]) -> list[RankHistory]:
    """The ranks of the last run, of histories in order.

    An run with two saves or more wins over one with fewer: a single save may be an import.
    """
    if not found:
        return []
    last = max(reversed(found), key=lambda each: min(len(each.saves), 2))
    return [each for each in found if each.run == last.run]
