"""Roots that ranks do not share: there a save is committed when every rank has sealed it.

No manifest says so.  While the job lives the ranks count their seals in the store of torch.distributed; after a restart
they compare what each has.  A rank that will not seal a save says so: the save has failed here, or this rank restores,
so that it saves nothing more in this epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stillframe.errors import DeadlineError, KeeperError
from stillframe.model import SaveId
from stillframe.ranks.group import Group
from stillframe.save.saves import Save, Saves
from stillframe.units import format_ranks

_MAX_TEXT = 2000
_ADVICE = "every rank must save the same steps"


class SealCount:
    """``epoch``: the one that the ranks have agreed on.  Thread: safe from any; nothing here blocks."""

    def __init__(self, group: Group, epoch: int) -> None:
        self._group = group
        self._epoch = epoch
        self._complete = -1

    def complete_step(self) -> int:
        """The newest step of the present epoch that every rank is known to have sealed; -1 if none."""
        return self._complete

    def enter(self, epoch: int) -> None:
        """Another epoch begins."""
        self._epoch, self._complete = epoch, -1

    # --- telling ---------------------------------------------------------------------------

    def sealed(self, save: SaveId) -> None:
        """This rank has sealed it.  To be told before anybody here learns of it, so that it comes before a leave."""
        self._group.count(_key(save))

    def ended(self, save: Save) -> None:
        """A save is over, which is told before anybody here learns of it.  If it was not sealed, it never will be."""
        if save.error is not None and save.phase != "sealed":
            self.failed(save.step, save.attempt, str(save.error))

    def failed(self, step: int, attempt: int, why: str) -> None:
        """This rank will not seal it."""
        text = f"rank {self._group.rank} could not save it: {why}"[:_MAX_TEXT]
        self._group.say(f"{_key(SaveId(step, self._epoch, attempt))}/failed", text)

    def leave(self) -> None:
        """This rank has sealed all that it will seal in this epoch."""
        self._group.count(_left(self._epoch))

    def stay(self) -> None:
        """It saves more after all."""
        self._group.take_back(_left(self._epoch))

    # --- watching --------------------------------------------------------------------------

    def watch(self, save: SaveId, own: Save, saves: Saves, on_complete: Callable[[], None]) -> None:
        """Commit or fail this rank's own save when it is known what comes of it on the others.

        ``on_complete`` is called before anybody learns that it is committed.
        """
        deadline_s = time.monotonic() + self._group.deadline_s
        hopeless = self._watch_leaving(save)

        def is_over() -> bool:
            if own.phase == "failed":
                return True
            if not self._group.lacking(_key(save)):
                if save.epoch == self._epoch:
                    self._complete = max(self._complete, save.step)
                on_complete()
                saves.committed(own.number, time.monotonic())
                self._group.settle(_key(save))
                return True
            why = self._group.said(f"{_key(save)}/failed") or hopeless()
            if why:
                self._fail(saves, own, KeeperError(f"step {save.step} is not committed: {why}"))
                return True
            if time.monotonic() > deadline_s:
                ranks = format_ranks(self._group.missing(_key(save)))
                what = f"{ranks} of {self._group.world_size} did not seal it within {self._group.deadline_s:g} s"
                self._fail(saves, own, DeadlineError(f"step {save.step} is not committed: {what}; {_ADVICE}"))
                return True
            return False

        def is_over_or_lost() -> bool:
            try:
                return is_over()
            except (RuntimeError, OSError) as error:
                why = "cannot determine whether every rank has sealed it: the store of torch.distributed is gone"
                self._fail(saves, own, DeadlineError(f"step {save.step}: {why} ({error})"))
                return True

        self._group.watch(is_over_or_lost)

    def _watch_leaving(self, save: SaveId) -> Callable[[], str]:
        """Tells, when asked, who has left the epoch without sealing this save; empty if nobody has.

        Who that is costs a question for each rank, so it is asked only when more ranks have left than before.
        """
        staying = self._group.world_size
        left = _left(save.epoch)

        def hopeless() -> str:
            nonlocal staying
            before, staying = staying, self._group.lacking(left)
            if staying >= before:
                return ""
            present = set(self._group.missing(left))  # asked first: who seals it does so before it leaves
            ranks = [rank for rank in self._group.missing(_key(save)) if rank not in present]
            return f"{format_ranks(ranks)} went on to restore() without saving it; {_ADVICE}" if ranks else ""

        return hopeless

    def _fail(self, saves: Saves, save: Save, error: KeeperError | DeadlineError) -> None:
        saves.tell_failed(saves.fail(save.number, error))


def _key(save: SaveId) -> str:
    return f"sealed/{save.epoch}-{save.step}-{save.attempt}"


def _left(epoch: int) -> str:
    return f"left/{epoch}"
