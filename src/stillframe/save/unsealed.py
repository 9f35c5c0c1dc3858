"""Where ranks share a root: how rank 0 learns that another rank will not seal a save, if the root cannot say so.

The keeper of that rank leaves a file in the root.  On a disk that is full for it, it cannot, and rank 0 would wait for
its deadline.  So its trainer says it in the store of torch.distributed, too; rank 0's trainer looks there when its
keeper has waited for a while.  Nobody looks before that, and ``save`` still talks to nobody.

Only rank 0 is told.  Rank 0 may have counted the seal of another rank already.  So that rank takes its seal back only
when rank 0 says so in the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stillframe.errors import KeeperError, StillframeError, text_of
from stillframe.ranks.group import Group
from stillframe.save.saves import Save, Saves

_MAX_TEXT = 2000

GiveUp: TypeAlias = Callable[[int, int, StillframeError, bool], None]
"""Takes the step, the attempt, the error, and whether this rank has begun to save it."""


class Unsealed:
    """Thread: safe from any; nothing here blocks."""

    def __init__(self, group: Group, saves: Saves, give_up: GiveUp) -> None:
        self._group = group
        self._saves = saves
        self._give_up = give_up

    def begin(self) -> None:
        """If the ranks have met: else nobody could tell this job's words from an earlier one's."""
        if self._group.can_tell and self._group.rank > 0:
            self._saves.on_end.append(self._ended)
        elif self._group.can_tell:
            self._saves.on_awaiting = self._watch

    def _ended(self, save: Save) -> None:
        if save.error is not None and save.phase != "sealed":  # its phase is still the last one before it failed
            text = f"rank {self._group.rank} could not save it: {text_of(save.error)}"
            self._group.say(_key(save), text[:_MAX_TEXT])

    def _watch(self, save: Save) -> None:
        """Until it is over: then the store is asked no more."""

        def is_over() -> bool:
            if save.phase != "sealed":
                return True
            try:
                why = self._group.said(_key(save))
            except (RuntimeError, OSError):  # the store is gone: the deadline is left
                return True
            if why is not None:
                error = KeeperError(f"step {save.step} is not committed: {why}")
                self._give_up(save.step, save.attempt, error, True)
            return why is not None

        self._group.watch(is_over)


def _key(save: Save) -> str:
    """The same on every rank: each begins an epoch with the same restore."""
    return f"unsealed/{save._sequence}-{save.step}-{save.attempt}"
