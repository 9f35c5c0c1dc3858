"""``transformers.Trainer`` with another way to save and to resume; all else is the trainer's own.

What is overridden, in the order of its calls: ``train`` and ``_inner_training_loop``; ``_load_from_checkpoint``,
``_load_optimizer_and_scheduler``, ``_load_scaler`` (these three as one restore), ``_load_rng_state``;
``_save_checkpoint`` and ``_push_from_checkpoint``; ``_finalize_training`` and ``_load_best_model``.  A checkpoint that
Trainer itself has written is left to it.

Under data parallelism rank 0 saves what all ranks have alike, as Trainer does, and every rank its random numbers.  With
FSDP2 every rank saves its part of model and optimizer, too.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import Any

import torch.distributed as dist
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.trainer_utils import get_last_checkpoint as _last

import stillframe
from stillframe import Catalog, Checkpointer, Save, spi
from stillframe.errors import ConfigError, NotFoundError
from stillframe.integrations.frameworks import agreed
from stillframe.integrations.transformers.model import OURS, ModelPart
from stillframe.integrations.transformers.sharded import ShardedPart
from stillframe.store import files

logger = logging.getLogger("stillframe")

ROOT = "_stillframe"
"""The root in the ``output_dir``.  What begins with ``_`` is not uploaded by Trainer."""
_STATE, _RNG = f"{OURS}/state", f"{OURS}/rng"
_ONLY_MODEL = "save_only_model"
"""In the metadata of a checkpoint that has nothing but weights."""


class StillframeTrainer(Trainer):
    """What :func:`.install.install` makes of a trainer.  Thread: the training thread's."""

    args: Any
    state: Any
    stillframe_options: dict[str, Any]
    _checkpointer: Checkpointer
    _source: tuple[str, int] | None = None
    """The root and the step to resume from; ``None``: none, or a checkpoint of Trainer's own."""

    @property
    def _root(self) -> str:
        return os.path.join(self.args.output_dir, ROOT)

    def _directory(self, step: int) -> str:
        return os.path.join(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")

    # --- beginning ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """As Trainer's; ``resume_from_checkpoint=True`` also where there is none yet: then training begins."""
        if trial is not None:
            raise ConfigError("a search for hyperparameters is not supported by install(trainer): it was not tested")
        self._source, path = agreed(lambda: self._find(resume_from_checkpoint))
        self._rng = stillframe.RNG()
        self._part = ShardedPart(self) if self.is_fsdp_enabled else ModelPart(self)
        self._requested: set[int] = set()
        self._kept_best: int | None = None
        with (
            Checkpointer(self._root, **self.stillframe_options) as self._checkpointer,
            files.scratch_directory("stillframe-resume-") as scratch,
        ):
            spi.hide(self._checkpointer, OURS)
            if self._source is not None:
                root, step = self._source
                path, told = scratch, spi.load_rank(root, step, 0, only=_STATE)
                files.write_file(os.path.join(scratch, TRAINER_STATE_NAME), told[OURS]["state"].encode())
            return super().train(path, trial, ignore_keys_for_eval)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Called again, with a smaller batch, where ``auto_find_batch_size`` meets the end of memory."""
        if self._requested and self._source is None:
            raise ConfigError(
                f"training ran out of memory after step {max(self._requested)} was saved, and auto_find_batch_size "
                "would begin anew, over steps that are saved: go on with train(resume_from_checkpoint=True) and a "
                "smaller per_device_train_batch_size"
            )
        return super()._inner_training_loop(*args, **kwargs)

    def _find(self, resume: Any) -> tuple[tuple[str, int] | None, str | None]:
        """What to resume from: a root with a step, or a directory of Trainer's own."""
        spi.wait_finished(self._root)
        newest = Catalog(self._root).latest()
        if resume is True:
            is_there = files.kind_of(self.args.output_dir) == "directory"
            last = _last(self.args.output_dir) if newest is None and is_there else None  # type: ignore[no-untyped-call]
            return (None, last) if newest is None else (_checked(self._root, newest), None)
        if resume is None or resume is False:
            if newest is not None:
                raise ConfigError(
                    f"{self.args.output_dir} has checkpoints of an earlier run, the newest of step {newest}: go on "
                    "with train(resume_from_checkpoint=True), or give another output_dir, or remove this one"
                )
            return None, None
        save = spi.save_of(resume)
        if save is None:
            return None, os.fspath(resume)
        root = os.path.join(os.path.dirname(os.path.abspath(resume)), ROOT)
        if os.path.abspath(self._root) == root:
            root = self._root
        if save.step not in Catalog(root).steps():
            raise NotFoundError(f"{resume} refers to {save}, which is not in {root}: was it moved without its root?")
        return _checked(root, save.step), None

    # --- resuming ----------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._source is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        root, step = self._source
        mine = {OURS: {"rng": self._rng}}
        if root == self._root:
            self._checkpointer.restore(mine, step=step, only=_RNG)
        else:
            stillframe.restore(root, mine, step, only=_RNG)
        common = {**self._part.live(), OURS: self._loop()}
        stillframe.restore(root, common, step, exclude=[_RNG, _STATE], rank=0, world_size=1)
        self._part.restore_own(root, step)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Trainer calls it when the first batch has come, or at the beginning of an epoch."""
        if self._source is None:
            super()._load_rng_state(checkpoint)
        else:
            self._rng.again()

    # --- saving ------------------------------------------------------------------------------

    def _loop(self) -> dict[str, Any]:
        scaler = getattr(self.accelerator, "scaler", None)
        parts = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "scaler": scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _shards(self) -> dict[str, Any]:
        """What ranks beyond the first have a part of."""
        return {"optimizer": self.optimizer} if self.is_fsdp_enabled else {}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        self._requested.add(step)
        self.store_flos()
        best = self.state.best_global_step
        if best and (best in self._requested or files.kind_of(self._directory(best)) == "directory"):
            self.state.best_model_checkpoint = self._directory(best)
        rank, is_first = self.args.process_index, self.args.process_index == 0
        self._checkpointer.fence(wait=True)  # the copies of buffers are used again
        weights, mine = self._part.saved()
        if not self.args.save_only_model:
            mine |= {"rng": self._rng, **(self._loop() if is_first else self._shards())}
        segments = self._part.segments
        segment = segments[rank] if rank < len(segments) else ""
        label = spi.Label(f"{PREFIX_CHECKPOINT_DIR}-{step}", segment=segment, home="..")
        if is_first:
            told = self._told()
            contents = (*self._part.files(), (TRAINER_STATE_NAME, told.encode()))
            label = dataclasses.replace(label, contents=contents, total=len(contents) + len(segments))
            mine["state"] = told
        about = {_ONLY_MODEL: True} if self.args.save_only_model else None
        save = spi.save(self._checkpointer, {**weights, OURS: mine}, step, label=label, metadata=about)
        if is_first:
            save.then(self._rotate)
        if self.args.push_to_hub:
            self._push_from_checkpoint(self._directory(step))

    def _told(self) -> str:
        """What Trainer writes to ``trainer_state.json``."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, told = type(callback).__name__, callback.state()
                known = self.state.stateful_callbacks.get(name)
                if isinstance(known, list):
                    known.append(told)
                else:
                    self.state.stateful_callbacks[name] = told
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _rotate(self, save: Save) -> None:
        """When a save is committed: remove what ``save_total_limit`` does not keep.  Thread: that of the commits.

        As Trainer does it: the newest stays, and the best, of which the older one stays until the newer is committed.
        """
        limit = self.args.save_total_limit or 0
        steps = Catalog(self._root).steps()
        if self.state.best_global_step in steps:
            self._kept_best = self.state.best_global_step
        staying = {steps[-1], self._kept_best} & {*steps} if steps else set()
        going = [step for step in steps if step not in staying][: max(len(steps) - max(limit, len(staying)), 0)]
        if limit > 0 and going:
            spi.remove(self._checkpointer, going)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """The weights on the Hub are plain files, which have to be written; a directory to copy from is not needed."""
        if agreed(self._is_to_push):
            self.save_model(self.args.output_dir, _internal_call=True)  # with FSDP all ranks take part
            super()._push_from_checkpoint(os.path.join(checkpoint_folder, "nothing"))

    def _is_to_push(self) -> bool:
        push = self.push_in_progress
        is_held_up = push is not None and not push.is_done() and not self.args.hub_always_push
        return self.args.hub_strategy != "end" and not is_held_up

    # --- ending ------------------------------------------------------------------------------

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        """Everything is durable, or has failed, before Trainer looks for the best one and returns."""
        self._checkpointer.wait()
        best = self.state.best_model_checkpoint
        if self.args.world_size > 1:
            dist.barrier()
        if best is not None and files.kind_of(best) != "directory":
            logger.warning("%s, the best model, was not saved: it is not loaded", best)
            self.state.best_model_checkpoint = None
        done = super()._finalize_training(  # type: ignore[no-untyped-call]
            trial, num_train_samples, start_time
        )
        if self.state.best_model_checkpoint is not None and self.args.save_total_limit == 1 and self.args.should_save:
            others = [step for step in Catalog(self._root).steps() if step != self.state.best_global_step]
            spi.remove(self._checkpointer, others, force=True)
        return done

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        save = spi.save_of(best)
        if save is None:
            super()._load_best_model()
            return
        root = os.path.join(os.path.dirname(os.path.abspath(best)), ROOT)
        stillframe.restore(root, self._part.live(), save.step, exclude=OURS, rank=0, world_size=1)


def _checked(root: str, step: int) -> tuple[str, int]:
    """Raises :class:`ConfigError` if nobody can go on from this step."""
    catalog = Catalog(root)
    if catalog.manifest(catalog.find(step)).metadata.get(_ONLY_MODEL):
        raise ConfigError(
            f"step {step} was saved with save_only_model, so it has no optimizer state to go on with: load its weights "
            f"with from_pretrained({PREFIX_CHECKPOINT_DIR}-{step}), and train them in another output_dir"
        )
    return root, step
