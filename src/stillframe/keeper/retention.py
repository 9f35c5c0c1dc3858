"""Deleting: whole checkpoints that the policy lets go, and files that never became one.

Order: the manifest goes first, durably, so a half-deleted checkpoint is no checkpoint.  The newest one stays,
whatever the policy.  One that somebody is reading (it holds a shared lock) stays until the next time.  Only
files whose names are stillframe's are ever removed.

Of several ranks, rank 0 decides and renames the manifest, so that a rank that looks late still sees that there was
one; each removes its own files, so that the work of one does not grow with their number; then rank 0 removes the rest.

A segment that goes is kept as a spare, one for each rank, and written over by the next save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import NO_LOCKS, Life, is_held, life_of
from stillframe.errors import StillframeError
from stillframe.format import limits, names
from stillframe.format.names import RankFile
from stillframe.format.records import decode_manifest
from stillframe.keeper import labels
from stillframe.retention import Keep
from stillframe.store import durable

_OVERDUE_S = 600.0
"""After so long, rank 0 removes what another rank should have removed."""


class Pruner:
    """Applies the policy after each commit.  Thread: one at a time, under the keeper's tidying lock."""

    def __init__(
        self,
        catalog: Catalog,
        keep: Keep,
        rank: int,
        attempt: str,
        is_alone: bool,
        in_flight: Callable[[], set[int]] = set,
    ) -> None:
        self._in_flight = in_flight
        self._newest = -1
        self._is_alone = is_alone
        self._keeps_spare = True
        self._catalog = catalog
        self._keep = keep
        self._rank = rank
        self._attempt = attempt
        self._own: set[int] = set()
        self._left: dict[int, float] = {}
        """Steps whose manifest is renamed, and when; other ranks' files may be there still."""

    @property
    def has_work(self) -> bool:
        """Something is to go that has to wait for another rank."""
        if self._decides:
            return bool(self._left)
        return self._keep != Keep() and bool(self._own - self._keep.keeps(self._own))

    def tidy(self) -> None:
        """Remove what has waited for other ranks; raises ``OSError``."""
        if self._decides:
            self._remove_left()
        else:
            self._remove_own()

    @property
    def _decides(self) -> bool:
        return self._rank == 0 or self._catalog.rank is not None

    def begun(self, step: int) -> None:
        """It is being saved, perhaps again: its files are not leftovers."""
        self._own.discard(step)
        self._left.pop(step, None)

    def committed(self, step: int, complete_step: int | None) -> None:
        """Raises ``OSError``; what was not deleted is tried again next time.

        ``complete_step``: in a root that is not shared, the newest step that all ranks have; nothing after it goes.
        """
        self._own.add(step)
        self._newest = step
        if self._keep != Keep():
            if self._decides:
                self._prune(complete_step)
            else:
                self._remove_own()

    def _remove_own(self) -> None:
        """This rank's files of steps that the policy lets go and whose manifest rank 0 has removed."""
        for step in sorted(self._own - self._keep.keeps(self._own)):
            if _is_gone(self._catalog.manifest_path(step)):
                self._own.discard(step)
                if _is_gone(self._catalog.damaged_path(step)):
                    self._remove_own_files(step)

    def _remove_left(self) -> None:
        """What is left of checkpoints when every rank has removed its files, or should have long ago."""
        for step, since_s in list(self._left.items()):
            path = self._catalog.dir(step)
            is_overdue = time.monotonic() - since_s > _OVERDUE_S
            if is_overdue or not path.exists() or not any(map(names.parse_rank_file, os.listdir(path))):
                del self._left[step]
                _remove_files(path, self._is_removable, durable.remove)

    def _prune(self, complete_step: int | None) -> None:
        self._remove_left()
        committed = self._catalog.steps()
        settled = [step for step in committed if complete_step is None or step <= complete_step]
        kept = self._keep.keeps(settled) | {self._newest}  # whatever its number: somebody may have gone back
        for step in settled:
            if step not in kept:
                self.remove_checkpoint(step)
        for step in self._catalog.damaged():
            if committed and step < committed[-1] and step not in self._in_flight():
                self.remove_damaged(step)

    def _remove_own_files(self, step: int) -> None:
        """By name: a list of the directory would grow with the number of ranks."""
        path = self._catalog.dir(step)
        for name in (names.segment(self._rank, self._attempt), names.seal(self._rank, self._attempt)):
            self._remove(path / name)
        durable.remove_dir(path)

    def _remove(self, path: Path) -> None:
        """A file that no manifest names any more; a segment of ours is kept as a spare if there is none."""
        file = names.parse_rank_file(path.name)
        is_segment = file is not None and (file.rank, file.kind, file.is_partial) == (self._rank, "safetensors", False)
        spare = self._catalog.root / names.spare(self._rank)
        if is_segment and self._keeps_spare and not os.path.lexists(spare):
            with contextlib.suppress(FileNotFoundError):
                durable.move(path, spare)
        else:
            durable.remove(path)

    def close(self) -> None:
        """Nothing will be written any more."""
        self._keeps_spare = False
        durable.remove(self._catalog.root / names.spare(self._rank))

    def _is_removable(self, name: str) -> bool:
        """What goes with a checkpoint: everything of it, or in a root that is not shared what is this rank's."""
        if names.is_label(name):
            return True
        file = names.parse_rank_file(name) or names.parse_manifest(name)
        is_everything = self._catalog.rank is None and isinstance(file, RankFile)
        return file is not None and (is_everything or file.rank == self._catalog.rank)

    def _is_remains(self, name: str) -> bool:
        """Of a damaged checkpoint; another rank may be saving the step again already, in this attempt."""
        file = names.parse_rank_file(name)
        return self._is_removable(name) and (file is None or file.attempt != self._attempt)

    def remove_damaged(self, step: int) -> None:
        """What is left of a checkpoint that was found damaged; raises ``OSError``."""
        if not self._catalog.is_committed_otherwise(step):
            _remove_files(self._catalog.dir(step), self._is_remains, durable.remove)

    def remove_checkpoint(self, step: int) -> None:
        """One that the policy lets go, unless somebody is reading it; raises ``OSError``."""
        path = self._catalog.dir(step)
        if path.is_symlink():
            return
        with _exclusive(self._catalog.manifest_path(step)) as is_free:
            if not is_free:
                return
            labels.remove(self._catalog, step)
            is_ours = step in self._own and self._catalog.rank is None and not self._is_alone
            if is_ours:
                durable.publish(self._catalog.manifest_path(step), path / names.pruned_manifest())
            else:
                durable.remove(self._catalog.manifest_path(step))
                durable.sync_dir(path)
        self._own.discard(step)
        if self._catalog.is_committed_otherwise(step):
            return
        if is_ours:
            self._left[step] = time.monotonic()
            self._remove_own_files(step)
        else:
            _remove_files(path, self._is_removable, self._remove)


