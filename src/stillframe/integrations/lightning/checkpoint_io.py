"""The plugin that Lightning's strategies save with, load with and remove with."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as LightningCheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from stillframe.errors import ConfigError, StillframeError
from stillframe.integrations.frameworks import agreed, here
from stillframe.integrations.lightning import hooks
from stillframe.integrations.lightning.directory import Directory
from stillframe.integrations.lightning.loaders import Position
from stillframe.integrations.lightning.reading import find, read, restore, settle
from stillframe.open_roots import How, fence, seat
from stillframe.store import files


class CheckpointIO(LightningCheckpointIO):  # type: ignore[misc]  # mypy is told nothing of Lightning
    """``plugins=[CheckpointIO()]`` of a ``Trainer`` or a ``Fabric``: a single device, DDP, ``ModelParallelStrategy``.

    arena: host memory lent for staging, as of :class:`stillframe.Checkpointer`.
    on_error: training goes on after a failed save, which is logged at once.  With ``"raise"``, ``fit`` raises it when
    it ends; with ``"warn"`` it does not.

    Thread: the training thread's.  Raises: :class:`ConfigError` for versions of Lightning that were not tested.
    """

    def __init__(self, *, arena: int | str = "auto", on_error: Literal["raise", "warn"] = "raise") -> None:
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"on_error={on_error!r}: give 'raise' or 'warn'")
        hooks.install()
        self.position = Position()
        """Of the training that this plugin saves."""
        self._how, self._on_error = How(arena), on_error
        self._directories: dict[str, Directory] = {}
        self._is_together = False
        """Whether ranks have saved together since the last teardown."""
        self._plain = TorchCheckpointIO()

    def __reduce__(self) -> Any:
        """Made anew in a process that is spawned: hooks are needed there, too, and nothing is open."""
        return _made, (self._how.arena, self._on_error)

    def _place(self, path: Any) -> tuple[Directory, str]:
        if "://" in str(path):
            raise ConfigError(f"{path}: CheckpointIO() saves to directories, and carries nothing to a URL by itself")
        directory, name = os.path.split(os.path.abspath(path))
        if directory not in self._directories:
            self._directories[directory] = Directory(directory, self._how)
        return self._directories[directory], name

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Request a checkpoint of the state as it is now; ``path`` appears, whole, when it is durable.

        A name that begins with a dot, which Lightning's tuner gives to what it loads and removes at once, is written
        by Lightning.  A save that fails later is logged, and raised where the fit ends.
        Raises: :class:`UnsupportedStateError`, :class:`ConfigError`, :class:`BusyError`, :class:`StorageError`.
        """
        self._save(checkpoint, path, storage_options, None)

    def save_together(self, checkpoint: dict[str, Any], path: Any, sharded: Collection[str]) -> None:
        """As :meth:`save_checkpoint`, on every rank: each saves a dict of its own, and its part of what is sharded.

        ``sharded``: the keys of what is divided among the ranks.  If it raises, it does so on every rank.
        """
        self._is_together = True
        try:
            here(lambda: self._save(checkpoint, path, None, sharded))
        except StillframeError:
            directory, name = self._place(path)
            directory.forget(name)
            raise

    def _save(self, checkpoint: dict[str, Any], path: Any, options: Any, sharded: Collection[str] | None) -> None:
        if options is not None:
            raise ConfigError(f"storage_options={options!r}: CheckpointIO() saves to directories, and has none")
        directory, name = self._place(path)
        if name.startswith("."):
            if sharded is not None:
                raise ConfigError(f"{name}: Lightning's tuner was not tried with sharded models")
            self._plain.save_checkpoint(checkpoint, path)
            return
        if {"loops", "callbacks"} <= checkpoint.keys() and hooks.KEY not in checkpoint:
            raise ConfigError("give CheckpointIO() itself to the Trainer's plugins: inside another it saves no numbers")
        save = directory.save(name, checkpoint, sharded)
        if name.startswith("hpc_"):  # SLURM takes the job away next
            save.wait()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """The checkpoint, on every rank the same; also one that Lightning itself has written.

        Blocks until the keeper of a run that was killed has committed what it holds.  Every rank calls it.
        Raises: :class:`IntegrityError`, :class:`NotFoundError`, :class:`StorageError`; ``FileNotFoundError``.
        """
        fence()  # what was requested is copied before the loaded values replace it
        found = self.find(path)
        if found is None:
            return self._plain.load_checkpoint(path, map_location, weights_only)
        return read(os.fspath(path), found, map_location, weights_only)

    def restore(
        self, path: Any, live: dict[str, Any], strict: bool, weights_only: bool | None
    ) -> dict[str, Any] | None:
        """Put a checkpoint into live objects, by key, each rank its part.  Returns what is left of it; ``None``: it is
        not of ours.

        Blocks and raises as :meth:`load_checkpoint`; :class:`MismatchError`.  Every rank calls it.
        """
        fence()
        found = self.find(path)
        return None if found is None else restore(os.fspath(path), found, live, strict, weights_only)

    def find(self, path: Any) -> tuple[str, Any] | None:
        """The root and the save that a path stands for; ``None``: it is not of ours.  Every rank calls it, and waits.

        Raises: :class:`StorageError`.
        """
        return agreed(lambda: self._find(os.fspath(path)))  # rank 0's saves appear there

    def _find(self, path: str) -> tuple[str, Any] | None:
        if "://" not in path:
            directory, _ = self._place(path)
            directory.wait()
            settle(directory.path)
        return find(path)

    def remove_checkpoint(self, path: Any) -> None:
        """It goes once the saves requested until now are committed; one that is not committed yet, too."""
        directory, name = self._place(path)
        if not directory.remove(name):
            self._plain.remove_checkpoint(path)

    def is_requested(self, path: Any) -> bool:
        """Whether it will appear."""
        directory, name = self._place(path)
        return directory.has(name)

    def link(self, path: str, to: str) -> bool:
        """Have ``path`` point to a checkpoint of the same directory, once that is there; ``False``: it is no such."""
        (directory, name), (other, target) = self._place(path), self._place(to)
        if directory is not other or files.kind_of(to) == "file":
            return False
        if name != target:  # a ModelCheckpoint may call what it saves "last" by itself
            directory.link(name, target)
        return True

    def wait(self) -> None:
        """Block until everything requested is committed.  Raises the error of a save that failed."""
        self._tell({path: error for each in self._directories.values() for path, error in each.wait().items()})

    def teardown(self) -> None:
        """Lightning calls it when a fit, a validation or a test ends, also after an error.  Blocks as :meth:`wait`."""
        directories, self._directories = self._directories, {}
        is_together, self._is_together = self._is_together, False
        is_failing = sys.exc_info()[0] is not None
        self.position.forget()
        meets = is_together and seat()[1] > 1 and not is_failing
        if meets:
            _tell_ranks(directories)
        failed = {name: error for each in directories.values() for name, error in each.finish().items()}
        if meets:
            dist.barrier()  # the keepers of all ranks are there while rank 0 has steps removed
        for each in directories.values():
            each.close()
        if not is_failing and self._on_error == "raise":  # else that error is the one to be seen
            self._tell(failed)

    def _tell(self, failed: dict[str, StillframeError]) -> None:
        for name, error in failed.items():
            raise type(error)(f"{name} was not saved: {error}") from error


def _tell_ranks(directories: dict[str, Directory]) -> None:
    """What has failed on one rank fails on all.  On a full disk a keeper cannot say so itself, and is waited for."""
    said: list[Any] = [None] * seat()[1]
    dist.all_gather_object(said, {path: each.failed_here() for path, each in directories.items()})
    for rank, failed in enumerate(said):
        for path in failed.keys() & directories.keys():
            told = {step: f"rank {rank} could not save it: {why}" for step, why in failed[path].items()}
            directories[path].failed_elsewhere(told)


def _made(arena: int | str, on_error: Literal["raise", "warn"]) -> CheckpointIO:
    return CheckpointIO(arena=arena, on_error=on_error)
