"""A run's events put in order, for those who show them."""

from __future__ import annotations

import bisect
import itertools
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from stillframe.checkpoint.events import event_files, read_events
from stillframe.checkpoint.survey import check_root
from stillframe.format import events
from stillframe.format.events import End, KeeperStarted, Restore, Save, SavesInFlight, Update

_UNUSUAL = 20
_FEW = 5


@dataclass(slots=True)
class RankHistory:
    """What one rank did in one attempt; a keeper that was started again goes on in the same one."""

    rank: int
    attempt: str
    run: KeeperStarted | None = None
    saves: list[Save] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    progress: SavesInFlight | None = None
    """The last one."""
    end: End | None = None

    @property
    def committed(self) -> list[Save]:
        return [save for save in self.saves if save.outcome == "committed"]

    @property
    def failed(self) -> list[Save]:
        return [save for save in self.saves if save.outcome != "committed"]

    @property
    def blocked_s(self) -> float:
        """What training has waited: in ``save()`` and at fences."""
        return sum(map(save_blocked_s, self.saves)) + sum(update.waited_s for update in self.updates)

    @property
    def span_s(self) -> tuple[float, float] | None:
        """From the first to the last that is known of training itself."""
        times = [update.at_s + update.waited_s for update in self.updates] + [save.requested_s for save in self.saves]
        return (min(times), max(times)) if times else None

    def iterations(self) -> list[tuple[float, float]]:
        """From one update to the next; where updates between two saves were too many to be told of, nothing."""
        spans = [(one.at_s + one.waited_s, after.at_s) for one, after in itertools.pairwise(self.updates)]
        if not spans:
            return []
        usual_s = statistics.median(end_s - begin_s for begin_s, end_s in spans)
        return [(begin_s, end_s) for begin_s, end_s in spans if end_s - begin_s <= _UNUSUAL * usual_s]

    @property
    def cost(self) -> float | None:
        """The share of the time that training was blocked; ``None`` if too little is known."""
        span = self.span_s
        return self.blocked_s / (span[1] - span[0]) if span and span[1] > span[0] else None

    def blocked_by(self) -> dict[int, float]:
        """Seconds blocked by each step: in its ``save()``, and at the fences until the next one."""
        ordered = sorted(self.saves, key=lambda save: save.requested_s)
        found = {save.step: save_blocked_s(save) for save in ordered}
        starts = [save.requested_s for save in ordered]
        for update in self.updates:
            before = bisect.bisect_right(starts, update.at_s)
            if before and update.waited_s:
                found[ordered[before - 1].step] += update.waited_s
        return found


def beside_saves(history: RankHistory) -> float | None:
    """The median iteration beside a save in flight over that of others; ``None`` if there are too few of either."""
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
    """Bytes a second, from the first byte flushed until all were durable."""
    if save.flush_begin_s is None or save.sealed_s is None or save.sealed_s <= save.flush_begin_s:
        return None
    return save.bytes / (save.sealed_s - save.flush_begin_s)


def histories(root: str | os.PathLike[str]) -> list[RankHistory]:
    """Of every rank and attempt that has left events here, in the order in which they began."""
    path = check_root(root)
    found = [gather(rank, attempt, read_events(files)) for (rank, attempt), files in event_files(path).items()]
    return sorted(found, key=lambda each: (each.run.at_s if each.run else 0.0, each.rank))


def newest(found: list[RankHistory]) -> list[RankHistory]:
    """The ranks of the last attempt that was a run: one save alone is what an import makes."""
    ordered = sorted(found, key=lambda each: min(len(each.saves), 2))  # stable: of equals the last began last
    return [each for each in found if each.attempt == ordered[-1].attempt]


def gather(rank: int, attempt: str, told: Iterable[events.Event]) -> RankHistory:
    history = RankHistory(rank, attempt)
    add(history, told)
    return history


def add(history: RankHistory, told: Iterable[events.Event]) -> None:
    for event in told:
        if isinstance(event, KeeperStarted):
            history.run = history.run or event
            history.end = None
        elif isinstance(event, Save):
            history.saves.append(event)
        elif isinstance(event, events.Updates):
            history.updates += event.updates
        elif isinstance(event, Restore):
            history.restores.append(event)
        elif isinstance(event, SavesInFlight):
            history.progress = event
        else:
            history.end = event
