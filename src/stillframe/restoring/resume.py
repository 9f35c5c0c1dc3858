"""Restoring on every rank at once: the same step everywhere, or nowhere.

Ranks agree three times for each step they try: which step it is, that it fits the live state on every rank, and that
every byte was read and verified.  Nothing is touched before the second.  If one rank finds damage, all ranks try the
next older step.  Nothing is written: what is damaged is passed over, and reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.stored import Stored
from stillframe.errors import IntegrityError, MismatchError, NotFoundError, StorageError
from stillframe.model import RestoreReport, SaveId, SkippedStep, check_deadline, check_step
from stillframe.ranks.agreement import resolve_root
from stillframe.ranks.group import Answer, Group, check_same, join_group
from stillframe.restoring.match import Match
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")


def restore(
    root: str | os.PathLike[str],
    state: Any,
    step: int | None = None,
    *,
    strict: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    shared: bool | None = None,
    deadline_s: float = 600.0,
) -> int | None:
    """Put a checkpoint into the live objects of ``state``, as ``Checkpointer.restore`` does, for those who only read.

    Writes nothing, waits for nobody, and starts no process: an evaluation can use it beside a running trainer.  If
    retention removes the newest step meanwhile, the next newest is taken.  The ranks of torch.distributed restore
    together, if it is initialised; give ``rank=0, world_size=1`` to restore alone.

    Blocks until done.  Raises: as :meth:`Checkpointer.restore`.
    """
    group = join_group(rank, world_size, check_deadline(deadline_s))
    catalog = resolve_root(root, shared, group)
    save = Resume(catalog, group, state, None if step is None else check_step(step), strict).run(lambda: None)
    return None if save is None else save.step


class _Offer(msgspec.Struct, frozen=True):
    """What a rank brings to the choice: the step asked for, and the checkpoints it sees in its root."""

    step: int | None
    strict: bool
    seen: list[SaveId] = []
    """The newest first; of a shared root only the one that it would choose."""
    world_size: int = 0
    """Of the newest, in a root that is not shared."""


class _Choice(msgspec.Struct, frozen=True):
    save: SaveId | None


class _Health(msgspec.Struct, frozen=True):
    """Empty if the step is whole on every rank; else what is wrong with it."""

    damage: str = ""
    is_gone: bool = False
    """It was removed while it was read."""


class Resume:
    """One ``restore`` of one rank.  Thread: the caller's.  Reads only."""

    def __init__(self, catalog: Catalog, group: Group, state: Any, step: int | None, strict: bool) -> None:
        self._catalog = catalog
        self._group = group
        self._state = state
        self._asked = step
        self._strict = strict
        self._passed_over: list[SaveId] = []
        self._skipped: list[SkippedStep] = []
        self.report: RestoreReport | None = None

    def run(self, settle: Callable[[], None]) -> SaveId | None:
        """What was restored; raises what ``Checkpointer.restore`` does.  ``settle`` runs before anything is read."""
        self._settle = settle
        while True:
            save = self._choose()
            if save is None:
                self._nothing()
                return None
            health = self._try(save)
            if not health.damage:
                return save
            self._passed_over.append(save)
            if health.is_gone and self._asked is None:
                continue
            if self._asked is not None:
                raise NotFoundError(health.damage) if health.is_gone else IntegrityError(health.damage)
            self._pass_over(save, health.damage)

    # --- which step ------------------------------------------------------------------------

    def _choose(self) -> SaveId | None:
        return self._group.decide("choosing the step to restore", self._offer, self._judge_offers, _Choice).save

    def _offer(self) -> _Offer:
        self._settle()
        seen: list[SaveId] = []
        world_size = 0
        if self._catalog.rank is None:
            # From the newest on: of an older one that cannot be looked at nobody needs to know.
            newest = self._catalog.newest(self._passed_over) if self._asked is None else self._find(self._asked)
            seen = [] if newest is None else [newest]
        else:
            seen = [save for save in self._catalog.committed() if save not in self._passed_over]
            if self._asked is not None:
                seen = [save for save in seen if save.step == self._asked]
            if seen:
                world_size = self._world_size(seen[0])
        return _Offer(self._asked, self._strict, seen, world_size)

    def _find(self, step: int) -> SaveId | None:
        with contextlib.suppress(NotFoundError):  # said when it is known that all ranks want this step
            found = self._catalog.find(step)
            return None if found in self._passed_over else found
        return None

    def _world_size(self, save: SaveId) -> int:
        """0 if it cannot be told: a damaged one is met again when it is read."""
        with contextlib.suppress(IntegrityError, NotFoundError):
            return self._catalog.manifest(save).world_size
        return 0

    def _judge_offers(self, outcomes: list[Answer]) -> _Choice:
        _raise_errors(outcomes)
        offers = [msgspec.convert(each.value, _Offer, from_attributes=True) for each in outcomes]
        check_same("step", [offer.step for offer in offers])
        check_same("strict", [offer.strict for offer in offers])
        if self._catalog.rank is not None:
            return _Choice(self._newest_common(offers))
        seeing = [rank for rank, offer in enumerate(offers) if offer.seen]
        if seeing and not offers[0].seen and not self._passed_over:
            raise StorageError(
                f"in {self._catalog.root}, {format_ranks(seeing)} sees checkpoints and rank 0 none: is it mounted?"
            )
        if self._asked is not None and not offers[0].seen:
            return _Choice(self._catalog.find(self._asked))
        return _Choice(max(offers[0].seen, default=None))

    def _newest_common(self, offers: Sequence[_Offer]) -> SaveId | None:
        """Of roots that are not shared: the newest that all ranks have sealed."""
        common = set(offers[0].seen).intersection(*(offer.seen for offer in offers))
        sizes = {offer.world_size for offer in offers} - {0, self._group.world_size}
        if sizes:
            raise MismatchError(
                f"the checkpoints were saved by {max(sizes)} ranks into roots that are not shared, and this run has "
                f"{self._group.world_size}: run with {max(sizes)}, or copy the roots into one that all ranks see"
            )
        having = [rank for rank, offer in enumerate(offers) if offer.seen]
        if not common and self._asked is not None:
            missing = [rank for rank, offer in enumerate(offers) if not offer.seen]
            which = f"{format_ranks(missing)} did not seal it" if missing else "the ranks sealed different attempts"
            raise (MismatchError if having else NotFoundError)(f"step {self._asked} is not complete: {which}")
        if not common and having and not self._passed_over:
            newest = "; ".join(f"rank {rank}: {[each.step for each in offers[rank].seen][:3]}" for rank in having[:8])
            raise MismatchError(
                f"there is no step that every rank has sealed ({newest}; the others none). Has a node lost its disk? "
                "To start afresh, use other roots, or empty these"
            )
        return max(common, default=None)

    # --- one step --------------------------------------------------------------------------

    def _try(self, save: SaveId) -> _Health:
        """What is wrong with it; nothing if it has been restored."""
        began, step = time.monotonic(), save.step
        matched: list[Match] = []
        with contextlib.ExitStack() as stack:

            def match() -> None:
                checkpoint = stack.enter_context(self._catalog.open_save(save))
                matched.append(self._match(checkpoint, step))

            def judge(outcomes: list[Answer]) -> _Health:
                return self._judge_health(save, outcomes)

            health = self._group.decide(f"matching step {step} with the state", match, judge, _Health)
            if not health.damage:
                health = self._group.decide(f"reading step {step}", lambda: matched[0].placement.fill(), judge, _Health)
            if health.damage:
                return health
            found = matched[0]
            found.apply()
        self.report = RestoreReport(
            step=step,
            bytes=found.placement.nbytes,
            seconds=time.monotonic() - began,
            missing=tuple(found.findings.missing),
            unexpected=tuple(found.findings.unexpected),
            mismatched=tuple(found.findings.mismatched),
            skipped=tuple(self._skipped),
        )
        return _Health()

    def _judge_health(self, save: SaveId, outcomes: list[Answer]) -> _Health:
        damaged = [each for each in outcomes if isinstance(each.error, IntegrityError | NotFoundError)]
        _raise_errors([each for each in outcomes if each not in damaged])
        if not damaged:
            return _Health()
        # What is missing may just have been removed by retention: that is no damage.
        is_gone = self._catalog.rank is None and not self._catalog.is_committed(save)
        if len(outcomes) == 1:
            return _Health(str(damaged[0].error), is_gone)
        return _Health(f"on {format_ranks(each.rank for each in damaged)}: {damaged[0].error}", is_gone)

    def _match(self, checkpoint: Any, step: int) -> Match:
        """With this rank's own tree if there is one and it fits, else with the trees of all ranks merged."""
        rank, world_size = self._group.rank, checkpoint.world_size
        if self._catalog.rank is None and len(checkpoint.ranks) < world_size:
            raise self._other_kind(step)
        is_same_size = world_size == self._group.world_size
        found = Match(Stored(checkpoint, rank, is_merged=not is_same_size), self._state)
        if not is_same_size:
            logger.info(
                "step %d was saved by %d ranks, and is restored onto %d", step, world_size, self._group.world_size
            )
        elif len(checkpoint.ranks) > 1 and found.findings.has_any:
            found = Match(Stored(checkpoint, rank, is_merged=True), self._state)
        if self._strict:
            found.findings.raise_if_any(step)
        return found

    def _pass_over(self, save: SaveId, damage: str) -> None:
        self._skipped.append(SkippedStep(save.step, damage))
        warnings.warn(
            f"step {save.step} is damaged and passed over by this restore: {damage}. Check the disk; "
            f"`stillframe verify {self._catalog.root} {save.step}` reads it again, "
            f"`stillframe doctor {self._catalog.root} --quarantine` sets it aside for good",
            RuntimeWarning, stacklevel=4,
        )  # fmt: skip

    def _nothing(self) -> None:
        view = self._catalog.look()
        if view.saves and view.is_shared != (self._catalog.rank is None):
            raise self._other_kind(max(view.saves).step)
        if view.strange:
            raise StorageError(
                f"{self._catalog.dir(view.strange[-1])} is a link or a file: nothing is read through it, and there is "
                "no checkpoint beside it. Put the directory itself there, or remove it to start afresh"
            )
        self.report = RestoreReport(step=None, skipped=tuple(self._skipped))
        aside = [save.step for save in view.saves if self._is_quarantined(save)]
        damaged = sorted({*aside, *(each.step for each in self._skipped)})
        if damaged:
            raise IntegrityError(
                f"every checkpoint in {self._catalog.root} is damaged (steps {damaged}), so there is nothing to resume "
                "from, and the state may be partly overwritten. To start afresh, use another root or remove these"
            )

    def _other_kind(self, newest: int) -> MismatchError:
        how = (
            "by ranks that did not share their roots: restore with as many ranks, and shared=False (or {node})"
            if self._catalog.rank is None
            else "into a root that all ranks shared: leave out shared=False and {node}"
        )
        return MismatchError(f"the checkpoints in {self._catalog.root} (newest: step {newest}) were saved {how}")

    def _is_quarantined(self, save: SaveId) -> bool:
        aside = self._catalog.aside(save)
        return aside is not None and aside.reason == "quarantined"


def _raise_errors(outcomes: Sequence[Answer]) -> None:
    """One error for what the ranks have met, of the kind that the first has met."""
    failed = [each for each in outcomes if each.error is not None]
    if failed:
        first = failed[0].error
        assert first is not None
        if len(outcomes) == 1 and outcomes[0].rank == 0:
            raise first
        raise type(first)(f"on {format_ranks(each.rank for each in failed)}: {first}")
