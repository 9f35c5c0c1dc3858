"""Epochs: which life of the run a writer belongs to.

No lock can stop the late write of a keeper that was paused, and a lock that is granted proves nothing on some network
file systems.  So safety is two orders:

- who writes in an epoch puts a manifest or a tombstone, *then* lists the epochs; if a newer one is there, the manifest
  is not reported as committed, and the tombstone is withdrawn;
- who begins an epoch claims it, *then* lists the saves, then chooses which one to go on from.

So a successor sees every commit that was reported, and nobody deletes what it chose.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StorageError,
)
from stillframe.format import limits, names
from stillframe.format.epochs import Claim, Parent, decode_claim, encode_claim, encode_parent
from stillframe.format.records import Manifest
from stillframe.latch import later
from stillframe.lineage import Row, continue_from
from stillframe.model import MAX_STEP, SaveId
from stillframe.store.protocol import Missing, NotOurs, Store, read_all

_RECENT = 16
"""So many of the newest epochs are looked at for one of our own."""
_TRIES = 100
_LOOKS, _LOOK_S = 20, 0.05
_ASK_S = 5.0
"""So long a tier may take to say which epochs it knows."""
_MOST_IN_TIER = names.MAX_EPOCH // 2
"""Numbers above it in a tier are not heeded: they would leave too few for the root."""
_KEPT = 20
"""The files of so many epochs stay, even if nothing that is stored comes from them."""


def next_epoch(catalog: Catalog, tiers: Sequence[Catalog] = ()) -> int:
    """The number after all that have been claimed or used for a save.  Raises :class:`StorageError`.

    The tiers behind a root are asked, too: its disk may be new, or somebody has removed steps in a tier by hand.  One
    that does not answer soon takes nothing from this run if it turns out to hold the same numbers
    (:func:`stillframe.checkpoint.promote.introduce`).
    """
    asked = [later(partial(next_epoch, tier)) for tier in tiers]
    used = [save.epoch for name in catalog.store.list() if (save := names.parse_step_dir(name.rstrip("/")))]
    free = max([0, *catalog.epochs(), *used]) + 1
    end_s = time.monotonic() + _ASK_S
    for each in asked:
        with contextlib.suppress(StorageError, DeadlineError):
            found = each.get(max(end_s - time.monotonic(), 0.0))
            free = max(free, found) if found <= _MOST_IN_TIER else free  # no run of ours: it must not end this one
    return free


def is_newest(catalog: Catalog, epoch: int) -> bool:
    """Whether no later epoch has been claimed.  Raises :class:`StorageError`.

    First puts a file of its own beside the claims: a network file system may answer from its cache what a client lists
    in a directory that this client has not changed.  An object store does not, and may refuse to have one object
    written more than once a second.
    """
    if not catalog.store.caps.lists_fresh:
        catalog.store.put(names.seen(epoch), b"", durable=False)
    return max(catalog.epochs(), default=0) <= epoch


def is_harmless(catalog: Catalog, epoch: int, run: str) -> bool:
    """Whether a later epoch takes nothing over: it is of this same run, or somebody has removed saves by hand in it."""
    found = read_claim(catalog.store, epoch)
    for _ in range(_LOOKS):  # its directory comes first
        if found is None:
            time.sleep(_LOOK_S)
            found = read_claim(catalog.store, epoch)
    parent = catalog.parent(epoch)
    return (found is not None and found.run == run) or (parent is not None and parent.is_by_hand)


def claim(catalog: Catalog, run: str, sequence: int, number: int | None = None, tiers: Sequence[Catalog] = ()) -> int:
    """Begin an epoch: the next free number, or ``number`` where the ranks have agreed on one.  May be repeated.

    Raises: :class:`StorageError`; :class:`BusyError` if the number is another run's.
    """
    found = find_claim(catalog, run, sequence)
    if found is not None:
        return found
    for _ in range(_TRIES):
        epoch = number or next_epoch(catalog, tiers)
        if epoch > names.MAX_EPOCH:
            raise ConfigError(f"{catalog.root} has had {names.MAX_EPOCH} starts: use another root")
        if catalog.store.put_new(names.claim(epoch), encode_claim(Claim(epoch, run, sequence))):
            return epoch
        if number is not None:
            break
    raise BusyError(f"another run has just begun in {catalog.root}: one run writes to a root")


def claim_number(catalog: Catalog, run: str, sequence: int, number: int) -> int:
    """Claim this number.  Raises: :class:`BusyError` if it is another run's; :class:`StorageError`."""
    if number > names.MAX_EPOCH or not catalog.store.put_new(
        names.claim(number), encode_claim(Claim(number, run, sequence))
    ):
        raise BusyError(f"start {number} in {catalog.root} is another run's: one run writes to a root")
    return number


