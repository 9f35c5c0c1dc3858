"""``accelerate.Accelerator`` with another way to save and to load its state; all else is the accelerator's own.

What is overridden: ``save_state``, ``load_state``; ``prepare_data_loader`` and ``skip_first_batches``, to know where
the loaders are (:mod:`.loaders`); ``end_training``, which waits for what is being saved.  A directory that Accelerate
itself has written is left to it.

A save is numbered by a counter of the root's own: the directories may have any names.  The directory appears, beside
the root, when the checkpoint is committed, and goes with it; whoever removes it removes the checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor, distribute_tensor

import stillframe
from stillframe import Catalog, Checkpointer, Save, TrainState, spi
from stillframe.errors import ConfigError, NotFoundError, StillframeError
from stillframe.integrations.accelerate.loaders import Numbers, Position
from stillframe.integrations.frameworks import agreed
from stillframe.store import files

logger = logging.getLogger("stillframe")

_FILE = "root.txt"
"""In the directory of a checkpoint: where the root is, seen from there."""


class Gradients:
    """What has been accumulated for the next update, as an object with a state; empty where none is on its way."""

    def __init__(self, models: list[Any], is_on_its_way: bool) -> None:
        self._models, self._is_on_its_way = models, is_on_its_way

    def state_dict(self) -> dict[str, Any]:
        if not self._is_on_its_way:
            return {}
        return {name: each.grad for name, each in self._named() if each.grad is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in self._named():
            grad = state.get(name)
            if grad is not None and isinstance(each, DTensor) and not isinstance(grad, DTensor):
                grad = distribute_tensor(grad, each.device_mesh, each.placements, src_data_rank=None)  # asks no rank
            each.grad = grad

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, model in enumerate(self._models):
            for name, each in model.named_parameters():
                yield f"{number}/{name}", each


class StillframeAccelerator(Accelerator):  # type: ignore[misc]
    """What :func:`.install.attach` makes of an accelerator.  Thread: the training thread's."""

    _checkpointer: Checkpointer

    def begin(self, root: str, skip: str, options: dict[str, Any]) -> Checkpointer:
        """Blocks until the keeper of a run that was killed has finished.  On every rank."""
        self._root, self._skip = os.path.abspath(root), skip
        self._numbers = Numbers()
        self._positions: list[Position] = []
        self._seen: dict[int, str] = {}
        """The directories of checkpoints, by step, that have been there."""
        self._next_step = agreed(self._find_next)
        self._checkpointer = Checkpointer(self._root, **options)
        for each in self._dataloaders:
            self._position(each)
        return self._checkpointer

    def _find_next(self) -> int:
        spi.wait_finished(self._root)
        catalog = Catalog(self._root)
        steps = catalog.steps()
        for step in steps:
            with contextlib.suppress(StillframeError):  # a damaged one: whoever loads it is told
                told = catalog.manifest(catalog.find(step)).metadata
                self._see(step, os.path.join(self._root, str(told.get("directory", "."))))
        return max(steps, default=0) + 1

    def _see(self, step: int, directory: str) -> None:
        if spi.save_of(directory) is not None:
            self._seen[step] = directory

    # --- what is saved -----------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        self._positions = [self._position(each) for each in self._dataloaders]
        parts = {
            "models": [TrainState(each) for each in self._models],
            "optimizers": [each.optimizer for each in self._optimizers],
            "schedulers": list(self._schedulers),
            "custom": list(self._custom_objects),
            "scaler": self.scaler,
            "loaders": self._positions,
            "gradients": Gradients(self._models, not self.sync_gradients),
            "accelerator": {"step": self.step, "iteration": self.save_iteration},
            "rng": self._numbers,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _position(self, loader: Any) -> Position:
        for each in self._positions:
            if each.loader is loader:
                return each
        self._positions.append(Position(loader, self._numbers, self.process_index))
        return self._positions[-1]

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        self._position(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerate's.  Where workers may draw numbers, they load what is skipped, unless ``skip="fast"``."""
        found = super().skip_first_batches(dataloader, num_batches)
        position = next((each for each in self._positions if each.loader is dataloader), None)
        if position is not None:
            if num_batches and dataloader.num_workers and self._skip == "exact" and not position.is_stateful:
                found.base_dataloader, found.skip_batches = copy.copy(dataloader.base_dataloader), num_batches
            dropped = found.skip_batches
            position.watch(found, num_batches - dropped, dropped)
        return found

    # --- saving ------------------------------------------------------------------------------

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **more: Any) -> Path:
        """As Accelerate's, but the directory appears when the checkpoint is durable.

        Blocks for about a millisecond.  Raises: as ``Checkpointer.save``; :class:`ConfigError`.
        """
        if self._save_model_state_pre_hook:
            raise ConfigError(
                "a hook of register_save_state_pre_hook cannot write to a directory that appears later: give what it "
                "saves to register_for_checkpointing, or save it elsewhere"
            )
        if self.is_fsdp2 and not self.sync_gradients and not self.gradient_state.plugin_kwargs.get("sync_each_batch"):
            raise ConfigError(
                "save_state between the micro-batches of an update: FSDP2 has their gradients where no state dict "
                "reaches them. Save when accelerator.sync_gradients, or give the Accelerator "
                "GradientAccumulationPlugin(num_steps=…, sync_each_batch=True)"
            )
        directory = self._directory(output_dir)
        step, self._next_step = self._next_step, self._next_step + 1  # both first: ranks count alike, whatever fails
        self.project_configuration.iteration += 1
        label, where = self._label(directory), os.path.relpath(directory, self._root)
        save = spi.save(self._checkpointer, self._state(), step, label=label, metadata={"directory": where})
        if self.is_main_process:
            save.then(lambda save: self._rotate(save, str(directory)))
        return directory

    def _directory(self, output_dir: Any) -> Path:
        if self.project_configuration.automatic_checkpoint_naming:
            directory = Path(self._home, f"checkpoint_{self.save_iteration}")
            if files.is_taken(directory):
                raise ValueError(
                    f"{directory} exists already: call load_state() first, to go on from what is there, or give "
                    "another project_dir"
                )
            return directory
        if output_dir is None:
            raise ValueError("save_state: give output_dir, or use automatic_checkpoint_naming")
        return Path(os.path.abspath(output_dir))

    @property
    def _home(self) -> str:
        return os.path.join(os.path.abspath(self.project_dir), "checkpoints")

    def _label(self, directory: Path) -> spi.Label:
        above, parent = os.path.dirname(files.real_path(self._root)), files.real_path(directory.parent)
        if parent == above:
            home = ".."
        elif os.path.dirname(parent) == above and parent != files.real_path(self._root):
            home = f"../{os.path.basename(parent)}"
        else:
            raise ConfigError(
                f"{directory} lies neither beside the root, {self._root}, nor in a directory beside it: give "
                f"attach(accelerator, {str(directory.parent / '_stillframe')!r})"
            )
        if self.is_main_process and files.is_taken(directory) and not self._is_label(directory):
            raise ConfigError(f"{directory} exists, and is no checkpoint of stillframe: save_state makes it itself")
        where = os.path.relpath(self._root, directory).encode()
        return spi.Label(directory.name, contents=((_FILE, where),) if self.is_main_process else (), home=home, total=1)

    @staticmethod
    def _is_label(directory: Path) -> bool:
        """Asked twice: an earlier save of the name may take its place in between."""
        return spi.save_of(directory) is not None or spi.save_of(directory) is not None or not files.is_taken(directory)

    def _rotate(self, save: Save, directory: str) -> None:
        """A save is committed: remove what ``total_limit`` does not keep, and what the program has removed itself.

        Thread: that of the commits.
        """
        steps = Catalog(self._root).steps()
        self._seen = {step: path for step, path in self._seen.items() if step in steps}
        going = {step for step, path in self._seen.items() if files.kind_of(path) == "nothing"}
        self._see(save.step, directory)
        configuration = self.project_configuration
        if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
            going |= set(steps[: max(len(steps) - max(configuration.total_limit, 1), 0)])
        if going:
            spi.remove(self._checkpointer, sorted(going))

    # --- loading -----------------------------------------------------------------------------

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **more: Any) -> None:
        """As Accelerate's.  Without ``input_dir``: the newest checkpoint of the root, if there is one.

        Blocks until what is being saved is committed, and then until it is loaded.
        Raises: as ``Checkpointer.restore``; nothing was touched then.
        """
        with contextlib.suppress(StillframeError):  # what failed was told
            self._checkpointer.wait()
        source = None if input_dir is None else agreed(lambda: self._source(input_dir))
        if input_dir is not None and source is None:
            self._numbers.is_due = False
            for each in self._positions:
                each.forget()
            super().load_state(input_dir, load_kwargs, **more)
            return
        strict, state = more.get("strict", True), self._state()
        if source is None:
            report = self._checkpointer.restore(state, strict=strict)
        else:
            root, step = source
            report = stillframe.restore(root, state, step, strict=strict)
        if report.step is None:
            logger.info("%s has no checkpoint yet: training begins", self._root)
            return
        counted = state["accelerator"]
        self.step = counted["step"]
        self.project_configuration.iteration = agreed(lambda: self._find_iteration(counted["iteration"]))

    def _source(self, input_dir: Any) -> tuple[str, int] | None:
        """The root and the step that a directory stands for; ``None``: if it is there, Accelerate has written it."""
        directory = os.path.abspath(input_dir)
        save = spi.save_of(directory) if files.kind_of(directory) == "directory" else None
        if save is None:
            return None
        told = files.read_file(os.path.join(directory, _FILE)).decode()
        root = os.path.normpath(os.path.join(directory, told))
        if save.step not in Catalog(root).steps():
            raise NotFoundError(f"{input_dir} refers to {save}, which is not in {root}: was it moved without its root?")
        return root, save.step

    def _find_iteration(self, saved: int) -> int:
        """After those that are there: a directory's name is used once."""
        if not self.project_configuration.automatic_checkpoint_naming:
            return saved
        there = files.names_in(self._home) if files.kind_of(self._home) == "directory" else []
        numbers = [int(found[1]) for found in map(re.compile(r"checkpoint_(\d+)").fullmatch, there) if found]
        return max([saved, *(number + 1 for number in numbers)])

    # --- ending ------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Blocks until everything is durable, or has failed."""
        try:
            self._checkpointer.close()
        finally:
            super().end_training()
