"""The one place that decides what is a checkpoint: a save whose manifest is published, and which is not set aside.

In a root that the ranks do not share there is no manifest: there a save counts as soon as a rank's seal exists, and
whether every rank has sealed it is for the ranks to find out together.

Restore, list, prune and "latest" all ask here.  Nothing here writes, but for :meth:`Catalog.delete` and
:meth:`Catalog.pin`.  An open :class:`Checkpoint` holds a shared lock on its manifest, where there are locks: as a
courtesy, retention passes it over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stillframe.checkpoint.opened import Checkpoint as Checkpoint
from stillframe.checkpoint.opened import RankPart as RankPart
from stillframe.checkpoint.opened import read_error as read_error
from stillframe.checkpoint.seals import read_brief
from stillframe.errors import (
    BusyError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StillframeError,
    StorageError,
    VersionError,
)
from stillframe.format import limits, names
from stillframe.format.epochs import Aside, Parent, decode_aside, decode_parent
from stillframe.format.records import Manifest, SealBrief, decode_manifest, make_manifest
from stillframe.lineage import Branch, recover
from stillframe.model import SaveId, check_step
from stillframe.store import infos, open_store
from stillframe.store.protocol import Info, Missing, Store, read_all


@dataclass(frozen=True)
class View:
    """What a root held at one moment, as far as names tell."""

    saves: tuple[SaveId, ...]
    """Every one that has a directory, committed or not."""
    branch: Branch
    is_shared: bool = True
    strange: tuple[SaveId, ...] = ()
    """In the place of their directories is a link or a file."""
    epochs: tuple[int, ...] = ()
    """Those that have been claimed."""

    @cached_property
    def on_branch(self) -> dict[int, list[SaveId]]:
        """By step in rising order; for each step the newest first."""
        return self.branch.of(self.saves)

    @property
    def off_branch(self) -> list[SaveId]:
        return sorted(save for save in self.saves if not self.branch.has(save))


class Catalog:
    """The checkpoints in a root.  Every call looks at the store; only what never changes is remembered.

    For users: ``root``, :meth:`steps`, :meth:`latest`, :meth:`open`, :meth:`delete`, :meth:`pin`, :meth:`unpin`.
    Everything else is for stillframe's own parts, and may change with any release.

    ``rank``: in a root that the ranks do not share, this rank's saves alone.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        rank: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = open_store(root, storage_options)
        self.root = self.store.where()
        self.rank = rank
        self._is_shared: dict[int, bool] = {}
        """Of epochs."""

    # --- which there are -------------------------------------------------------------------

    def look(self) -> View:
        """Two listings and one read, however many steps and ranks there are.  Raises :class:`StorageError`."""
        listed = list(self.store.list())
        saves = sorted(save for name in listed if name.endswith("/") and (save := names.parse_step_dir(name[:-1])))
        strange = sorted(save for name in listed if (save := names.parse_step_dir(name)))
        epochs = tuple(sorted(self.epochs(), reverse=True))
        for epoch in epochs:
            parent = self.parent(epoch)
            if parent is not None:
                return View(tuple(saves), parent.branch, parent.is_shared, tuple(strange), epochs)
        return View(tuple(saves), self._recovered(saves), self.rank is None, tuple(strange), epochs)

    def epochs(self) -> list[int]:
        """The numbers that have been claimed.  Raises :class:`StorageError`."""
        found = map(names.parse_epoch, self.store.list(names.RUN))
        return [epoch for epoch in found if epoch is not None]

    def parent(self, epoch: int) -> Parent | None:
        """What an epoch goes on from; ``None`` if it has saved nothing.

        Raises: :class:`StorageError`; :class:`IntegrityError`; :class:`VersionError`.
        """
        key = names.parent(epoch)
        where = self.store.where(key)
        try:
            data = read_all(self.store, key, limits.MAX_NOTE_BYTES)
        except Missing:
            return None
        except StorageError as error:
            raise read_error(f"{where} cannot be read", error) from error
        try:
            return decode_parent(data, file=where)
        except FormatError as error:
            raise FormatError(
                f"{error}. It says which steps training is on. If you remove it, stillframe uses the manifests instead"
            ) from None

    def _recovered(self, saves: Collection[SaveId]) -> Branch:
        """The branch of saves whose epochs are not told of: somebody has copied the steps alone.

        An epoch of which no manifest can be read is there all the same: whoever restores meets the damage.  It is taken
        to go on from the newest save of an earlier epoch that comes before all of its own.
        """
        parents: dict[int, SaveId | None] = {}
        unread: dict[int, int] = {}
        ordered = sorted(saves, key=lambda each: (each.epoch, each.step), reverse=True)
        for save in ordered:
            if save.epoch not in parents and self.is_committed(save):
                unread[save.epoch] = save.step
                with contextlib.suppress(IntegrityError, VersionError, NotFoundError):  # another save tells
                    parents[save.epoch] = self.manifest(save).parent
        for epoch in unread.keys() - parents.keys():
            before = (each for each in ordered if each.epoch < epoch and each.step < unread[epoch])
            parents[epoch] = next(filter(self.is_committed, before), None)
        return recover(parents, max(parents)) if parents else Branch(None)

    def is_shared(self, epoch: int) -> bool:
        """Whether all ranks saw the root in this epoch; if nothing tells, they did.  Raises as :meth:`parent`."""
        if epoch not in self._is_shared:
            try:
                parent = self.parent(epoch)
            except (IntegrityError, VersionError) as error:  # no step of another epoch is damaged because of that
                raise StorageError(f"cannot determine what start {epoch} of the run has saved: {error}") from error
            if parent is None:
                return True
            self._is_shared[epoch] = parent.is_shared
        return self._is_shared[epoch]

    def committed(self, view: View | None = None) -> Iterator[SaveId]:
        """The checkpoints on the branch, the newest first; looks at one after the other."""
        on_branch = (view or self.look()).on_branch
        for step in reversed(on_branch):
            found = next((save for save in on_branch[step] if self.is_committed(save)), None)
            if found is not None:
                yield found

    def steps(self) -> list[int]:
        """The committed steps of the branch, oldest first; none if the root does not exist."""
        return [save.step for save in self.committed()][::-1]

    def newest(self, skipped: Collection[SaveId] = ()) -> SaveId | None:
        """The newest checkpoint of the branch, but for the skipped ones.  Looks no further than that one.

        That there is none is believed when a second look finds the same: a run beside may have committed a save that
        was none yet when it was asked about, and then have removed the one before it.
        """
        before = None
        while True:
            view = self.look()
            found = next((save for save in self.committed(view) if save not in skipped), None)
            if found is not None or view.saves in ((), before):
                return found
            before = view.saves

    def latest(self) -> int | None:
        """The newest committed step of the branch."""
        newest = self.newest()
        return None if newest is None else newest.step

    def find(self, step: int) -> SaveId:
        """The checkpoint of a step: the one on the branch, or else the newest off it.

        Raises: :class:`NotFoundError`; :class:`StorageError`.
        """
        view = self.look()
        off_branch = [save for save in reversed(view.off_branch) if save.step == step]
        for save in [*view.on_branch.get(step, []), *off_branch]:
            if self.is_committed(save):
                return save
        raise self.not_found(step)

    def open(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step (the newest of the branch if none is given), held open until closed.

        Raises: :class:`NotFoundError`; :class:`IntegrityError` if manifest, seal or sizes are
        wrong (the data itself is checked as it is read); :class:`VersionError`.
        """
        if step is not None:
            return self.open_save(self.find(check_step(step)))
        newest = self.newest()
        if newest is None:
            raise NotFoundError(f"there is no checkpoint in {self.root}")
        return self.open_save(newest)

    def open_save(self, save: SaveId) -> Checkpoint:
        """As :meth:`open`, of one save."""
        return Checkpoint(self, save)

    def not_found(self, step: int) -> NotFoundError:
        """The error that says so, and which step is the nearest."""
        known: list[int] = []
        with contextlib.suppress(StillframeError):  # it is only for the hint
            known = self.steps()
        nearest = min(known, key=lambda each: abs(each - step), default=None)
        hint = "there is none" if nearest is None else f"the nearest is step {nearest}"
        return NotFoundError(f"step {step} is not a checkpoint in {self.root}; {hint}")

    # --- changing --------------------------------------------------------------------------

    def delete(self, step: int, *, force: bool = False) -> None:
        """Remove every checkpoint of a step.  ``force``: even the newest of the branch.

        A run that lives in the root is asked to do it.  Blocks.
        Raises: :class:`NotFoundError`; :class:`ConfigError` if it is pinned, or the newest (nothing was removed);
        :class:`BusyError` if somebody reads it, or the run does not answer; :class:`StorageError`.
        """
        from stillframe.checkpoint import requests

        done = requests.remove(self, [step], force=force)
        if done.error is not None:
            raise done.error
        for each in done.stays:
            raise BusyError(f"{each.save} stays in {self.root}: {each.why}")

    def pin(self, step: int) -> None:
        """Nobody removes the checkpoint of this step.  Raises: :class:`NotFoundError`; :class:`StorageError`."""
        from stillframe.checkpoint import requests

        requests.pin(self, step)

    def unpin(self, step: int) -> None:
        """The opposite.  Raises: :class:`NotFoundError`; :class:`StorageError`."""
        from stillframe.checkpoint import requests

        requests.unpin(self, step)

    # --- one save --------------------------------------------------------------------------

    def dir(self, save: SaveId) -> str:
        """Where a save's directory is, for messages: a path, or a URL."""
        return self.store.where(names.step_dir(save))

    def commit_key(self, save: SaveId) -> str:
        """Of the file whose existence makes it a checkpoint: the manifest, or a rank's seal where there is none."""
        return names.key(save, names.MANIFEST if self.rank is None else names.seal(self.rank))

    def aside_key(self, save: SaveId) -> str:
        return names.key(save, names.aside(self.rank))

    def is_committed(self, save: SaveId) -> bool:
        """Raises :class:`StorageError` if that cannot be determined."""
        # The tombstone first: it is removed last.
        if self.store.head(self.aside_key(save)) is not None and not self.is_void(save):
            return False
        if self.store.head(self.commit_key(save)) is not None:
            return True
        return self.rank is None and bool(self._local_ranks(save))

    def is_void(self, save: SaveId) -> bool:
        """Whether a tombstone came too late: by then a later epoch had chosen to go on from the save.

        Whoever put it was paused, or its put was under way for long.  Raises :class:`StorageError`.
        """
        try:
            aside = self.aside(save)
        except (IntegrityError, VersionError):
            return False
        if aside is None:  # withdrawn just now
            return True
        if aside.reason == "quarantined":
            return False
        later = [self.parent(epoch) for epoch in self.epochs() if epoch > aside.epoch]
        return any(each is not None and each.parent == save for each in later)

    def _local_ranks(self, save: SaveId) -> list[int]:
        """The ranks that have sealed it here, in a root that the ranks do not share; none in one that they do."""
        if self.is_shared(save.epoch):
            return []
        files = [file for name in self.store.list(names.step_dir(save)) if (file := names.parse_rank_file(name))]
        aside = {file.rank for file in files if file.kind == "aside"}
        sealed = {file.rank for file in files if file.kind == "seal" and not file.is_partial}
        return sorted(sealed - aside)

    def aside(self, save: SaveId) -> Aside | None:
        """Why it is set aside; ``None`` if it is not.  Raises :class:`StorageError`; :class:`IntegrityError`."""
        key = self.aside_key(save)
        try:
            return decode_aside(read_all(self.store, key, limits.MAX_NOTE_BYTES), file=self.store.where(key))
        except Missing:
            return None

    def manifest(self, save: SaveId) -> Manifest:
        """Of a checkpoint; where there is no manifest, what it would say of the ranks whose seals are here.

        Raises: :class:`NotFoundError` if it is none; :class:`IntegrityError`; :class:`VersionError`;
        :class:`StorageError` if it cannot be read for now.
        """
        if self.rank is not None:
            return self._of_seals(save, [self.rank])
        key = self.commit_key(save)
        where = self.store.where(key)
        try:
            data = read_all(self.store, key, limits.MAX_MANIFEST_BYTES)
        except Missing:
            return self._of_seals(save, self._local_ranks(save))
        except StorageError as error:
            raise read_error(f"{where} cannot be read", error) from error
        manifest = decode_manifest(data, file=where)
        if manifest.save != save:
            raise FormatError(f"{where} is the manifest of {manifest.save}")
        return manifest

    def _of_seals(self, save: SaveId, ranks: list[int]) -> Manifest:
        seals = [self._brief(save, rank) for rank in ranks]
        if not seals:
            raise NotFoundError(f"{save} is not a checkpoint in {self.root}")
        return make_manifest(seals, {})

    def _brief(self, save: SaveId, rank: int) -> tuple[SealBrief, str]:
        try:
            return read_brief(self.store, save, rank)
        except Missing:
            raise NotFoundError(f"{save} is not a checkpoint of rank {rank} in {self.root}") from None
        except StorageError as error:
            where = self.store.where(names.key(save, names.seal(rank)))
            raise read_error(f"{where} cannot be read", error) from error

    def lacks(self, manifest: Manifest, files: Mapping[str, Info] | None = None) -> str:
        """What a checkpoint lacks as far as names and sizes tell; empty if nothing.

        ``files``: of its directory, if they are known.  A checkpoint that is gone by now is no fault: raises
        :class:`NotFoundError`.  Raises :class:`StorageError` for what cannot be read.
        """
        save = manifest.save
        if files is None:
            files = infos(self.store, names.step_dir(save))
        for entry in manifest.ranks:
            for name, size in ((names.segment(entry.rank), entry.segment_bytes), (names.seal(entry.rank), None)):
                found = files.get(name)
                if found is None:
                    if not self.is_committed(save):  # gone, too: then retention has just removed it all
                        raise NotFoundError(f"{save} is gone from {self.root}")
                    return f"{name} is missing"
                if not found.is_ours:
                    return f"{name} is not a regular file"
                if size is not None and found.size != size:
                    return f"{name} has {found.size} bytes instead of {size}"
        return ""
