"""The notes about tiers: which a root has, what is carried to one, what keepers are at.

They are hints, for people and for whoever comes next; one that is missing, or cannot be decoded, says nothing.
"""

from __future__ import annotations

import contextlib

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import IntegrityError, StillframeError, VersionError
from stillframe.format import limits, names
from stillframe.format.epochs import Target, TierNote, decode_carrying, decode_target, decode_tiers
from stillframe.model import SaveId
from stillframe.store.protocol import Missing, NotOurs, Store, read_all


def read_tiers(store: Store) -> list[TierNote]:
    """The tiers that the run of a root has, or had last; none if nothing tells.  Raises nothing."""
    key = names.TIERS
    try:
        return decode_tiers(read_all(store, key, limits.MAX_NOTE_BYTES), file=store.where(key)).tiers
    except StillframeError:
        return []


def read_target(tier: Catalog) -> Target | None:
    """Which save is being carried there, or was last.  Raises :class:`StorageError`."""
    key = names.TARGET
    try:
        return decode_target(read_all(tier.store, key, limits.MAX_NOTE_BYTES), file=tier.store.where(key))
    except (Missing, NotOurs, IntegrityError, VersionError):
        return None


def read_carrying(store: Store) -> set[SaveId]:
    """What keepers carry from a root, or were carrying when they ended, as far as they have noted it.

    Raises :class:`StorageError`.
    """
    found: set[SaveId] = set()
    for name in store.list(names.RUN):
        if names.is_carrying(name):
            key = f"{names.RUN}/{name}"
            with contextlib.suppress(Missing, NotOurs, IntegrityError, VersionError):
                note = decode_carrying(read_all(store, key, limits.MAX_NOTE_BYTES), file=store.where(key))
                found.update(save for each in note.tiers for save in (each.save, each.waiting) if save is not None)
    return found
