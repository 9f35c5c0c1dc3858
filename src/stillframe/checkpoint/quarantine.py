"""Setting damaged checkpoints aside: no restore tries them.  Deletes nothing; removing the tombstone undoes it."""

from __future__ import annotations

from stillframe.checkpoint import removal
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.verify import Damage, Verdict, verify_save
from stillframe.errors import BusyError
from stillframe.model import SaveId
from stillframe.store import open_store
from stillframe.store.posix import PosixStore

_TRIES = 3
_MAX_TEXT = 2000


def confirm(catalog: Catalog, verdict: Verdict) -> list[Damage]:
    """Those of the damages that are found again when everything is opened and read anew, through another store.

    Raises: as :func:`verify_save`.
    """
    store = PosixStore(catalog.root) if isinstance(catalog.store, PosixStore) else open_store(catalog.store)
    again = {(each.rank, each.chunk) for each in verify_save(Catalog(store, catalog.rank), verdict.save).damages}
    return [each for each in verdict.damages if (each.rank, each.chunk) in again]


def quarantine(catalog: Catalog, save: SaveId, damages: list[Damage]) -> None:
    """Set a checkpoint aside; in a root that the ranks do not share, the parts of the ranks that are damaged.

    Raises: :class:`BusyError` if runs begin all the time; :class:`StorageError`.
    """
    for part in _parts(catalog, save, damages):
        own = [each.message for each in damages if part.rank in (None, each.rank)] or [damages[0].message]
        for attempt in range(_TRIES):
            epoch = max([save.epoch, *catalog.epochs()])
            try:
                removal.set_aside(part, save, "quarantined", epoch, own[0][:_MAX_TEXT])
                break
            except BusyError:  # a run has begun just now; it is no matter to whom the epoch belongs
                if attempt == _TRIES - 1:
                    raise


def _parts(catalog: Catalog, save: SaveId, damages: list[Damage]) -> list[Catalog]:
    if catalog.rank is not None or catalog.is_shared(save.epoch):
        return [catalog]
    return [Catalog(catalog.store, rank) for rank in sorted({each.rank for each in damages if each.rank >= 0})]
