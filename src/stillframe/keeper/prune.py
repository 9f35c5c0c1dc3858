"""Leftovers, removed by hand: files of saves that no run can commit any more, and spare segments."""

from __future__ import annotations

from stillframe.checkpoint import epochs
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.cleaning import Wanted
from stillframe.checkpoint.requests import ask, check_free
from stillframe.errors import BusyError
from stillframe.format import names
from stillframe.keeper.retention import Pruner
from stillframe.model import SaveId


def half_carried(catalog: Catalog) -> set[SaveId]:
    """What is half there in a tier, and newer than all that is whole there: on its way, or the only copy of some parts.

    (Roots that ranks do not share may be lost one by one: training then goes on from what the others and this tier
    have together.)  Raises :class:`StorageError`; :class:`IntegrityError`.
    """
    view = catalog.look()
    whole = max((save for save in view.saves if view.branch.has(save) and catalog.is_committed(save)), default=None)
    found = {save for save in view.saves if view.branch.has(save) and (whole is None or save.step > whole.step)}
    parents = {epoch: catalog.parent(epoch) for epoch in {save.epoch for save in found}}
    carried = {epoch for epoch, parent in parents.items() if parent is not None and parent.is_carried}
    return {save for save in found if save.epoch in carried and catalog.aside(save) is None}


def remove_leftovers(catalog: Catalog) -> None:
    """In the name of an epoch of its own.  Tombstones of what was never committed stay for a day.

    In a tier, what is half carried stays.

    Raises: :class:`BusyError` if a run lives in the root: it removes them itself; :class:`StorageError`.
    """
    is_shared = catalog.look().is_shared
    if not is_shared:
        check_free(catalog)
    elif ask(catalog, Wanted()) is not None:
        raise BusyError(f"a run is active in {catalog.root}: it removes what earlier runs have left by itself")
    epoch = epochs.begin_by_hand(catalog)
    for part in [catalog] if is_shared else [Catalog(catalog.store, rank) for rank in _ranks(catalog)]:
        Pruner(part, None, part.rank or 0, True, lambda: epoch, lambda: half_carried(catalog)).prune()
    spares = [name for name in catalog.store.list() if names.parse_spare(name) is not None]
    catalog.store.delete(spares)


def _ranks(catalog: Catalog) -> list[int]:
    """Those that have files here."""
    found: set[int] = set()
    for save in catalog.look().saves:
        files = map(names.parse_rank_file, catalog.store.list(names.step_dir(save)))
        found |= {file.rank for file in files if file is not None}
    return sorted(found)
