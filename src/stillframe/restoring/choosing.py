"""Which step is restored: what each rank offers, and what rank 0 chooses from all offers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import IntegrityError, MismatchError, NotFoundError, StorageError
from stillframe.model import SaveId
from stillframe.ranks.group import Answer, Group, check_same
from stillframe.restoring.selection import Wanted
from stillframe.restoring.sources import Sources
from stillframe.units import format_ranks


class Unfit(msgspec.Struct, frozen=True):
    """A save in roots that are not shared, which another number of ranks has made."""

    save: SaveId
    world_size: int


class Offer(msgspec.Struct, frozen=True):
    """What a rank brings to the choice: what was asked for, and the checkpoints it sees."""

    wanted: Wanted
    seen: list[SaveId] = []
    """The newest first; of a shared root only the one that it would choose."""
    runs: list[list[str]] = []
    """For each of them: the runs that it is seen of, the nearest first; none if nothing tells."""
    unfit: list[Unfit] = []
    """Those that this rank cannot use; where there are no tiers, the newest of those that it sees."""
    trouble: str = ""
    """Of a tier that could not be looked at, or was refused."""
    unreached: str = ""
    """The same, if it may hold something of ours."""


class Choice(msgspec.Struct, frozen=True):
    save: SaveId | None
    run: str = ""
    """That has made it; empty if nothing tells."""
    left: list[Unfit] = []
    """Newer ones."""


class Chooser:
    """What all ranks go back to: one for each ``restore`` or ``rewind``.  Thread: the caller's.  Reads only."""

    def __init__(self, catalog: Catalog, sources: Sources, wanted: Wanted, world_size: int) -> None:
        self._catalog, self._sources = catalog, sources
        self._wanted, self._asked = wanted, wanted.step
        self._world_size = world_size

    def agree(self, group: Group, settle: Callable[[], None], passed_over: Collection[SaveId] = ()) -> Choice:
        """The same on every rank.  ``settle`` runs before anyone looks.  Blocks until all have; raises what one met."""

        def offer() -> Offer:
            settle()
            return self.offer(passed_over)

        choice = group.decide(
            "choosing the step to go back to", offer, lambda all_: self.judge(all_, passed_over), Choice
        )
        if choice.save is not None:
            self._sources.choose(choice.save, choice.run)
        return choice

    # --- what a rank sees ------------------------------------------------------------------

    def offer(self, passed_over: Collection[SaveId]) -> Offer:
        """Raises what the root raises."""
        seen = self._seen(passed_over)
        if not seen and self._asked is not None:
            if self._catalog.rank is None:
                seen = [save for save in [self._find(self._asked, passed_over)] if save is not None]
            else:
                off_branch = self._find(self._asked, passed_over)
                if off_branch is not None and next(self._sources.having(off_branch), None) is not None:
                    seen = [off_branch]  # else another number of ranks has made it
        runs = [self._sources.runs_of(save) for save in seen]
        unfit = self._unfit(seen)
        return Offer(self._wanted, seen, runs, unfit, self._sources.trouble, self._sources.unreached)

    def _seen(self, passed_over: Collection[SaveId]) -> list[SaveId]:
        """That there is nothing is believed as by :meth:`Catalog.newest`."""
        before = None
        while True:
            found = self._sources.seen(self._asked, passed_over)
            # Of a shared root the newest: of an older one that cannot be read nobody needs to know.  Else all of them:
            # another rank may have been told that an earlier one is complete.
            seen = list(itertools.islice(found, 1 if self._catalog.rank is None else None))
            if seen or self._sources.listed in (frozenset(), before):
                return seen
            before = self._sources.listed

    def _find(self, step: int, passed_over: Collection[SaveId]) -> SaveId | None:
        for catalog in self._sources.reachable:
            with contextlib.suppress(NotFoundError):  # said when it is known that all ranks want this step
                found = catalog.find(step)
                return None if found in passed_over else found
        return None

    def _unfit(self, seen: list[SaveId]) -> list[Unfit]:
        if self._catalog.rank is None:
            return []
        if self._sources.has_tiers:
            return [Unfit(save, size) for save, size in self._sources.unfit.items()]
        for save in seen[:1]:
            with contextlib.suppress(IntegrityError, NotFoundError):  # a damaged one is met again when it is read
                size = self._catalog.manifest(save).world_size
                return [Unfit(save, size)] if size != self._world_size else []
        return []

    # --- what is chosen --------------------------------------------------------------------

    def judge(self, outcomes: list[Answer], passed_over: Collection[SaveId]) -> Choice:
        """Raises what a rank has met; :class:`StorageError` if it cannot be determined that there is nothing."""
        raise_errors(outcomes)
        offers = [msgspec.convert(each.value, Offer, from_attributes=True) for each in outcomes]
        for name in msgspec.structs.fields(Wanted):
            check_same(name.name, [getattr(offer.wanted, name.name) for offer in offers])
        chosen = self._of_own_roots(offers) if self._catalog.rank is not None else self._of_shared(offers, passed_over)
        if chosen.save is not None:
            return chosen
        if unreached := next((offer.unreached for offer in offers if offer.unreached), ""):
            raise cannot_tell(self._asked, unreached)
        if self._catalog.rank is not None:
            self._check_nothing(offers, passed_over)
        elif self._asked is not None:
            return Choice(self._catalog.find(self._asked))
        if trouble := next((offer.trouble for offer in offers if offer.trouble), ""):
            raise cannot_tell(self._asked, trouble)
        return chosen

    def _of_shared(self, offers: list[Offer], passed_over: Collection[SaveId]) -> Choice:
        seeing = [rank for rank, offer in enumerate(offers) if offer.seen]
        if seeing and not offers[0].seen and not passed_over:
            raise StorageError(
                f"in {self._catalog.root}, {format_ranks(seeing)} sees checkpoints and rank 0 none: is it mounted?"
            )
        if not offers[0].seen:
            return Choice(None)
        return Choice(offers[0].seen[0], next(iter(offers[0].runs[0]), ""))

    def _of_own_roots(self, offers: Sequence[Offer]) -> Choice:
        """Of roots that are not shared: the newest that all ranks have sealed, in the same run."""
        unfit = _unfit_of(offers)
        if unfit and not self._sources.has_tiers:
            raise self._of_other_size(unfit)
        for save in sorted(_seen_by_all(offers), reverse=True):
            run = _run_of(save, offers)
            if run is not None:
                return Choice(save, run, [each for each in unfit if each.save > save])
        return Choice(None)

    def _check_nothing(self, offers: Sequence[Offer], passed_over: Collection[SaveId]) -> None:
        """Roots that are not shared have nothing for all ranks: raises if some have something."""
        if unfit := _unfit_of(offers):
            raise self._of_other_size(unfit)
        if mixed := _seen_by_all(offers):
            runs = "; ".join(
                f"rank {rank}: run {' or '.join(_runs(max(mixed), each))}" for rank, each in enumerate(offers[:8])
            )
            raise MismatchError(
                f"the ranks see checkpoints of different runs under one name ({max(mixed)}; {runs}). Give this run "
                "tiers of its own, or put back the root of the rank that lacks it; to start afresh, use other roots"
            )
        having = [rank for rank, offer in enumerate(offers) if offer.seen]
        if self._asked is not None:
            missing = [rank for rank, offer in enumerate(offers) if not offer.seen]
            which = f"{format_ranks(missing)} did not seal it" if missing else "the ranks sealed different attempts"
            raise (MismatchError if having else NotFoundError)(f"step {self._asked} is not complete: {which}")
        if having and not passed_over:
            newest = "; ".join(f"rank {rank}: {[each.step for each in offers[rank].seen][:3]}" for rank in having[:8])
            raise MismatchError(
                f"there is no step that every rank has sealed ({newest}; the others none). Has a node lost its disk? "
                "To start afresh, use other roots, or empty these"
            )

    def _of_other_size(self, unfit: Sequence[Unfit]) -> MismatchError:
        newest = max(unfit, key=lambda each: each.save)
        size = newest.world_size
        return MismatchError(
            f"the checkpoints (newest: step {newest.save.step}) were saved by {size} ranks into roots that are not "
            f"shared, and this run has {self._world_size}: run with {size}, or copy the roots into one that all ranks "
            "see"
        )


