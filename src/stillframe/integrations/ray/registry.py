"""Ray's list of checkpoints, as rank 0 sees it; an entry is a small directory that names a step of ours.

Each side deletes its own: Ray the directories that ``CheckpointConfig`` lets go, and we the steps whose directory is
not on Ray's list any more.  Ray's controller ends if a directory on its list is gone, so no other code removes one.

Where the nodes do not share the root, the steps are those of a tier.  There the keeper prunes, and what is on Ray's
list is pinned.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Any

import ray.train
from pyarrow.fs import FileSelector, FileType, LocalFileSystem

from stillframe import Catalog, Checkpointer, spi
from stillframe.errors import NotFoundError

ROOT, KEY = "_stillframe", "stillframe"
"""The root's name in the directory of a run; and the key, in the metadata of a Ray checkpoint, of what is ours."""
_NAME = re.compile(r"checkpoint_(\d{12})-e(\d+)-(\d+)")
_CONTROLLER_S = 60.0
"""How long the controller is waited for, at most: it asks the workers every two seconds, for one report at a time."""


@dataclass(frozen=True)
class Entry:
    """What rank 0 reports."""

    name: str
    step: int
    checkpoint: Any
    metrics: dict[str, Any]


class Registry:
    """Rank 0's.  Thread: one at a time.  ``catalog``: of the root that all nodes see, or of a tier (``is_tier``).
    ``removes``: whether ``CheckpointConfig`` lets any checkpoint go."""

    def __init__(
        self, checkpointer: Checkpointer, catalog: Catalog, storage: Any, *, removes: bool, is_tier: bool
    ) -> None:
        self._checkpointer, self._catalog, self._storage = checkpointer, catalog, storage
        self._removes, self._is_tier = removes, is_tier
        self._registered = self._listed()
        self._last: Entry | None = None
        """What was reported last: it stays, whatever the list says of it, and is not reported again."""
        self._remove_unlisted()

    def _listed(self) -> dict[str, int]:
        """The names on Ray's list that are ours, and the step of each.  Blocks until the controller knows of all that
        was reported."""
        mode = ray.train.CheckpointConsistencyMode.COMMITTED
        found = ray.train.get_all_reported_checkpoints(consistency_mode=mode, timeout_s=_CONTROLLER_S)
        names = [os.path.basename(each.checkpoint.path) for each in found]
        return {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}

    def _path(self, name: str) -> str:
        return f"{self._storage.experiment_fs_path}/{name}"

    def _remove_unlisted(self) -> None:
        """Directories that a worker was killed with, before Ray had heard of them."""
        files = self._storage.storage_filesystem
        for info in files.get_file_info(FileSelector(self._storage.experiment_fs_path)):
            is_ours = info.type == FileType.Directory and _NAME.fullmatch(info.base_name)
            if is_ours and info.base_name not in self._registered:
                files.delete_dir(info.path)

    def next(self) -> Entry | None:
        """The newest committed step, with a directory that stands for it, if Ray has not heard of it yet.

        In a tier it is pinned.  ``None`` also if it is just being removed there.

        Raises: :class:`StorageError`; ``OSError`` of Ray's storage.
        """
        save = self._catalog.newest()
        if save is None:
            return None
        name = f"checkpoint_{save.step:012d}-e{save.epoch:04d}-{save.attempt}"
        if name in self._registered or (self._last is not None and self._last.name == name):
            return None
        if self._is_tier:
            try:
                self._catalog.pin(save.step)
            except NotFoundError:
                return None
        files, root = self._storage.storage_filesystem, str(self._catalog.root)
        files.create_dir(self._path(name))
        checkpoint = ray.train.Checkpoint(self._path(name), files)
        is_beside = isinstance(files, LocalFileSystem) and root == self._path(ROOT)
        checkpoint.set_metadata(
            {KEY: {"root": root, "beside": is_beside, "step": save.step, "save": [save.epoch, save.attempt]}}
        )
        metadata = self._catalog.manifest(save).metadata
        return Entry(name, save.step, checkpoint, {key: _number(value) for key, value in metadata.items()})

    def reported(self, entry: Entry) -> None:
        """It is on its way to the controller."""
        self._last = entry

    def settle(self) -> None:
        """Block until the controller has what was reported, and has removed what it lets go; then remove those steps.

        In a tier they are unpinned, and go after the next commit there.
        Raises: :class:`StorageError`, :class:`BusyError`; errors of Ray.
        """
        self._registered = self._listed()
        if self._last is None or not self._removes:
            return
        stay = set(self._registered.values())
        going = [step for step in self._catalog.steps() if step < self._last.step and step not in stay]
        if self._is_tier:
            for step in going:
                with contextlib.suppress(NotFoundError):  # it was not pinned, and is gone
                    self._catalog.unpin(step)
        elif going:
            spi.remove(self._checkpointer, going)


def _number(value: Any) -> Any:
    """Metadata has numbers that are not finite as texts."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def locate(checkpoint: Any, storage_options: Any = None) -> tuple[str, int]:
    """The root and the step that a checkpoint of Ray's stands for: ``stillframe.load(root, step)`` reads it.

    In any process; a worker or a run is not needed.  ``storage_options``: of the root, if it is an object store.
    Raises: :class:`NotFoundError` if it is not one of ours, or its step is not there; :class:`StorageError`.
    """
    said = checkpoint.get_metadata().get(KEY)
    if not isinstance(said, dict):
        raise NotFoundError(f"{checkpoint.path} is no checkpoint that stillframe has reported to Ray, or Ray let it go")
    step, beside = said["step"], os.path.join(os.path.dirname(checkpoint.path), ROOT)
    roots = [beside, said["root"]] if said["beside"] else [said["root"]]  # the first, if the run was moved as a whole
    for root in dict.fromkeys(roots):
        catalog = Catalog(root, storage_options=storage_options)
        if step in catalog.steps():
            save = catalog.find(step)
            if [save.epoch, save.attempt] == said["save"]:
                return root, step
    raise NotFoundError(f"{checkpoint.path} stands for step {step} in {' or '.join(dict.fromkeys(roots))}: it is gone")
