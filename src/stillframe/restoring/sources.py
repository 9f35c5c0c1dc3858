"""Where checkpoints can be read from: the root, then its tiers, the nearest first."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from stillframe.checkpoint.catalog import Catalog, View
from stillframe.checkpoint.promote import check_same_run
from stillframe.checkpoint.tiers import do_not_count
from stillframe.errors import (
    DeadlineError,
    ExistsError,
    IntegrityError,
    NotFoundError,
    StillframeError,
    StorageError,
    VersionError,
    text_of,
)
from stillframe.latch import LOOK_S, later
from stillframe.lineage import Branch
from stillframe.model import SaveId
from stillframe.store import silence
from stillframe.waits import Wait

logger = logging.getLogger("stillframe")

_PATIENCE_S = 20.0
"""So long a tier may take to say what it holds."""


class OwnPart(Catalog):
    """This rank's part of what was carried to a tier, also of a save that was never committed there.

    Where the ranks do not share their roots, a save is complete when every rank has its part, wherever that is.
    """

    def __init__(self, tier: Catalog, rank: int) -> None:
        super().__init__(tier.store, rank)
        self.tier = tier

    def is_committed(self, save: SaveId) -> bool:
        if self.store.head(self.tier.aside_key(save)) is not None and not self.tier.is_void(save):
            return False
        return super().is_committed(save)


class Sources:
    """Thread: the caller's.

    ``world_size``: of the ranks that restore.  A tier that cannot be reached counts as not having anything;
    :attr:`trouble` says why, for when nothing is found.
    """

    def __init__(self, root: Catalog, tiers: Sequence[Catalog], world_size: int) -> None:
        self._root = root
        self._places = [root, *tiers]
        self._all = [root, *itertools.chain.from_iterable(map(self._of_tier, tiers))]
        self._world_size = world_size
        self._has_told = False
        self._silent: set[str] = set()
        """Tiers that could not be looked at: nobody waits for them again."""
        self.trouble = ""
        self.unreached = ""
        """Of a tier that may hold something of ours."""
        self._lost = ""
        """Of one that was given up after the choice."""
        self._run_names: dict[tuple[str, int], str] = {}
        self._chosen: tuple[SaveId, str] | None = None
        self.unfit: dict[SaveId, int] = {}
        self.listed: frozenset[SaveId] = frozenset()
        """What the last look found on the branch, whether it can be read or not."""
        """What the last look skipped: it was saved by another number of ranks, which is given."""

    def _of_tier(self, tier: Catalog) -> list[Catalog]:
        return [tier] if self._root.rank is None else [tier, OwnPart(tier, self._root.rank)]

    @property
    def has_tiers(self) -> bool:
        return len(self._places) > 1

    @property
    def names(self) -> str:
        return " and ".join(each.root for each in self._places)

    @property
    def reachable(self) -> list[Catalog]:
        return [each for each in self._places if each.root not in self._silent]

    def _views(self) -> Iterator[tuple[Catalog, View]]:
        """Raises what the root raises.  A tier that does not answer holds nobody up for long."""
        asked = [(each, later(partial(self._look, each))) for each in self.reachable[1:]]
        yield self._root, self._root.look()
        end_s = time.monotonic() + _PATIENCE_S
        for tier, answer in asked:
            wait = Wait(tier.root, end_s - time.monotonic())
            while not answer.wait(min(LOOK_S, max(end_s - time.monotonic(), 0.0))) and time.monotonic() < end_s:
                wait.turn("what does it hold?")
            try:
                if not answer.is_given:
                    raise DeadlineError(silence(tier.store, _PATIENCE_S))
                yield tier, answer.get()
            except (StorageError, IntegrityError, VersionError, DeadlineError, ExistsError) as error:
                self._give_up(tier, error)

    def _look(self, tier: Catalog) -> View:
        """Another run's saves may be called the same: they are never taken for ours."""
        check_same_run(self._root, tier)
        return tier.look()

    def _give_up(self, tier: Catalog, error: StillframeError) -> None:
        self._silent.add(tier.root)
        why = f"{tier.root} cannot be read: {text_of(error)}"
        self.trouble = self.trouble or why
        if not isinstance(error, ExistsError):  # else it holds nothing of ours
            self.unreached = self.unreached or why
            self._lost = self._lost or why
        logger.warning("%s is not restored from: %s", tier.root, text_of(error))

    def off_branch(self) -> list[tuple[Catalog, SaveId]]:
        """What is whole in a tier, or was set aside there as damaged, and lies on no branch that is known."""
        found = []
        for catalog, view in self._views():
            for save in view.saves if catalog is not self._root else ():
                aside = catalog.aside(save)
                if catalog.is_committed(save) or (aside is not None and aside.reason == "quarantined"):
                    found.append((catalog, save))
        return found

    def seen(self, step: int | None, skipped: Collection[SaveId]) -> Iterator[SaveId]:
        """Every save on the branch that can be read from somewhere, the newest first; looks at one after the other.

        The branch is that of the latest epoch that any of them knows.
        """
        views = list(self._views())
        branch = max((view.branch for _, view in views), key=_age)
        self._tell_left(views[0][1], branch)
        saves = {save for _, view in views for save in view.saves if branch.has(save) and step in (None, save.step)}
        self.unfit, self.listed = {}, frozenset(saves)
        for save in sorted(saves - set(skipped), reverse=True):
            if next(self.having(save), None) is not None:
                self.unfit.pop(save, None)  # its own part did not do, but there is all of it
                yield save

    def _tell_left(self, view: View, branch: Branch) -> None:
        """Once: checkpoints of the root that a later epoch in a tier has gone back from."""
        left = [] if self._has_told else [each for each in view.saves if view.branch.has(each) and not branch.has(each)]
        steps = sorted({save.step for save in left if self._root.is_committed(save)})
        if steps:
            self._has_told = True
            logger.warning("%s", do_not_count(steps, self._root.root))

    def tell(self, save: SaveId, source: Catalog) -> None:
        """Where it was restored from, if it is not the root."""
        if source is not self._root:
            logger.warning("step %d is restored from %s, not from %s", save.step, source.root, self._root.root)

    def having(self, save: SaveId, after: Catalog | None = None) -> Iterator[Catalog]:
        """Those that have it, the nearest first; only those behind ``after``, if that is given."""
        first = 0 if after is None else self._all.index(after) + 1
        for catalog in self._all[first:]:
            if catalog.root in self._silent:
                continue
            try:
                is_whole_there = isinstance(catalog, OwnPart) and catalog.tier.is_committed(save)
                is_there = not is_whole_there and catalog.is_committed(save) and self._is_of_run(catalog, save)
                if is_there and self._is_enough(catalog, save):
                    yield catalog
            except StorageError as error:
                if catalog is self._root:
                    raise
                self._give_up(catalog, error)

    def _is_enough(self, catalog: Catalog, save: SaveId) -> bool:
        """Whether this rank can go by what is there: its own part alone is of no use to another number of ranks."""
        if catalog.rank is None or not self.has_tiers:
            return True
        try:
            size = catalog.manifest(save).world_size
        except (IntegrityError, VersionError, NotFoundError):
            return True  # it is met when it is read
        if size != self._world_size:
            self.unfit[save] = size
        return size == self._world_size

    # --- whose it is -----------------------------------------------------------------------

    def runs_of(self, save: SaveId) -> list[str]:
        """The runs that have made a save of this name, as far as is told: that of the nearest place first.

        A place that is nobody's yet may be given any run's tiers, so two of them may hold different runs' saves.
        """
        if self._root.rank is None and not self.has_tiers:
            return []
        runs = self._told_by(self.reachable, save)
        return runs if len(runs) < 2 else self._told_by(self.having(save), save)

    def _told_by(self, places: Iterable[Catalog], save: SaveId) -> list[str]:
        found = []
        for place in places:
            try:
                found.append(self._run_of(place, save.epoch))
            except StorageError as error:
                if place is self._root:
                    raise
                self._give_up(place, error)
        return list(dict.fromkeys(filter(None, found)))

    def _run_of(self, place: Catalog, epoch: int) -> str:
        """The name of the run whose epoch it is there; empty if nothing tells.  Raises :class:`StorageError`."""
        key = place.root, epoch
        if key not in self._run_names:
            with contextlib.suppress(IntegrityError, VersionError):
                if (parent := place.parent(epoch)) is not None:
                    self._run_names[key] = parent.run
        return self._run_names.get(key, "")

    def _is_of_run(self, place: Catalog, save: SaveId) -> bool:
        """Whether what is called so there is what the ranks have chosen."""
        if self._chosen is None or self._chosen[0] != save or not self._chosen[1]:
            return True
        return self._run_of(place, save.epoch) in ("", self._chosen[1])

    # --- reading it ------------------------------------------------------------------------

    def choose(self, save: SaveId, run: str) -> None:
        """From now on it is read from places of this run alone, if it is named."""
        self._chosen, self._lost = (save, run), ""

    def hold(self, save: SaveId, claim: Callable[[Catalog], None]) -> None:
        """Claim the run's epoch in the tiers that have the save, so that nobody removes there what was chosen.

        Whoever chooses has claimed before it lists; of a tier it is known only now that it is needed.
        """
        if next(self.having(save), None) is not self._root:
            for tier in list(self.having(save)):
                if tier is not self._root:
                    claim(tier)

    def nearest(self, save: SaveId) -> Catalog:
        """Raises: :class:`NotFoundError` if none has it; :class:`StorageError` if that cannot be determined."""
        found = next(self.having(save), None)
        if found is not None:
            return found
        if self.unreached:
            raise _cannot_read(save, self.unreached)
        raise NotFoundError(f"{save} is not in {self.names}")

    def next_after(self, save: SaveId, source: Catalog) -> Catalog | None:
        """Another one that has it.  Raises :class:`StorageError` if one was lost since the choice, which may have it.

        One that was down before costs no more than age: then it is as if it was not there.
        """
        found = next(self.having(save, source), None)
        if found is None and self._lost:
            raise _cannot_read(save, self._lost)
        return found

    def is_gone(self, save: SaveId) -> bool:
        """Raises :class:`StorageError` if that cannot be determined."""
        found = next(self.having(save), None)
        if found is None and self._lost:
            raise _cannot_read(save, self._lost)
        return found is None


def _cannot_read(save: SaveId, trouble: str) -> StorageError:
    return StorageError(
        f"{save} was chosen, but {trouble.rstrip('.?')}. Nothing says that it is damaged: restore again when that tier "
        "answers. To do without it, leave it out"
    )


def _age(branch: Branch) -> int:
    return branch.epoch or 0