def cannot_tell(step: int | None, trouble: str) -> StorageError:
    """Nothing was found, and not everything was looked at."""
    if step is not None:
        return StorageError(f"step {step} was not found, but {trouble.rstrip('.?')}. Restore again when it answers")
    return StorageError(f"no checkpoint was found, but {trouble.rstrip('.?')}. To start afresh, leave that tier out")


def raise_errors(outcomes: Sequence[Answer]) -> None:
    """One error for what the ranks have met, of the kind that the first has met."""
    failed = [each for each in outcomes if each.error is not None]
    if failed:
        first = failed[0].error
        assert first is not None
        if len(outcomes) == 1 and outcomes[0].rank == 0:
            raise first
        raise type(first)(f"on {format_ranks(each.rank for each in failed)}: {first}")


def _seen_by_all(offers: Sequence[Offer]) -> set[SaveId]:
    return set(offers[0].seen).intersection(*(offer.seen for offer in offers))


def _unfit_of(offers: Sequence[Offer]) -> list[Unfit]:
    return sorted({each for offer in offers for each in offer.unfit}, key=lambda each: each.save)


def _runs(save: SaveId, offer: Offer) -> list[str]:
    return offer.runs[offer.seen.index(save)]


def _run_of(save: SaveId, offers: Sequence[Offer]) -> str | None:
    """The run of which every rank sees this save; empty if nothing tells, ``None`` if there is no such run."""
    told = [runs for offer in offers if (runs := _runs(save, offer))]
    if not told:
        return ""
    return next((run for run in told[0] if all(run in runs for runs in told)), None)
