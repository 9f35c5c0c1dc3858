"""Deleting: whole checkpoints that the policy lets go, and files that never became one.

Order: the manifest goes first, durably, so a half-deleted checkpoint is no checkpoint.  The
newest one stays, whatever the policy.  One that somebody is reading (it holds a shared lock)
stays until the next time.  Only files whose names are stillframe's are ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from stillframe.catalog import Catalog
from stillframe.errors import StillframeError
from stillframe.format import limits, names
from stillframe.format.records import decode_manifest
from stillframe.retention import Keep
from stillframe.storage import durable


def prune(catalog: Catalog, keep: Keep) -> None:
    """Apply the policy after a commit.  Raises ``OSError``; what was not deleted is tried again next time."""
    committed = catalog.steps()
    kept = keep.keeps(committed)
    for step in committed:
        if step not in kept:
            _remove_checkpoint(catalog.dir(step))
    for step in catalog.damaged():
        if committed and step < committed[-1]:
            _remove_files(catalog.dir(step))


def sweep(catalog: Catalog) -> None:
    """Remove what no keeper can turn into a checkpoint any more.

    Only for the holder of the root's lock, before its first save: every other attempt is dead then.
    """
    for step in catalog.step_dirs():
        path = catalog.dir(step)
        if catalog.is_committed(step):
            _remove_strangers(path)
        elif not os.path.lexists(path / names.DAMAGED_MANIFEST):
            _remove_files(path)


def _remove_checkpoint(path: Path) -> None:
    if path.is_symlink():
        return
    with _exclusive(path / names.MANIFEST) as is_free:
        if is_free:
            durable.remove(path / names.MANIFEST)
            durable.sync_dir(path)
            _remove_files(path)


@contextlib.contextmanager
def _exclusive(manifest: Path) -> Iterator[bool]:
    """Holds the manifest's lock, so that nobody begins to read what is going; tells whether it could be had."""
    try:
        fd = durable.open_file(manifest)
    except OSError:
        yield True  # nobody can read it either
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError as error:
        is_free = not isinstance(error, BlockingIOError)
    try:
        yield is_free
    finally:
        os.close(fd)


def _remove_files(path: Path) -> None:
    if path.is_symlink():
        return
    for entry in list(os.scandir(path)):
        if names.is_ours(entry.name) and not entry.is_dir(follow_symlinks=False):
            durable.remove(Path(entry))
    durable.remove_dir(path)


def _remove_strangers(path: Path) -> None:
    """Files of other attempts beside a committed one."""
    if path.is_symlink():
        return
    manifest_path = path / names.MANIFEST
    try:
        data = durable.read_small(manifest_path, limits.MAX_MANIFEST_BYTES)
        attempt = decode_manifest(data, file=str(manifest_path)).attempt
    except (OSError, StillframeError):
        return  # damaged or newer: not ours to judge
    for name in os.listdir(path):
        file = names.parse_rank_file(name)
        is_stranger = file.attempt != attempt if file else name != names.MANIFEST and names.is_ours(name)
        if is_stranger:
            durable.remove(path / name)
