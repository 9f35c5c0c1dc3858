"""Restoring on every rank at once: the same step everywhere, or nowhere.

Ranks agree three times for each step they try: which step it is, that it fits the live state on every rank, and that
every byte was read and verified.  Nothing is touched before the second.  If one rank finds damage, all ranks try the
next older step.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.stored import Stored
from stillframe.errors import IntegrityError, MismatchError, NotFoundError, StorageError
from stillframe.model import RestoreReport, SkippedStep
from stillframe.ranks.group import Answer, Group, check_same
from stillframe.restore.match import Match
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")


class _Offer(msgspec.Struct, frozen=True):
    """What a rank brings to the choice: the step asked for, and what it sees in its root, oldest first."""

    step: int | None
    strict: bool
    seen: list[tuple[int, str, int]] = []
    """(step, attempt, world size); of a shared root the newest step alone."""


class _Choice(msgspec.Struct, frozen=True):
    step: int | None


class _Health(msgspec.Struct, frozen=True):
    """Empty if the step is whole on every rank; else what is wrong with it."""

    damage: str = ""


class Resume:
    """One ``restore`` of one rank.  Thread: the caller's."""

    def __init__(self, catalog: Catalog, group: Group, state: Any, step: int | None, strict: bool) -> None:
        self._catalog = catalog
        self._group = group
        self._state = state
        self._asked = step
        self._strict = strict
        self._skipped: list[SkippedStep] = []
        self.report: RestoreReport | None = None

    def run(self, settle: Callable[[], None]) -> int | None:
        """The step restored; raises what ``Checkpointer.restore`` does.  ``settle`` runs before anything is read."""
        self._settle = settle
        while True:
            step = self._choose()
            if step is None:
                self._nothing()
                return None
            damage = self._try(step)
            if not damage:
                return step
            if self._asked is not None:
                raise IntegrityError(damage)
            self._pass_over(step, damage)

    # --- which step ------------------------------------------------------------------------

    def _choose(self) -> int | None:
        choice = self._group.decide("choosing the step to restore", self._offer, self._judge_offers, _Choice)
        if choice.step is not None and self._catalog.rank is not None and self._asked is None:
            self._withdraw_after(choice.step)
        return choice.step

    def _offer(self) -> _Offer:
        self._settle()
        skipped = {each.step for each in self._skipped}
        seen: list[tuple[int, str, int]] = []
        if self._catalog.rank is not None:
            for step in self._catalog.steps():
                # A damaged one is not seen; a newer version, or storage that does not answer, is an error.
                with contextlib.suppress(IntegrityError, NotFoundError), self._catalog.open(step) as checkpoint:
                    seen.append((step, checkpoint.manifest.attempt, checkpoint.world_size))
        elif self._asked is None:
            # From the newest on: of an older one that cannot be looked at nobody needs to know.
            newest = self._catalog.latest(skipped)
            seen = [] if newest is None else [(newest, "", 0)]
        return _Offer(self._asked, self._strict, [each for each in seen if each[0] not in skipped])

    def _judge_offers(self, outcomes: list[Answer]) -> _Choice:
        _raise_errors(outcomes)
        offers = [msgspec.convert(each.value, _Offer, from_attributes=True) for each in outcomes]
        check_same("step", [offer.step for offer in offers])
        check_same("strict", [offer.strict for offer in offers])
        if self._catalog.rank is None:
            seeing = [rank for rank, offer in enumerate(offers) if offer.seen]
            if seeing and not offers[0].seen and not self._skipped:
                raise StorageError(
                    f"in {self._catalog.root}, {format_ranks(seeing)} sees checkpoints and rank 0 none: is it mounted?"
                )
            return _Choice(
                self._asked if self._asked is not None else max((s for s, *_ in offers[0].seen), default=None)
            )
        return _Choice(self._newest_common(offers))

    def _newest_common(self, offers: Sequence[_Offer]) -> int | None:
        """Of roots that are not shared: the newest step that all ranks have sealed, in the same attempt."""
        counts = Counter(each for offer in offers for each in set(offer.seen))
        complete = [each for each, count in counts.items() if count == self._group.world_size]
        steps = [step for step, _, size in complete if size == self._group.world_size]
        if self._asked is not None:
            if self._asked not in steps:
                missing = [rank for rank, offer in enumerate(offers) if self._asked not in {s for s, *_ in offer.seen}]
                which = f"{format_ranks(missing)} did not seal it" if missing else "the ranks sealed different attempts"
                raise MismatchError(f"step {self._asked} is not complete: {which}")
            return self._asked
        sizes = sorted({size for _, _, size in counts} - {self._group.world_size})
        if not steps and sizes:
            raise MismatchError(
                f"the checkpoints were saved by {sizes[-1]} ranks into roots that are not shared, and this run has "
                f"{self._group.world_size}: run with {sizes[-1]}, or copy the roots into one that all ranks see"
            )
        having = [rank for rank, offer in enumerate(offers) if offer.seen]
        if not steps and having and not self._skipped:
            newest = "; ".join(f"rank {rank}: {[step for step, *_ in offers[rank].seen][-3:]}" for rank in having[:8])
            raise MismatchError(
                f"there is no step that every rank has sealed ({newest}; the others none). Has a node lost its disk? "
                "To start afresh, use other roots, or empty these"
            )
        return max(steps, default=None)

    def _withdraw_after(self, step: int) -> None:
        """What this rank alone has sealed after the step agreed on: training will come by there again."""
        for each in self._catalog.steps():
            if each > step:
                logger.warning("step %d was sealed here but not by every rank: it is withdrawn", each)
                self._catalog.mark_damaged(each)

    # --- one step --------------------------------------------------------------------------

    def _try(self, step: int) -> str:
        """What is wrong with the step; empty if it has been restored."""
        began = time.monotonic()
        matched: list[Match] = []
        with contextlib.ExitStack() as stack:

            def match() -> None:
                checkpoint = stack.enter_context(self._catalog.open(step))
                matched.append(self._match(checkpoint, step))

            health = self._group.decide(f"matching step {step} with the state", match, _judge_health, _Health)
            if not health.damage:
                health = self._group.decide(
                    f"reading step {step}", lambda: matched[0].placement.fill(), _judge_health, _Health
                )
            if health.damage:
                return health.damage
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
        return ""

    def _match(self, checkpoint: Any, step: int) -> Match:
        """With this rank's own tree if there is one and it fits, else with the trees of all ranks merged."""
        rank, world_size = self._group.rank, checkpoint.world_size
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

    def _pass_over(self, step: int, damage: str) -> None:
        self._skipped.append(SkippedStep(step, damage))
        is_marked = False
        if self._group.rank == 0 or self._catalog.rank is not None:
            is_marked = self._catalog.mark_damaged(step)
        elif not self._catalog.is_committed(step):
            is_marked = True
        fate = "it will not be used again" if is_marked else "it is not used by this restore"
        if self._group.rank == 0 and not is_marked:
            fate = "it cannot be marked: the root is not writable"
        warnings.warn(f"step {step} is damaged and passed over; {fate}: {damage}", RuntimeWarning, stacklevel=4)

    def _nothing(self) -> None:
        other = [step for step in self._catalog.step_dirs() if self._catalog.is_committed_otherwise(step)]
        if other:
            how = (
                "by ranks that did not share their roots: restore with as many ranks, and shared=False (or {node})"
                if self._catalog.rank is None
                else "into a root that all ranks shared: leave out shared=False and {node}"
            )
            raise MismatchError(f"the checkpoints in {self._catalog.root} (newest: step {other[-1]}) were saved {how}")
        strange = self._catalog.strange_steps()
        if strange:
            raise StorageError(
                f"{self._catalog.dir(strange[-1])} is a link or a file: nothing is read through it, and there is no "
                "checkpoint beside it. Put the directory itself there, or remove it to start afresh"
            )
        self.report = RestoreReport(step=None, skipped=tuple(self._skipped))
        damaged = sorted({*self._catalog.damaged(), *(each.step for each in self._skipped)})
        if damaged:
            raise IntegrityError(
                f"every checkpoint in {self._catalog.root} is damaged (steps {damaged}), so there is nothing to resume "
                "from, and the state may be partly overwritten. To start afresh, use another root or remove these"
            )


def _judge_health(outcomes: list[Answer]) -> _Health:
    damaged = [each for each in outcomes if isinstance(each.error, IntegrityError)]
    _raise_errors([each for each in outcomes if each not in damaged])
    if not damaged:
        return _Health()
    if len(outcomes) == 1:
        return _Health(str(damaged[0].error))
    return _Health(f"on {format_ranks(each.rank for each in damaged)}: {damaged[0].error}")


def _raise_errors(outcomes: Sequence[Answer]) -> None:
    """One error for what the ranks have met, of the kind that the first has met."""
    failed = [each for each in outcomes if each.error is not None]
    if failed:
        first = failed[0].error
        assert first is not None
        if len(outcomes) == 1 and outcomes[0].rank == 0:
            raise first
        raise type(first)(f"on {format_ranks(each.rank for each in failed)}: {first}")
