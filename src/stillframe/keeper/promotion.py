"""All tiers of a keeper: each has a mover (:mod:`stillframe.keeper.mover`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import StillframeError
from stillframe.format import names
from stillframe.format.epochs import TierNotes, encode_tiers
from stillframe.format.events import Event
from stillframe.keeper.carrying import CarryingNote
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.terms import COORDINATOR, Terms
from stillframe.link.messages import TierFailed, TierNews
from stillframe.model import SaveId
from stillframe.tiers import TierConfig

if TYPE_CHECKING:  # most keepers have no tiers, and are there some milliseconds earlier without these
    from stillframe.keeper.mover import Mover


class Promotion:
    """Thread: safe from any.  Without tiers nothing is carried."""

    def __init__(
        self,
        configs: Sequence[TierConfig],
        tiers: Sequence[Catalog],
        terms: Terms,
        rank: int,
        is_shared: bool,
        epoch: CurrentEpoch,
        tell: Callable[[TierNews | TierFailed], None],
        notice: Callable[[str], None],
        record: Callable[[Event], None],
    ) -> None:
        self._epoch = epoch
        self._rank = rank
        self._store = terms.store
        self._notes = TierNotes(terms.run, [config.note() for config in configs])
        self._says = rank == COORDINATOR or not is_shared

        def is_whole(save: SaveId) -> bool:
            return is_shared or save.step <= epoch.agreed_step

        def mover(number: int) -> Mover:
            from stillframe.keeper.follower import Follower
            from stillframe.keeper.leader import Leader

            others = [each for each in tiers if each is not tiers[number]]
            given = (
                number, configs[number], Catalog(terms.store), tiers[number], rank, terms.world_size,
                terms.run, lambda: epoch.to_promote_in, tell, notice, record, others,
            )  # fmt: skip
            if rank != COORDINATOR:
                return Follower(*given)
            return Leader(*given, is_whole=is_whole, agreed=lambda: epoch.agreed)

        self._movers = [mover(number) for number in range(len(configs))]
        self._carrying = CarryingNote(terms.store, rank) if self._says else None  # else it removes nothing there
        self._is_finishing = False
        for each in self._movers:
            each.on_turn = self.note

    def start(self) -> None:
        """The root is ours: say which tiers it has; go on with what an earlier keeper has left.  May be called again.

        Blocks.  Raises nothing: what is said of the tiers is for people.
        """
        if self._says:
            with contextlib.suppress(StillframeError):
                self._say()
        if self._carrying is not None:
            for root, left in self._carrying.inherited().items():
                for mover in self._movers:
                    if mover.tier_root == root:
                        mover.inherit(*left)
        for mover in self._movers:
            mover.start()

    def _say(self) -> None:
        if self._movers:
            self._store.put(names.TIERS, encode_tiers(self._notes), durable=False)
        elif self._store.head(names.TIERS) is not None:  # of a run that had some
            self._store.delete([names.TIERS, names.carrying(self._rank)])

    def committed(self, save: SaveId) -> None:
        """A save is whole in the root.  No I/O."""
        if self._movers:
            try:
                parent = self._epoch.current().parent
            except StillframeError:  # another run has taken over
                return
            for mover in self._movers:
                mover.committed(save, parent)

    def complete(self, save: SaveId) -> None:
        """As :meth:`committed`, of a root that ranks do not share; it is noted there, too.  Blocks."""
        self.committed(save)
        self.note()

    def carry(self, step: int | None) -> None:
        """Every tier gets this step, due there or not; ``None``: training goes on from somewhere else.  No I/O."""
        for mover in self._movers:
            mover.ask_for(step)

    def wake(self) -> None:
        """An epoch has begun."""
        for mover in self._movers:
            mover.wake()

    def kept(self) -> set[SaveId]:
        """What must stay in the root until it is carried."""
        return set().union(*(mover.kept for mover in self._movers))

    def note(self) -> None:
        """Put into the root what must stay there, for the next keeper.  Before anything is removed; blocks.

        Not when this one is finishing, without the root's lock, and another run has begun there: that notes its own.
        """
        if self._carrying is not None and self._movers:
            self._carrying.put(lambda: {each.tier_root: each.pinned for each in self._movers}, self._is_latest)

    def _is_latest(self) -> bool:
        epoch = self._epoch.number
        return not self._is_finishing or (epoch is not None and max(Catalog(self._store).epochs(), default=0) <= epoch)

    @property
    def has_tiers(self) -> bool:
        return bool(self._movers)

    def finish(self) -> None:
        """Blocks until what is due is carried, or does not get on."""
        self._is_finishing = True
        for mover in self._movers:
            mover.close()
        for mover in self._movers:
            mover.finish()
