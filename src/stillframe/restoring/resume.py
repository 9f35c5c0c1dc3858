"""Restoring on every rank at once: the same step everywhere, or nowhere.

Ranks agree four times for each step they try: which step it is, that it fits the live state on every rank, that every
byte was read and verified, and that every object took its state.  Nothing is touched before the second.  If one rank
finds damage, all ranks try the next older step.  Nothing is written: what is damaged is skipped, and reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from stillframe.checkpoint.catalog import Catalog, Checkpoint
from stillframe.checkpoint.stored import Stored
from stillframe.errors import (
    ConfigError,
    IntegrityError,
    MismatchError,
    NotFoundError,
    StateError,
    StillframeError,
    StorageError,
    text_of,
)
from stillframe.model import RestoreReport, SaveId, SkippedStep, check_deadline
from stillframe.ranks.agreement import open_tiers, resolve_root
from stillframe.ranks.group import Answer, Group
from stillframe.ranks.joining import join_group
from stillframe.restoring.choosing import Chooser, Unfit, cannot_tell, raise_errors
from stillframe.restoring.findings import warn_of_rest
from stillframe.restoring.match import Match
from stillframe.restoring.selection import Selection, Wanted
from stillframe.restoring.sources import Sources
from stillframe.tiers import Tier
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")


def restore(
    root: str | os.PathLike[str],
    state: Any,
    step: int | None = None,
    *,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    shared: bool | None = None,
    deadline_s: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
    tiers: Sequence[Tier] = (),
) -> RestoreReport:
    """Put a checkpoint into the live objects of ``state``, as ``Checkpointer.restore`` does, without writing anything.

    It waits for nobody and starts no process, so an evaluation can use it beside a running training.  If retention
    removes the newest step meanwhile, it restores the next newest.  The ranks of torch.distributed restore together, if
    it is initialised; give ``rank=0, world_size=1`` to restore alone.

    ``tiers``: other places to restore from, as for a ``Checkpointer``.

    Blocks until done.  Raises: as :meth:`Checkpointer.restore`.
    """
    group = join_group(rank, world_size, check_deadline(deadline_s))
    catalog = resolve_root(root, shared, group, storage_options)
    resume = Resume(catalog, group, state, Wanted.given(step, strict, only, exclude), open_tiers(tiers, catalog))
    resume.run(lambda: None)
    warn_of_rest(resume.report)
    return resume.report


class _Health(msgspec.Struct, frozen=True):
    """Empty if the step is whole on every rank; else what is wrong with it."""

    damage: str = ""
    is_gone: bool = False
    """It was removed while it was read."""


class Resume:
    """One ``restore`` of one rank.  Thread: the caller's.  Reads only."""

    def __init__(
        self, catalog: Catalog, group: Group, state: Any, wanted: Wanted, tiers: Sequence[Catalog] = ()
    ) -> None:
        self._catalog = catalog
        self._sources = Sources(catalog, tiers, group.world_size)
        self._group, self._state = group, state
        self._wanted, self._asked = wanted, wanted.step
        self._chooser = Chooser(catalog, self._sources, wanted, group.world_size)
        self._passed_over: list[SaveId] = []
        self._gone: list[SaveId] = []  # of these, those that were removed while they were read
        self._skipped: list[SkippedStep] = []  # damaged
        self._left: list[SkippedStep] = []  # newer than what is restored
        self._place = catalog.root  # where the step that is being tried was read last
        self.report = RestoreReport(None)

    def run(self, settle: Callable[[], None], claim: Callable[[Catalog], None] | None = None) -> SaveId | None:
        """What was restored; raises.  ``settle`` runs before anything is read; ``claim`` for tiers that are needed."""
        while True:
            save = self.newest(settle, claim)
            if save is None:
                return None
            health = self._try(save)
            if not health.damage:
                return save
            self._passed_over.append(save)
            if self._asked is not None:
                raise NotFoundError(health.damage) if health.is_gone else IntegrityError(health.damage)
            if health.is_gone:
                self._gone.append(save)
            else:
                self._pass_over(save, health.damage)

    def newest(self, settle: Callable[[], None], claim: Callable[[Catalog], None] | None) -> SaveId | None:
        """What would be restored, as far as is known before it is read; the arguments as for :meth:`run`."""
        self._settle = settle
        save = self._choose()
        if save is None:
            self._group.decide("finding nothing to restore", self._nothing, raise_errors, type(None))
        elif claim is not None:
            self._sources.hold(save, claim)  # then it is looked at again
        return save

    def find(self, settle: Callable[[], None], claim: Callable[[Catalog], None]) -> SaveId:
        """The checkpoint that was asked for, without restoring it; the arguments as for :meth:`run`."""
        save = self._chooser.agree(self._group, settle).save
        if save is None:  # rank 0 would have said so
            raise self._catalog.not_found(self._asked or 0)
        self._sources.hold(save, claim)
        return save

    # --- which step ------------------------------------------------------------------------

    def _choose(self) -> SaveId | None:
        choice = self._chooser.agree(self._group, self._settle, self._passed_over)
        if choice.save is not None:
            self._tell_left(choice.save, choice.left)
        return choice.save

    def _tell_left(self, chosen: SaveId, unfit: Sequence[Unfit]) -> None:
        """Newer steps that are not restored although nothing is wrong with them, each once."""
        why = {each.save: f"{each.world_size} ranks saved it into roots that are not shared" for each in unfit}
        why |= {save: f"it was there, and is gone from {self._sources.names}" for save in self._gone if save > chosen}
        told = {each.step for each in self._left}
        new = [SkippedStep(save.step, why[save]) for save in sorted(why, reverse=True) if save.step not in told]
        self._left += new
        if new:
            which = "; ".join(f"step {each.step}: {each.reason}" for each in new[:8])
            advice = f"run with {unfit[-1].world_size} ranks" if unfit else "look whether all places are mounted"
            warnings.warn(
                f"step {chosen.step} is restored, though there was a newer one ({which}). To have that, {advice}, "
                "before this run saves: then what is newer is left behind, and removed by retention",
                RuntimeWarning, stacklevel=6,
            )  # fmt: skip

    # --- one step --------------------------------------------------------------------------

    def _try(self, save: SaveId) -> _Health:
        """What is wrong with it; nothing if it has been restored."""
        began, step = time.monotonic(), save.step
        opened: list[tuple[Catalog, Match]] = []
        self._replaced: list[str] = []
        with contextlib.ExitStack() as stack:

            def open_from(source: Catalog) -> Selection:
                self._place = source.root
                checkpoint = stack.enter_context(source.open_save(save))
                selection = Selection(self._wanted.only, self._wanted.exclude)
                opened.append((source, self._match(checkpoint, step, selection, source)))
                return selection

            def match() -> list[str]:
                """Says which patterns have met nothing on this rank."""
                source = self._sources.nearest(save)
                while True:
                    try:
                        return open_from(source).idle
                    except (IntegrityError, NotFoundError) as error:
                        source = self._next_source(save, source, error)

            def fill() -> None:
                source = opened[-1][0]
                while True:
                    try:
                        if opened[-1][0] is not source:
                            open_from(source)
                        return opened[-1][1].placement.fill()
                    except (IntegrityError, NotFoundError) as error:
                        source = self._next_source(save, source, error)

            def judge_match(outcomes: list[Answer]) -> _Health:
                health = self._judge_health(save, outcomes)
                idle = set.intersection(*(set(each.value or ()) for each in outcomes))
                if idle and not health.damage:
                    raise ConfigError(
                        f"only=…, exclude=…: {', '.join(map(repr, sorted(idle)))} matches nothing in the state or in "
                        f"step {step}; nothing was touched. `stillframe show {self._place} {step}` lists the paths"
                    )
                return health

            health = self._group.decide(f"matching step {step} with the state", match, judge_match, _Health)
            if not health.damage:
                health = self._group.decide(f"reading step {step}", fill, partial(self._judge_health, save), _Health)
            if health.damage:
                return health
            source, found = opened[-1]
            self._apply(found, step)
        self._sources.tell(save, source)
        self.report = RestoreReport(
            step=step,
            bytes=found.placement.nbytes,
            seconds=time.monotonic() - began,
            missing=tuple(found.findings.missing),
            unexpected=tuple(found.findings.unexpected),
            mismatched=tuple(found.findings.mismatched),
            skipped=(*self._left, *self._skipped),
            source=source.root,
            replaced=tuple(self._replaced),
        )
        return _Health()

    def _next_source(self, save: SaveId, source: Catalog, error: StillframeError) -> Catalog:
        """Another that has it, after one turned out to be damaged.  Raises the error if there is none.

        Raises :class:`StorageError` if that cannot be determined.
        """
        found = self._sources.next_after(save, source)
        if found is None:
            raise error
        self._replaced.append(f"{source.root}: {text_of(error)}")
        logger.warning("%s is damaged in %s, and is read from %s instead: %s", save, source.root, found.root, error)
        return found

    def _apply(self, found: Match, step: int) -> None:
        """On all ranks, or an error on all of them: one that trained on with what the others lack would diverge."""
        own: list[Exception] = []

        def apply() -> str:
            try:
                found.apply()
            except Exception as error:  # of load_state_dict, or of a registered type: anything
                own.append(error)
                return text_of(error) if isinstance(error, StateError) else f"{type(error).__name__}: {text_of(error)}"
            return ""

        def judge(outcomes: list[Answer]) -> None:
            failed = [each for each in outcomes if each.value]
            if failed:
                where = f"on {format_ranks(each.rank for each in failed)}: " if len(outcomes) > 1 else ""
                raise StateError(
                    f"{where}{failed[0].value}. Step {step} was read, but not every object took its state: the state "
                    "is partly overwritten. Fix that object, and restore again, or leave it out with exclude="
                )

        try:
            self._group.decide(f"putting step {step} into the state", apply, judge, type(None))
        except StateError as error:
            raise error from (own[0] if own else None)

    def _judge_health(self, save: SaveId, outcomes: list[Answer]) -> _Health:
        damaged = [each for each in outcomes if isinstance(each.error, IntegrityError | NotFoundError)]
        raise_errors([each for each in outcomes if each not in damaged])
        if not damaged:
            return _Health()
        # What is missing may just have been removed by retention: that is no damage.
        is_gone = self._catalog.rank is None and self._sources.is_gone(save)
        if len(outcomes) == 1:
            return _Health(str(damaged[0].error), is_gone)
        return _Health(f"on {format_ranks(each.rank for each in damaged)}: {damaged[0].error}", is_gone)

    def _match(self, checkpoint: Checkpoint, step: int, selection: Selection, source: Catalog) -> Match:
        """With this rank's own tree if there is one and it fits, else with the trees of all ranks merged."""
        rank, world_size = self._group.rank, checkpoint.world_size
        if source.rank is None and len(checkpoint.ranks) < world_size:
            raise self._other_kind(step)
        is_same_size = world_size == self._group.world_size
        found = Match(Stored(checkpoint, rank, is_merged=not is_same_size), self._state, selection)
        if not is_same_size:
            logger.info(
                "step %d was saved by %d ranks, and is restored onto %d", step, world_size, self._group.world_size
            )
        elif len(checkpoint.ranks) > 1 and found.findings.has_any:
            found = Match(Stored(checkpoint, rank, is_merged=True), self._state, selection)
        if self._wanted.strict:
            found.findings.raise_if_any(step)
        return found

    def _pass_over(self, save: SaveId, damage: str) -> None:
        self._skipped.append(SkippedStep(save.step, damage))
        warnings.warn(
            f"step {save.step} is damaged and was skipped: {damage}. Check the disk; "
            f"`stillframe verify {self._place} {save.step}` reads it again, "
            f"`stillframe doctor {self._place} --quarantine` sets it aside for good",
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
        if left := [each for each in self._sources.off_branch() if each[1] not in self._passed_over]:
            tier, save = left[-1]
            raise IntegrityError(
                f"nothing of what the run goes on from is left, but {tier.root} holds {save}, off the branch or "
                f"damaged. To take it, restore(step={save.step}); to start afresh, use other places"
            )
        if self._sources.trouble:  # since it was chosen that there is nothing
            raise cannot_tell(None, self._sources.trouble)
        self.report = RestoreReport(None, skipped=tuple(self._skipped))
        aside = [save.step for save in view.saves if self._is_quarantined(save)]
        damaged = sorted({*aside, *(each.step for each in self._skipped)})
        if damaged:
            raise IntegrityError(
                f"every checkpoint in {self._sources.names} is damaged (steps {damaged}): there is nothing to resume "
                "from, and the state may be partly overwritten. To start afresh, use other places or remove these"
            )
        if self._gone:
            raise StorageError(
                f"{', '.join(map(str, self._gone[:8]))} was there, and is gone from {self._sources.names}, with all "
                "else: is every place mounted? Then restore again. To start afresh, use other places"
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
