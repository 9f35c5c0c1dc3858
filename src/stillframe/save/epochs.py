"""Where a run goes on from: each ``restore`` and ``rewind`` begins an epoch (:mod:`stillframe.checkpoint.epochs`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import StorageError
from stillframe.format import limits, names
from stillframe.model import SaveId
from stillframe.ranks.agreement import agree_on_epoch, do_together
from stillframe.ranks.group import Group
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.saves import Saves
from stillframe.save.steps import TakenSteps
from stillframe.store.protocol import read_all


class Epochs:
    """Thread: the training thread's."""

    def __init__(
        self,
        catalog: Catalog,
        group: Group,
        keeper: KeeperClient,
        steps: TakenSteps,
        saves: Saves,
        tiers: Sequence[Catalog] = (),
    ) -> None:
        self._tiers = tiers
        self._catalog = catalog
        self._group = group
        self._keeper = keeper
        self._steps = steps
        self._saves = saves
        self._parent: SaveId | None = None
        self._is_parent_known = False
        self._sequence = 0
        """Counted here, where every rank comes by, whatever fails on one of them."""
        self._has_entered = False
        self._number: int | None = None

    def beginning(self) -> Callable[[], None]:
        """What every rank does before the run chooses where to go on from: claim an epoch, once.

        So the run sees everything that any run before it has reported.
        """
        self._keeper.leave_epoch()
        try:
            number = agree_on_epoch(self._group, self._catalog, self._tiers, self._keeper.agreed_epoch)
        except BaseException:
            self._keeper.stay_in_epoch()
            raise
        self._sequence += 1
        self._saves.sequence = self._sequence
        self._has_entered = False

        def claim() -> None:
            if not self._has_entered:
                self._settle()
                self._keeper.enter(self._sequence, number)
                self._has_entered = True

        self._number = number
        return claim

    def claim_in(self, tier: Catalog) -> None:
        """Put the claim of the present epoch into a tier that is resumed from; best effort: the keeper repeats it."""
        with contextlib.suppress(StorageError):
            key = names.claim(self._keeper.agreed_epoch)
            tier.store.put_new(key, read_all(self._catalog.store, key, limits.MAX_NOTE_BYTES))

    def _settle(self) -> None:
        """The root is ours, and what we saved is committed.  Blocks; raises."""
        self._keeper.wait_ready()
        self._saves.wait_all("committed", None)
        self._saves.raise_untold()

    def resume(self, save: SaveId | None) -> None:
        """The epoch goes on from this checkpoint.  Put down with the first save: who only looks leaves no trace."""
        self._parent, self._is_parent_known = save, True
        self._keeper.resume(save)
        self._keeper.tiers.has_begun = self._group.rank > 0 or self._keeper.agreed_epoch > 0  # 0: it cannot be written
        self._steps.enter(save)

    def keep_on(self) -> None:
        """A restore has failed, perhaps after it began an epoch: training goes on from where it was."""
        if not self._has_entered:
            self._keeper.note_epoch(self._sequence, self._number)
        if self._steps.are_free:
            if self._is_parent_known:
                self._keeper.resume(self._parent, is_new=False)
        else:  # it was at its own newest save
            self._is_parent_known = False
            self._steps.leave()

    def rewind(self, step: int, choose: Callable[[Callable[[], None]], SaveId]) -> None:
        """The epoch goes on from this step, durably.  Blocks; raises.

        ``choose``: which save that is, on all ranks; it calls the function that it is given before it looks.
        """
        try:
            save = choose(self.beginning())
        except BaseException:
            self.keep_on()
            raise
        self.resume(save)
        # Rank 0's keeper makes it durable for all: no other rank may say so before.
        do_together(self._group, f"putting down that step {step} is gone back to", lambda: self._keeper.rewind(save))
