"""Deleting: whole checkpoints that the policy lets go, and files that never became one.

Order: the manifest goes first, durably, so a half-deleted checkpoint is no checkpoint.  The newest one stays,
whatever the policy.  One that somebody is reading (it holds a shared lock) stays until the next time.  Only
files whose names are stillframe's are ever removed.

Of several ranks, rank 0 decides and removes the manifest; each removes its own files, so that the work of one
does not grow with their number.  What a rank left behind, rank 0 removes when it prunes the next time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from stillframe.catalog import Catalog
from stillframe.errors import StillframeError
from stillframe.format import limits, names
from stillframe.format.names import RankFile
from stillframe.format.records import decode_manifest
from stillframe.keeper.lock import Life, life_of
from stillframe.retention import Keep
from stillframe.storage import durable


class Pruner:
    """Applies the policy after each commit.  Thread: one at a time, under the keeper's tidying lock."""

    def __init__(self, catalog: Catalog, keep: Keep, rank: int, attempt: str) -> None:
        self._catalog = catalog
        self._keep = keep
        self._rank = rank
        self._attempt = attempt
        self._own: set[int] = set()
        self._left: set[int] = set()

    @property
    def has_work(self) -> bool:
        """A member's files may outlive their manifest for a moment."""
        return bool(self._own) and self._keep != Keep() and not self._decides

    @property
    def _decides(self) -> bool:
        return self._rank == 0 or self._catalog.rank is not None

    def begun(self, step: int) -> None:
        """It is being saved, perhaps again: its files are not leftovers."""
        self._own.discard(step)
        self._left.discard(step)

    def committed(self, step: int, complete_step: int | None) -> None:
        """Raises ``OSError``; what was not deleted is tried again next time.

        ``complete_step``: in a root that is not shared, the newest step that all ranks have; nothing after it goes.
        """
        self._own.add(step)
        if self._keep != Keep():
            if self._decides:
                self._prune(complete_step)
            else:
                self.remove_own()

    def remove_own(self) -> None:
        """This rank's files of steps that the policy lets go and whose manifest rank 0 has removed."""
        for step in sorted(self._own - self._keep.keeps(self._own)):
            if _is_gone(self._catalog.manifest_path(step)):
                self._own.discard(step)
                if _is_gone(self._catalog.damaged_path(step)):
                    _remove_files(self._catalog.dir(step), self._is_own)

    def _prune(self, complete_step: int | None) -> None:
        left, self._left = self._left, set()
        for step in left:
            if not self._catalog.is_committed(step):
                _remove_files(self._catalog.dir(step), self._is_removable)
        committed = self._catalog.steps()
        settled = [step for step in committed if complete_step is None or step <= complete_step]
        kept = self._keep.keeps(settled)
        for step in settled:
            if step not in kept:
                self._remove_checkpoint(step)
        for step in self._catalog.damaged():
            if committed and step < committed[-1]:
                _remove_files(self._catalog.dir(step), self._is_removable)

    def _is_own(self, name: str) -> bool:
        file = names.parse_rank_file(name)
        return file is not None and file.rank == self._rank

    def _is_removable(self, name: str) -> bool:
        """What goes with a checkpoint: everything of it, or in a root that is not shared what is this rank's."""
        file = names.parse_rank_file(name) or names.parse_manifest(name)
        is_everything = self._catalog.rank is None and isinstance(file, RankFile)
        return file is not None and (is_everything or file.rank == self._catalog.rank)

    def _remove_checkpoint(self, step: int) -> None:
        path = self._catalog.dir(step)
        if path.is_symlink():
            return
        with _exclusive(self._catalog.manifest_path(step)) as is_free:
            if not is_free:
                return
            durable.remove(self._catalog.manifest_path(step))
            durable.sync_dir(path)
        if step in self._own and self._catalog.rank is None:
            self._own.discard(step)
            self._left.add(step)
            _remove_files(path, self._is_own)
        else:
            _remove_files(path, self._is_removable)


def _is_gone(path: Path) -> bool:
    """It is certain that it is not there; a file system that cannot tell is no reason to delete anything."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def sweep(catalog: Catalog, attempt: str, is_alone: bool) -> None:
    """Remove what no keeper can turn into a checkpoint any more: the files of attempts that are dead.

    For rank 0, holding the lock of the root, before its first save; in a root that is not shared, for each rank of
    its own files.  Of the same attempt (an earlier keeper of it has died) a rank that commits ``is_alone`` removes
    everything; else a sealed file stays: it may be counted on.
    """

    def is_dead(name: str) -> bool:
        file = names.parse_rank_file(name)
        if file is None:
            manifest = names.parse_manifest(name)
            return manifest is not None and manifest.is_partial and manifest.rank == catalog.rank
        if file.rank == (catalog.rank or 0):
            return file.attempt != attempt or is_alone or file.is_partial
        if catalog.rank is not None or file.attempt == attempt:
            return False
        return life_of(catalog.root, file.rank, file.attempt) is not Life.ALIVE

    for step in catalog.step_dirs():
        path = catalog.dir(step)
        if catalog.is_committed(step):
            _remove_strangers(catalog, step, is_dead)
        elif not any(_is_verdict(name) for name in os.listdir(path)):
            _remove_files(path, is_dead)


def _is_verdict(name: str) -> bool:
    """A manifest of any kind, damaged or whole: also one of ranks that did not share this root then."""
    manifest = names.parse_manifest(name)
    return manifest is not None and not manifest.is_partial


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


def _remove_files(path: Path, is_removable: Callable[[str], bool]) -> None:
    """The files of these names; then the directory, if it is empty."""
    if path.is_symlink():
        return
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return  # another rank has finished it
    for entry in entries:
        if is_removable(entry.name) and not entry.is_dir(follow_symlinks=False):
            durable.remove(Path(entry))
    durable.remove_dir(path)


def _remove_strangers(catalog: Catalog, step: int, is_dead: Callable[[str], bool]) -> None:
    """Files of other attempts beside a committed one."""
    path = catalog.dir(step)
    if path.is_symlink():
        return
    manifest_path = catalog.manifest_path(step)
    try:
        data = durable.read_small(manifest_path, limits.MAX_MANIFEST_BYTES)
        attempt = decode_manifest(data, file=str(manifest_path)).attempt
    except (OSError, StillframeError):
        return  # damaged or newer: not ours to judge
    for name in os.listdir(path):
        file = names.parse_rank_file(name)
        if is_dead(name) and (file is None or file.attempt != attempt):
            durable.remove(path / name)
