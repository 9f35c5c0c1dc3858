"""How saves ended: rank 0's word to the other ranks, in one small file that it overwrites.

A hint for those who wait, and the last word on nothing: what is committed is told by manifests.  It is put after the
manifest is durable and no later epoch was found, so a member may report what it says.
"""

from __future__ import annotations

import contextlib
import threading

from stillframe.errors import IntegrityError, StorageError, VersionError
from stillframe.format import limits, names
from stillframe.format.epochs import Outcome, Outcomes, decode_outcomes, encode_outcomes
from stillframe.model import SaveId
from stillframe.store.protocol import Missing, Store, read_all

_MAX_OUTCOMES = 1000
_MAX_TEXT = 2000


def read_outcome(store: Store, save: SaveId) -> Outcome | None:
    """How a save ended, if that has been told.  Raises :class:`StorageError`."""
    return next((each for each in reversed(_read(store, save.epoch)) if each.save == save), None)


def _read(store: Store, epoch: int) -> list[Outcome]:
    key = names.outcomes(epoch)
    with contextlib.suppress(Missing, IntegrityError, VersionError):
        return decode_outcomes(read_all(store, key, limits.MAX_NOTE_BYTES), file=store.where(key)).ended
    return []


class OutcomeBook:
    """Rank 0's side.  Thread: safe from any."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._epoch = 0
        self._ended: list[Outcome] = []

    def tell(self, outcome: Outcome) -> None:
        """Best effort: the other ranks have a deadline."""
        with self._lock, contextlib.suppress(StorageError):
            if outcome.save.epoch != self._epoch:
                self._ended = _read(self._store, outcome.save.epoch)  # an earlier keeper of this epoch may have written
                self._epoch = outcome.save.epoch
            short = Outcome(outcome.save, outcome.error, outcome.message[:_MAX_TEXT], outcome.files_stay)
            self._ended = [*self._ended[1 - _MAX_OUTCOMES :], short]
            data = encode_outcomes(Outcomes(self._epoch, self._ended))
            self._store.put(names.outcomes(self._epoch), data, durable=False)
