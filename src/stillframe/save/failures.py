"""Where ranks share a root: how they tell one another that a save has failed, if the root cannot say so.

The keeper of a rank that will not seal a save leaves a file in the root, and that of rank 0 an outcome if it will not
commit one.  On a disk that is full for it, it cannot, and who waits for its word would wait for the deadline.  So its
trainer says it in the store of torch.distributed, too; the trainer of a keeper that has waited for a while looks there.
Nobody looks before that, and ``save`` still talks to nobody.

- A word is of one save: its key has the step, the attempt, and how often the run has restored, which tells the epoch.
- A word says only that a save has failed.  That one is committed, the root alone can say.
- A member that has sealed takes its files back only if rank 0's keeper itself has ended the save without a manifest,
  and so can never put one.  In every other case (it died, another run took over, nobody can tell) they stay.
- What all ranks have said stays bounded: :mod:`stillframe.ranks.told`.
"""

from __future__ import annotations

import contextlib

import msgspec

from stillframe.errors import KeeperError, StillframeError, to_record
from stillframe.link.messages import Uncommitted
from stillframe.ranks.group import Group
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.saves import Save, Saves
from stillframe.untrusted import decoder_of

_MAX_TEXT = 2000


class _Word(msgspec.Struct, frozen=True):
    """Why a rank has not saved it."""

    rank: int
    error: str
    message: str
    files_stay: bool = True

    def text(self, step: int) -> str:
        what = f"step {step} is not committed"
        is_said = self.message.startswith(what)
        return self.message if is_said else f"{what}: rank {self.rank} could not save it: {self.message}"


class Failures:
    """Thread: safe from any; nothing here blocks."""

    def __init__(self, group: Group, saves: Saves, keeper: KeeperClient) -> None:
        self._group = group
        self._saves = saves
        self._keeper = keeper

    def begin(self) -> None:
        """If the ranks have met: else nobody could tell this job's words from an earlier one's."""
        if self._group.can_tell:
            self._saves.on_end.append(self._ended)
            self._saves.on_awaiting = self._watch
            self._keeper.on_unsaved = self._unsaved

    @property
    def _is_first(self) -> bool:
        return self._group.rank == 0

    # --- telling ---------------------------------------------------------------------------

    def _ended(self, save: Save) -> None:
        # Its phase is still the last one before it failed.  Rank 0 may commit what another rank has sealed.
        if save.error is not None and (self._is_first or save.phase != "sealed"):
            self._say(_name(save), save.error, save._files_stay)

    def _unsaved(self, sequence: int, step: int, attempt: int, error: StillframeError) -> None:
        """A save that this rank never began, or that a keeper had which is gone."""
        self._say(f"{sequence}-{step}-{attempt}", error, files_stay=True)

    def _say(self, name: str, error: StillframeError, files_stay: bool) -> None:
        kind, message = to_record(error)
        word = _Word(self._group.rank, kind, message[:_MAX_TEXT], files_stay)
        key = _uncommitted(name) if self._is_first else _unsealed(name)
        self._group.say(key, msgspec.json.encode(word).decode())

    # --- looking ---------------------------------------------------------------------------

    def _watch(self, save: Save) -> None:
        """Until it is over: then the store is asked no more."""
        key = _unsealed(_name(save)) if self._is_first else _uncommitted(_name(save))
        tell = self._give_up if self._is_first else self._pass_on

        def is_over() -> bool:
            if save.phase in ("committed", "failed"):
                return True
            try:
                said = self._group.said(key)
            except (RuntimeError, OSError):  # the store is gone: the deadline is left
                return True
            if said is not None:
                tell(save, decoder_of(_Word).decode(said))
            return said is not None

        self._group.watch(is_over)

    def _give_up(self, save: Save, word: _Word) -> None:
        """Rank 0 commits it no more."""
        error = KeeperError(word.text(save.step))
        self._keeper.report_unsaved(save._sequence, save.step, save.attempt, error, is_begun=True)

    def _pass_on(self, save: Save, word: _Word) -> None:
        """To the keeper that has sealed it, or waits for rank 0 to begin; the next one knows nothing of it."""
        message = Uncommitted(save.number, word.error, word.text(save.step), word.files_stay)
        if save.job.keeper is not None:
            with contextlib.suppress(KeeperError):
                save.job.keeper.send(message)


def _name(save: Save) -> str:
    """The same on every rank: each begins an epoch with the same restore."""
    return f"{save._sequence}-{save.step}-{save.attempt}"


def _unsealed(name: str) -> str:
    """By any rank but the first."""
    return f"unsealed/{name}"


def _uncommitted(name: str) -> str:
    """By rank 0."""
    return f"uncommitted/{name}"
