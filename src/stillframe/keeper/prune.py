"""Cleaning a root by hand: the same deletions as a run's own keeper makes, under the same lock.

Promise: nothing goes while a run is at work in the root.  The policy counts only checkpoints whose files are all there,
and the newest of these stays; one that lacks something stays for a person to look at.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import RootLock, is_held, owner_of
from stillframe.errors import BusyError, StillframeError, StorageError
from stillframe.format import names
from stillframe.keeper.retention import Pruner, sweep
from stillframe.retention import Keep

_NOBODY = -1
"""No rank's number."""


def going(catalog: Catalog, keep: Keep) -> tuple[list[int], list[int]]:
    """What :func:`prune` would remove now: checkpoints, and damaged ones that are older than one that stays."""
    whole = [step for step in catalog.steps() if _is_whole(catalog, step)]
    kept = keep.keeps(whole)
    newest = max(kept, default=-1)
    return [step for step in whole if step not in kept], [step for step in catalog.damaged() if step < newest]


def _is_whole(catalog: Catalog, step: int) -> bool:
    try:
        return not catalog.lacks(catalog.manifest(step))
    except StillframeError:  # gone, damaged, of a newer format, or not to be read now: not ours to judge
        return False


def prune(catalog: Catalog, keep: Keep) -> None:
    """Remove what the policy lets go; what somebody is reading stays.

    Raises: :class:`BusyError` if a run is at work in the root; :class:`StorageError`.
    """
    with _root_of(catalog):
        pruner = Pruner(catalog, keep, _NOBODY, "", is_alone=True)
        checkpoints, damaged = going(catalog, keep)
        for step in checkpoints:
            pruner.remove_checkpoint(step)
        for step in damaged:
            pruner.remove_damaged(step)


def remove_leftovers(catalog: Catalog) -> None:
    """Files of saves that no run can commit any more, and spare segments.

    Raises: :class:`BusyError` if a run is at work in the root; :class:`StorageError`.
    """
    with _root_of(catalog) as attempt:
        sweep(catalog, attempt, "all")
        spares = [(name, names.parse_spare(name)) for name in catalog.store.list()]
        catalog.store.delete([name for name, spare in spares if spare and catalog.rank in (None, spare[0])])


def check_free(catalog: Catalog) -> None:
    """Raises :class:`BusyError` if a run is at work in the root."""
    for name in sorted(catalog.store.list()):
        rank = names.parse_lock(name)
        if rank is not None and is_held(catalog.store, rank):
            owner = owner_of(catalog.store, rank)
            who = f" (process {owner.pid} on {owner.host})" if owner else ""
            raise BusyError(
                f"a run is at work in {catalog.root}{who}, and removes what its own policy lets go: "
                "Checkpointer(…, keep=…). Wait until it has ended, and try again"
            )


@contextlib.contextmanager
def _root_of(catalog: Catalog) -> Iterator[str]:
    """Holds the root's lock: no run works here, and one that starts now waits."""
    check_free(catalog)
    attempt = secrets.token_hex(4)
    lock = RootLock(catalog.store, catalog.rank or 0, attempt)
    lock.acquire()
    if not lock.is_supported:
        raise StorageError(
            f"the file system of {catalog.root} has no locks, so nobody can tell whether a run is at work there. "
            "Remove directories of old steps by hand, when no run is"
        )
    try:
        lock.note("finishing", lock.previous_failure)  # a run that starts now waits for us
        yield attempt
    finally:
        lock.release()
