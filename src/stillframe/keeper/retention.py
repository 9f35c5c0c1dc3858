"""Deleting: whole checkpoints that the policy lets go, and files that never became one.

Order: the manifest goes first, durably, so a half-deleted checkpoint is no checkpoint.  The newest one stays, whatever
the policy.  One that somebody is reading (it holds a shared lock) stays until the next time.  Only files whose names
are stillframe's are ever removed.

Of several ranks, rank 0 decides and sets the manifest aside, so that a rank that looks late still sees that there was
one; each removes its own files, so that the work of one does not grow with their number; then rank 0 removes the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.lock import Life, is_held, life_of
from stillframe.errors import StillframeError, StorageError
from stillframe.format import names
from stillframe.format.names import RankFile
from stillframe.keeper import labels
from stillframe.retention import Keep
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.protocol import Missing, NotOurs

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
        self._catalog = catalog
        self._keep = keep
        self._rank = rank
        self._attempt = attempt
        self._own: set[int] = set()
        self._left: dict[int, float] = {}
        """Steps whose manifest is set aside, and when; other ranks' files may be there still."""

    @property
    def has_work(self) -> bool:
        """Something is to be removed, but another rank has to act first."""
        if self._decides:
            return bool(self._left)
        return self._keep != Keep() and bool(self._own - self._keep.keeps(self._own))

    def tidy(self) -> None:
        """Remove what has waited for other ranks.  Raises :class:`StorageError`."""
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
        """Raises :class:`StorageError`; what was not deleted is tried again next time.

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
        store = self._catalog.store
        for step in sorted(self._own - self._keep.keeps(self._own)):
            if store.head(self._catalog.manifest_key(step)) is None:
                self._own.discard(step)
                if store.head(self._catalog.damaged_key(step)) is None:
                    self._remove_own_files(step)

    def _remove_left(self) -> None:
        """What is left of checkpoints when every rank has removed its files, or should have long ago."""
        for step, since_s in list(self._left.items()):
            is_overdue = time.monotonic() - since_s > _OVERDUE_S
            if is_overdue or not any(map(names.parse_rank_file, self._catalog.store.list(names.step_dir(step)))):
                del self._left[step]
                _remove_files(self._catalog, step, self._is_removable)

    def _prune(self, complete_step: int | None) -> None:
        errors: list[StorageError] = []
        with _collected(errors):
            self._remove_left()
        committed: list[int] = []
        damaged: list[int] = []
        for step in self._catalog.step_dirs():
            with _collected(errors):
                if self._catalog.is_committed(step):
                    committed.append(step)
                elif self._catalog.is_damaged(step):
                    damaged.append(step)
        settled = [step for step in committed if complete_step is None or step <= complete_step]
        kept = self._keep.keeps(settled) | {self._newest}  # whatever its number: somebody may have gone back
        for step in settled:
            if step not in kept:
                with _collected(errors):
                    self.remove_checkpoint(step)
        for step in damaged:
            if committed and step < committed[-1] and step not in self._in_flight():
                with _collected(errors):
                    self.remove_damaged(step)
        if errors:
            raise errors[0]

    def _remove_own_files(self, step: int) -> None:
        """By name: a list of the directory would grow with the number of ranks."""
        own = names.segment(self._rank, self._attempt), names.seal(self._rank, self._attempt)
        self._catalog.store.delete([self._catalog.key(step, name) for name in own])

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
        """What is left of a checkpoint that was found damaged.  Raises :class:`StorageError`."""
        if not self._catalog.is_committed_otherwise(step):
            _remove_files(self._catalog, step, self._is_remains)

    def remove_checkpoint(self, step: int) -> None:
        """One that the policy lets go, unless somebody is reading it.  Raises :class:`StorageError`."""
        catalog = self._catalog
        is_ours = step in self._own and catalog.rank is None and not self._is_alone
        with _exclusive(catalog, step) as is_free:
            if not is_free:
                return
            labels.remove(catalog, step)
            if is_ours:
                if not catalog.set_aside(step, catalog.key(step, names.pruned_manifest())):
                    raise StorageError(f"the manifest of step {step} in {catalog.root} could not be set aside")
            else:
                catalog.store.delete([catalog.manifest_key(step)])
        self._own.discard(step)
        if catalog.is_committed_otherwise(step):
            return
        if is_ours:
            self._left[step] = time.monotonic()
            self._remove_own_files(step)
        else:
            _remove_files(catalog, step, self._is_removable)


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
        if life_of(catalog.store, file.rank, file.attempt) is Life.ALIVE:
            living.add(file)
            return False
        return True

    def is_dead_label(name: str) -> bool:
        return own != "nothing" and names.is_label(name)

    errors: list[StorageError] = []
    for step in catalog.step_dirs():
        with _collected(errors):
            if catalog.is_committed_otherwise(step):
                continue  # its files belong to a checkpoint that this catalog does not see
            if catalog.is_committed(step):
                _remove_strangers(catalog, step, is_dead)
            elif not any(_is_verdict(name) for name in catalog.store.list(names.step_dir(step))):
                _remove_files(catalog, step, lambda name: is_dead(name) or is_dead_label(name))
    if errors:
        raise errors[0]
    return bool(living)


@contextlib.contextmanager
def _collected(errors: list[StorageError]) -> Iterator[None]:
    """One step that cannot be looked at keeps nobody from tidying the others."""
    try:
        yield
    except StorageError as error:
        errors.append(error)


def _is_verdict(name: str) -> bool:
    """A manifest, damaged or whole."""
    manifest = names.parse_manifest(name)
    return manifest is not None and not manifest.is_partial and not manifest.is_pruned


def remove_spares(catalog: Catalog, rank: int, world_size: int) -> None:
    """Remove what a killed keeper of this rank was setting aside; on rank 0 also the spares of ranks that only an
    earlier, larger run had.  Raises :class:`StorageError`."""
    for name in catalog.store.list():
        whose, is_unfinished = names.parse_spare(name) or (-1, False)
        is_nobodys = rank == 0 and whose >= world_size and not is_held(catalog.store, whose)
        if (whose == rank and is_unfinished) or is_nobodys:
            catalog.store.delete([name])


@contextlib.contextmanager
def _exclusive(catalog: Catalog, step: int) -> Iterator[bool]:
    """Holds the manifest's lock, so that nobody begins to read what is going; tells whether it could be had."""
    try:
        lock = FileLock(catalog.store, catalog.manifest_key(step))
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


def _remove_files(catalog: Catalog, step: int, is_removable: Callable[[str], bool]) -> None:
    """The files of these names; then the directory, if it is empty.  Raises :class:`StorageError`."""
    directory = names.step_dir(step)
    found = [name for name in catalog.store.list(directory) if not name.endswith("/") and is_removable(name)]
    catalog.store.delete([*(catalog.key(step, name) for name in found), f"{directory}/"])


def _remove_strangers(catalog: Catalog, step: int, is_dead: Callable[[str], bool]) -> None:
    """Files of other attempts beside a committed one.  Raises :class:`StorageError`."""
    try:
        attempt = catalog.manifest(step).attempt
    except StillframeError:
        return  # damaged or newer: not ours to judge
    dead = []
    for name in catalog.store.list(names.step_dir(step)):
        file = names.parse_rank_file(name)
        if is_dead(name) and (file is None or file.attempt != attempt or file.is_partial):
            dead.append(catalog.key(step, name))
    catalog.store.delete(dead)
