"""Cleaning a root by hand: the same deletions as a run's own keeper makes, under the same lock.

Promise: nothing goes while a run is at work in the root.  The policy counts only checkpoints whose files are all there,
and the newest of these stays; one that lacks something stays for a person to look at.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import RootLock, holder_of, is_held
from stillframe.errors import BusyError, NotFoundError, StillframeError, StorageError
from stillframe.format import names
from stillframe.keeper.retention import Pruner, sweep
from stillframe.retention import Keep
from stillframe.store import durable

_NOBODY = -1
"""No rank's number: nothing is kept as a spare."""


def going(catalog: Catalog, keep: Keep) -> tuple[list[int], list[int]]:
    """What :func:`prune` would remove now: checkpoints, and damaged ones that are older than one that stays."""
    whole = [step for step in catalog.steps() if _is_whole(catalog, step)]
    kept = keep.keeps(whole)
    newest = max(kept, default=-1)
    return [step for step in whole if step not in kept], [step for step in catalog.damaged() if step < newest]


def _is_whole(catalog: Catalog, step: int) -> bool:
    try:
        return not catalog.lacks(step)
    except NotFoundError:
        return False
    except StillframeError:  # of a newer format, or not to be read now: not ours to judge
        return False


def prune(catalog: Catalog, keep: Keep) -> None:
    """Remove what the policy lets go; what somebody is reading stays.

    Raises: :class:`BusyError` if a run is at work in the root; :class:`StorageError`.
    """
    with _root_of(catalog), durable.storage_errors(f"pruning {catalog.root}"):
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
    with _root_of(catalog) as attempt, durable.storage_errors(f"cleaning {catalog.root}"):
        sweep(catalog, attempt, "all")
        for name in os.listdir(catalog.root):
            rank = names.parse_spare(name)
            if rank is not None and catalog.rank in (None, rank):
                durable.remove(catalog.root / name)


def check_free(root: Path) -> None:
    """Raises :class:`BusyError` if a run is at work in the root."""
    for name in sorted(os.listdir(root)):
        rank = names.parse_lock(name)
        if rank is not None and is_held(root, rank):
            holder = holder_of(root, rank)
            who = f" (process {holder.pid} on {holder.host})" if holder else ""
            raise BusyError(
                f"a run is at work in {root}{who}, and removes what its own policy lets go: Checkpointer(…, keep=…). "
                "Wait until it has ended, and try again"
            )


@contextlib.contextmanager
def _root_of(catalog: Catalog) -> Iterator[str]:
    """Holds the root's lock: no run works here, and one that starts now waits."""
    root = catalog.root
    check_free(root)
    attempt = secrets.token_hex(4)
    lock = RootLock(root, catalog.rank or 0, attempt)
    with durable.storage_errors(f"locking {root}"):
        lock.acquire()
    if not lock.is_supported:
        raise StorageError(
            f"the file system of {root} has no locks, so nobody can tell whether a run is at work there. "
            "Remove directories of old steps by hand, when no run is"
        )
    try:
        lock.note("finishing", lock.previous_failure)  # a run that starts now waits for us
        yield attempt
    finally:
        lock.release()