def find_claim(catalog: Catalog, run: str, sequence: int) -> int | None:
    """The epoch that this run has claimed as its ``sequence``-th, if it is among the newest ones."""
    for epoch in sorted(catalog.epochs(), reverse=True)[:_RECENT]:
        claimed = read_claim(catalog.store, epoch)
        if claimed is not None and (claimed.run, claimed.sequence) == (run, sequence):
            return epoch
    return None


def read_claim(store: Store, epoch: int) -> Claim | None:
    """Who has claimed an epoch, as far as that can be read.  Raises :class:`StorageError`."""
    key = names.claim(epoch)
    try:
        return decode_claim(read_all(store, key, limits.MAX_NOTE_BYTES), file=store.where(key))
    except (Missing, NotOurs, FormatError):  # FormatError: then it is not ours, either
        return None


def find_parent(catalog: Catalog, run: str, sequence: int) -> Parent | None:
    """What rank 0 has put down for the epoch, if it has by now.  Raises :class:`StorageError`."""
    for epoch in sorted(catalog.epochs(), reverse=True)[:_RECENT]:
        found = catalog.parent(epoch)
        if found is not None and (found.run, found.sequence) == (run, sequence):
            return found
    return None


def begin(
    catalog: Catalog,
    epoch: int,
    run: str,
    sequence: int,
    parent: SaveId | None,
    is_shared: bool,
    tiers: Sequence[Catalog] = (),
) -> Parent:
    """Put down, durably, what a claimed epoch goes on from.  May be repeated: the first word stands.

    ``tiers``: where else the parent may lie.  Raises: :class:`StorageError`.
    """
    rows = _lineage_of([catalog, *tiers], parent) if parent is not None else []
    lineage = list(continue_from(parent, rows))[: limits.MAX_LINEAGE_ROWS]
    return _put_parent(catalog, Parent(epoch, run, sequence, is_shared, parent, lineage))


def _put_parent(catalog: Catalog, wanted: Parent) -> Parent:
    if not catalog.store.put_new(names.parent(wanted.epoch), encode_parent(wanted)):
        found, where = catalog.parent(wanted.epoch), catalog.store.where(names.parent(wanted.epoch))
        if found is None:
            raise StorageError(f"{where} exists, but cannot be read: check the root")
        return found
    return wanted


def begin_by_hand(catalog: Catalog) -> int:
    """Begin an epoch that saves nothing, for somebody who removes things where no run lives.  Returns its number.

    It is put down what it goes on from before anything goes: a paused run of an earlier epoch that then puts down a
    save which is gone by now is not asked any more.  That is the whole branch as it is, also an epoch that has saved
    nothing here: a tier may lack what the root has, and a rewind stays one.  Raises: as :func:`claim`.
    """
    import secrets  # not for keepers: it loads much else

    run = secrets.token_hex(4)
    epoch = claim(catalog, run, 0)
    view = catalog.look()
    before = view.branch.epoch
    rows = list(view.branch.lineage)
    known = None if before is None else catalog.parent(before)
    if before is not None and (known is None or not known.is_by_hand):
        rows = [Row(before, MAX_STEP), *rows]
    lineage = rows[: limits.MAX_LINEAGE_ROWS]
    _put_parent(catalog, Parent(epoch, run, 0, view.is_shared, view.branch.parent, lineage, is_by_hand=True))
    return epoch


def _lineage_of(catalogs: Sequence[Catalog], save: SaveId) -> list[Row]:
    """The lineage of a checkpoint's epoch; as far as manifests tell, where the epoch's own file is gone."""
    rows: list[Row] = []
    at: SaveId | None = save
    while at is not None:
        epoch = at.epoch
        known = next(filter(None, (each.parent(epoch) for each in catalogs)), None)
        if known is not None:
            return [*rows, *known.lineage]
        manifest = next(filter(None, (_manifest(each, at) for each in catalogs)), None)
        if manifest is None:
            break
        at = manifest.parent
        rows += [Row(at.epoch, at.step)] if at is not None else []
    return rows


def _manifest(catalog: Catalog, save: SaveId) -> Manifest | None:
    with contextlib.suppress(NotFoundError, IntegrityError):
        return catalog.manifest(save)
    return None


def forget(catalog: Catalog, current: Parent) -> None:
    """Remove the files of old epochs that the branch does not come from.  Raises :class:`StorageError`."""
    wanted = {current.epoch, *(row.epoch for row in current.lineage)}
    old = [epoch for epoch in sorted(catalog.epochs(), reverse=True)[_KEPT:] if epoch not in wanted]
    for epoch in old:
        listed = catalog.store.list(names.epoch_dir(epoch))
        files = [f"{names.epoch_dir(epoch)}/{name}" for name in listed if not name.endswith("/")]
        catalog.store.delete([names.seen(epoch), *files, f"{names.epoch_dir(epoch)}/"])
