"""Removing a save: a tombstone first, so that a half-removed checkpoint is none, whatever is left of it.

Order: tombstone, look at the epochs and at the pin, then the files, manifest first, and the tombstone last.  While the
tombstone is there, nothing that a crash leaves of the files is a checkpoint: one durable deletion removes them all.
Only files whose names are stillframe's are ever removed.  Who pins a save puts the pin, then looks for a tombstone: so
a save that is pinned while it is removed either stays, or whoever pins it is told.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from stillframe.checkpoint import epochs, labels
from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import BusyError, StorageError
from stillframe.format import limits, names
from stillframe.format.epochs import Aside, Reason, encode_aside
from stillframe.model import SaveId
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.protocol import Missing, NotOurs, read_all

PINNED = "it is pinned"
READ = "somebody is reading it"
QUARANTINED = "it is quarantined"
COMMITTED = "it has become a checkpoint meanwhile"
UNSETTLED = "another run has begun to remove it, and may yet leave it"
TOMBSTONE_S = 24 * 3600.0
"""So long a tombstone is left alone by others: whoever put it may only be paused, and then withdraws it."""


def remove(catalog: Catalog, save: SaveId, reason: Reason, epoch: int, message: str = "") -> str:
    """Remove a checkpoint, and its label.  Returns why it stays; empty if it is gone.  ``epoch``: of whoever decides.

    Raises: :class:`BusyError`, :class:`StorageError`.
    """
    with exclusive(catalog, save) as is_free:
        if not is_free:
            return READ if is_read(catalog, save) else "it cannot be locked"
        if stays := set_aside(catalog, save, reason, epoch, message):
            return stays
    remove_all(catalog, save)
    return ""


def set_aside(catalog: Catalog, save: SaveId, reason: Reason, epoch: int, message: str = "") -> str:
    """From here on the save is no checkpoint.  ``epoch``: of whoever decides.  May be repeated.

    What is left over is none before, either: if another has committed it meanwhile, nothing changes.
    Returns why it must stay, and empty if it may be removed now: what is quarantined goes only by hand.
    Raises: :class:`BusyError` if a later epoch has been claimed (then nothing has changed); :class:`StorageError`.
    """
    was_committed = catalog.is_committed(save)
    key, data = catalog.aside_key(save), encode_aside(Aside(reason, was_committed, epoch, time.time(), message))
    is_ours = True
    try:
        is_ours = catalog.store.put_new(key, data)
    finally:  # a put that raised may have happened
        if not epochs.is_newest(catalog, epoch):
            if is_ours:  # nothing has been removed yet; in a tier it may be a checkpoint by now
                _withdraw(catalog, key, data)
            raise superseded(catalog, epoch)
    if is_ours and reason in ("pruned", "removed") and is_pinned(catalog, save):
        catalog.store.delete([key])
        return PINNED
    if is_ours and reason == "left over" and _was_published(catalog, save, key, data):
        return COMMITTED
    return "" if is_ours else _take_over(catalog, save, reason, epoch, message)


def _take_over(catalog: Catalog, save: SaveId, reason: Reason, epoch: int, message: str) -> str:
    """A tombstone is there already.  Returns why it cannot be relied on."""
    aside = catalog.aside(save)
    if aside is None:
        return UNSETTLED
    if aside.reason == "quarantined":
        return "" if reason == "removed" else QUARANTINED
    if aside.epoch != epoch:
        if time.time() - aside.unix_s <= TOMBSTONE_S:
            return UNSETTLED
        ours = Aside(reason, aside.was_committed, epoch, time.time(), message)
        catalog.store.put(catalog.aside_key(save), encode_aside(ours))
        if not epochs.is_newest(catalog, epoch):
            raise superseded(catalog, epoch)
    return ""


def _was_published(catalog: Catalog, save: SaveId, key: str, data: bytes) -> bool:
    """Whether it has been committed since the caller looked: then, or if that is unknown, the tombstone goes."""
    is_published = True
    try:
        is_published = catalog.store.head(catalog.commit_key(save)) is not None
    finally:
        if is_published:
            _withdraw(catalog, key, data)
    return is_published


def _withdraw(catalog: Catalog, key: str, data: bytes) -> None:
    """Only what is ours, and only from a checkpoint: of any other save, what is left may be on its way out."""
    with contextlib.suppress(Missing):
        if read_all(catalog.store, key, limits.MAX_NOTE_BYTES) == data:
            catalog.store.delete([key])


def is_pinned(catalog: Catalog, save: SaveId) -> bool:
    """Raises :class:`StorageError` if that cannot be determined."""
    return catalog.store.head(names.key(save, names.PIN)) is not None


def is_read(catalog: Catalog, save: SaveId) -> bool:
    """Whether somebody reads it now, as far as locks tell."""
    try:
        with FileLock(catalog.store, catalog.commit_key(save)) as lock:
            return not lock.acquire()
    except (NoLocks, StorageError):
        return False


@contextlib.contextmanager
def exclusive(catalog: Catalog, save: SaveId) -> Iterator[bool]:
    """Holds the manifest's lock; tells whether it could be had, that is, whether nobody is reading it now."""
    try:
        lock = FileLock(catalog.store, catalog.commit_key(save))
    except (Missing, NotOurs, NoLocks):
        yield True  # then nobody can read it either, or nobody can tell
        return
    except StorageError:
        yield False
        return
    with lock:
        try:
            is_free = lock.acquire()
        except NoLocks:
            is_free = True
        except StorageError:
            is_free = False
        yield is_free


