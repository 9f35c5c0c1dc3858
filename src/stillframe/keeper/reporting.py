"""What the other ranks are told of how a save ended here, through the root that they share.

Best effort: a root that cannot be written cannot say so.  Then the trainers tell one another, as long as they live
(:mod:`stillframe.save.failures`), and after that the deadline is left.
"""

from __future__ import annotations

import contextlib

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import DeadlineError, StillframeError
from stillframe.format.epochs import Outcome
from stillframe.format.records import Failure
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.outcomes import OutcomeBook
from stillframe.keeper.segment import report_failure
from stillframe.keeper.terms import COORDINATOR
from stillframe.model import SaveId

_MAX_TEXT = 10_000
_EPOCH_S = 10.0
"""So long a member waits for rank 0 to begin the epoch: before that there is no place for its word."""


class Reporting:
    """``is_alone``: no other rank waits for this one.  Thread: safe from any."""

    def __init__(self, catalog: Catalog, epoch: CurrentEpoch, rank: int, is_alone: bool) -> None:
        self._catalog = catalog
        self._epoch = epoch
        self._rank = rank
        self._is_alone = is_alone
        self._outcomes = OutcomeBook(catalog.store)

    def committed(self, save: SaveId) -> None:
        """By rank 0; the others say nothing."""
        if self._rank == COORDINATOR and not self._is_alone:
            self._outcomes.tell(Outcome(save))

    def unsaved(self, step: int, attempt: int, kind: str, message: str, files_stay: bool = False) -> None:
        """This rank will not seal it, or rank 0 not commit it.

        Blocks: a member, for a while, until rank 0 has begun the epoch.  Later saves wait for this to end.
        """
        if self._is_alone:
            return
        with contextlib.suppress(StillframeError):
            save = SaveId(step, self._epoch.current(_check).epoch, attempt)
            if self._rank == COORDINATOR:
                self._outcomes.tell(Outcome(save, kind, message, files_stay))
            else:
                report_failure(self._catalog, Failure(save, self._rank, kind, message[:_MAX_TEXT]))


def _check(waited_s: float) -> None:
    if waited_s > _EPOCH_S:
        raise DeadlineError("rank 0 has not begun to save")
