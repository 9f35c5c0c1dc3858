"""Roots that ranks do not share: there a save is committed when every rank has sealed it.

No manifest says so.  While the job lives the ranks count their seals in the store of torch.distributed; after a restart
they compare what each has.
"""

from __future__ import annotations

import time

from stillframe.errors import DeadlineError, KeeperError
from stillframe.ranks.group import Group
from stillframe.save.saves import Save, Saves
from stillframe.units import format_ranks

_MAX_TEXT = 2000


class SealCount:
    """Thread: safe from any; nothing here blocks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sequence = 0
        self._complete = -1

    def complete_step(self) -> int:
        """The newest step of the present epoch that every rank is known to have sealed; -1 if none."""
        return self._complete

    def enter(self, sequence: int) -> None:
        """Another epoch begins."""
        self._sequence, self._complete = sequence, -1

    def sealed(self, sequence: int, save: Save, saves: Saves) -> None:
        """This rank has sealed it: tell the others, and watch for them."""
        key = _key(sequence, save.step, save.attempt)
        since_s = time.monotonic()

        def is_over() -> bool:
            missing = self._group.lacking(key)
            if not missing:
                if sequence == self._sequence:
                    self._complete = max(self._complete, save.step)
                saves.committed(save.number, time.monotonic())
                return True
            failure = self._group.said(f"{key}/failed")
            if failure is not None:
                self._fail(saves, save, KeeperError(f"step {save.step} is not committed: {failure}"))
                return True
            if time.monotonic() - since_s > self._group.deadline_s:
                ranks = format_ranks(self._group.missing(key))
                self._fail(
                    saves, save,
                    DeadlineError(
                        f"step {save.step} is not committed: {ranks} of {self._group.world_size} did not seal it "
                        f"within {self._group.deadline_s:g} s; every rank must save the same steps"
                    ),
                )  # fmt: skip
                return True
            return save.phase == "failed"

        def is_over_or_lost() -> bool:
            try:
                return is_over()
            except (RuntimeError, OSError) as error:
                why = "it cannot be told whether every rank has sealed it: the store of torch.distributed is gone"
                self._fail(saves, save, DeadlineError(f"step {save.step}: {why} ({error})"))
                return True

        self._group.count(key)
        self._group.watch(is_over_or_lost)

    def _fail(self, saves: Saves, save: Save, error: KeeperError | DeadlineError) -> None:
        saves.tell_failed(saves.fail(save.number, error))

    def failed(self, sequence: int, step: int, attempt: int, why: str) -> None:
        """This rank will not seal it."""
        text = f"rank {self._group.rank} could not save it: {why}"[:_MAX_TEXT]
        self._group.say(f"{_key(sequence, step, attempt)}/failed", text)


def _key(sequence: int, step: int, attempt: int) -> str:
    return f"sealed/{sequence}-{step}-{attempt}"