def superseded(catalog: Catalog, epoch: int) -> BusyError:
    return BusyError(
        f"another run has taken over {catalog.root} (a later start than {epoch} is noted there): "
        "stop one of the two, or give each a place of its own"
    )


def remove_rank_files(catalog: Catalog, save: SaveId, rank: int, *more: str) -> None:
    """One rank's files of a save that is set aside, by name: a listing would grow with the number of ranks.

    ``more``: names of other files of the save that go first.
    """
    _delete(catalog, save, [*more, names.seal(rank), names.segment(rank), names.failure(rank)])


def has_rank_files(catalog: Catalog, save: SaveId) -> bool:
    """Whether ranks have files there still.  Raises :class:`StorageError`."""
    return any(map(names.parse_rank_file, catalog.store.list(names.step_dir(save))))


def remove_all(catalog: Catalog, save: SaveId, keeps_tombstone: bool | None = None) -> None:
    """Everything of a save that is set aside, and its label; in a root that is not shared, everything of this rank.

    ``keeps_tombstone``: of a save that was not committed, whose writer may only be paused: what it still writes must
    never become a checkpoint.  By default where the store may still carry out a put that raised.
    Raises: :class:`StorageError`; the rest is removed when it is called again.
    """
    found = [name for name in _files(catalog, save) if name != names.aside(catalog.rank)]
    labels.remove(catalog, save)
    if found:
        _delete(catalog, save, found)
    if not (catalog.store.caps.lands_late if keeps_tombstone is None else keeps_tombstone):
        catalog.store.delete([catalog.aside_key(save), f"{names.step_dir(save)}/"])


def _delete(catalog: Catalog, save: SaveId, found: Iterable[str]) -> None:
    """The manifest first: what lacks a file is not published, even if a later epoch finds the tombstone void.

    A file system removes in the order it is given.  A server is asked twice: of one request it may do any part.
    """
    ordered = sorted(found, key=lambda name: name != names.MANIFEST)
    if catalog.store.caps.lands_late and names.MANIFEST in ordered:
        catalog.store.delete([names.key(save, ordered.pop(0))])
    catalog.store.delete([names.key(save, name) for name in ordered])


def _files(catalog: Catalog, save: SaveId) -> Iterable[str]:
    """Those of stillframe's in the directory; in a root that is not shared, those of this rank."""
    for name in catalog.store.list(names.step_dir(save)):
        file = names.parse_rank_file(name)
        if names.is_ours(name) and (catalog.rank is None or (file is not None and file.rank == catalog.rank)):
            yield name