def _is_gone(path: Path) -> bool:
    """It is certain that it is not there; a file system that cannot tell is no reason to delete anything."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def sweep(catalog: Catalog, attempt: str, own: Literal["all", "partial", "nothing"]) -> bool:
    """Remove what no keeper can turn into a checkpoint any more: the files of attempts that are dead.

    For rank 0, holding the lock of the root; in a root that is not shared, for each rank of its own files.  Tells
    whether there are files of another attempt whose keeper lives.

    ``own``: what goes of this rank's files of the same attempt, which an earlier keeper of it has left: ``"all"`` if it
    commits by itself; at first ``"partial"`` ones, since a sealed one may be counted on; later ``"nothing"``.
    """
    living: set[RankFile] = set()

    def is_dead(name: str) -> bool:
        file = names.parse_rank_file(name)
        if file is None:
            manifest = names.parse_manifest(name)
            is_over = manifest is not None and (manifest.is_partial or manifest.is_pruned)
            return manifest is not None and is_over and manifest.rank == catalog.rank
        if file.rank == (catalog.rank or 0):
            return file.attempt != attempt or own == "all" or (own == "partial" and file.is_partial)
        if catalog.rank is not None or file.attempt == attempt:
            return False
        if life_of(catalog.root, file.rank, file.attempt) is Life.ALIVE:
            living.add(file)
            return False
        return True

    def is_dead_label(name: str) -> bool:
        return own != "nothing" and names.is_label(name)

    for step in catalog.step_dirs():
        path = catalog.dir(step)
        if catalog.is_committed_otherwise(step):
            continue  # its files belong to a checkpoint that this catalog does not see
        if catalog.is_committed(step):
            _remove_strangers(catalog, step, is_dead)
        elif not any(_is_verdict(name) for name in os.listdir(path)):
            _remove_files(path, lambda name: is_dead(name) or is_dead_label(name), durable.remove)
    return bool(living)


def _is_verdict(name: str) -> bool:
    """A manifest, damaged or whole."""
    manifest = names.parse_manifest(name)
    return manifest is not None and not manifest.is_partial and not manifest.is_pruned


def remove_spares(catalog: Catalog, world_size: int) -> None:
    """Those of ranks that an earlier, larger run had and this one has not."""
    for name in os.listdir(catalog.root):
        rank = names.parse_spare(name)
        if rank is not None and rank >= world_size and not is_held(catalog.root, rank):
            durable.remove(catalog.root / name)


@contextlib.contextmanager
def _exclusive(manifest: Path) -> Iterator[bool]:
    """Holds the manifest's lock, so that nobody begins to read what is going; tells whether it could be had."""
    try:
        fd = durable.open_file(manifest, os.O_RDWR)  # over NFS, an exclusive lock needs a file open for writing
    except OSError as error:
        yield error.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR)  # then nobody can read it either
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError as error:
        is_free = error.errno in NO_LOCKS
    try:
        yield is_free
    finally:
        os.close(fd)


def _remove_files(path: Path, is_removable: Callable[[str], bool], remove: Callable[[Path], None]) -> None:
    """The files of these names; then the directory, if it is empty."""
    if path.is_symlink():
        return
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return  # another rank has finished it
    for entry in entries:
        if is_removable(entry.name) and not entry.is_dir(follow_symlinks=False):
            remove(Path(entry))
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
