"""The checkpoint manager that torchtitan builds from its configuration, in place of its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    CheckpointManager,
)
from torchtitan.tools import filesystem

import stillframe
from stillframe import Checkpointer, KeepLast, RestoreReport, Save
from stillframe.errors import ConfigError, MismatchError, NotFoundError
from stillframe.integrations.torchtitan.state import Numbers, Weights, positions, watch

RNG = "rng"
_SAID_BY_TORCHTITAN = {
    "keep": "keep_latest_k says what stays",
    "every": "interval says which steps are saved",
    "rank": "torchtitan numbers the ranks",
    "world_size": "torchtitan numbers the ranks",
}
_OF_READING = ("deadline_s", "shared", "storage_options", "tiers")


class Manager(BaseCheckpointManager):  # type: ignore[misc]  # mypy is told nothing of torchtitan
    """Made by torchtitan's ``Trainer``.  Thread: the training thread's.

    Steps are saved to the root, lazily.  Everything else that a manager reads and writes is left to torchtitan's own
    (``CheckpointManager``): a seed, checkpoints of another run or of Hugging Face, and the model after the last step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's own, with checkpointing enabled, and:

        root: where checkpoints are stored; by default ``_stillframe`` in the folder.
        options: of :class:`stillframe.Checkpointer`, such as ``arena`` and ``tiers``.  A save that fails is logged and
        training goes on, unless ``on_error`` says otherwise; if that of the last step fails, training ends with it.
        """

        enable: bool = True
        root: str | None = None
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            for name, reason in _SAID_BY_TORCHTITAN.items():
                if name in self.options:
                    raise ConfigError(f"Manager.Config(options={{{name!r}: …}}): {reason}")
            if "{node}" in self.folder:
                raise ConfigError(
                    f"Manager.Config(folder={self.folder!r}): all ranks need to see the folder; give the path of the "
                    "nodes' own disks as root=, and tiers in the options"
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Save | None = None
        self.restored = RestoreReport(None)
        """What was restored, and from where; of what torchtitan itself loads it says nothing."""
        if not self.enable:
            return
        self._config = config
        folder = filesystem.join(base_folder, config.folder)
        self._root = config.root or filesystem.join(folder, "_stillframe")
        self._given = {
            "dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers,
            "lr_schedulers": lr_schedulers, "sd_adapter": sd_adapter, "base_folder": base_folder,
        }  # fmt: skip
        self._states = dict(states)
        if config.last_save_in_hf and sd_adapter is None:
            raise ConfigError("Manager.Config(last_save_in_hf=True): this model has no state_dict_adapter")
        if RNG in states:
            raise ConfigError(f"states[{RNG!r}]: stillframe saves the random numbers under this name")
        numbers = Numbers()
        self._state = {
            **states, MODEL: Weights(model_parts), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers,
            DATALOADER: positions(dataloader), RNG: numbers,
        }  # fmt: skip
        for name in config.exclude_from_loading:
            if name not in self._state:
                raise ConfigError(f"exclude_from_loading={name!r}: there is {', '.join(map(repr, self._state))}")
        if dataloader is not None:
            watch(dataloader, numbers)
        self._checkpointer: Checkpointer | None = None
        if not (config.load_only or config.create_seed_checkpoint):
            keep = KeepLast(config.keep_latest_k) if config.keep_latest_k else None
            self._checkpointer = Checkpointer(self._root, keep=keep, **{"on_error": "warn", **config.options})

    def _stock(self) -> Any:
        """torchtitan's own manager, of the same objects; it removes nothing."""
        fields = {
            each.name: getattr(self._config, each.name) for each in dataclasses.fields(BaseCheckpointManager.Config)
        }
        excluded = [name for name in self._config.exclude_from_loading if name != RNG]
        config = CheckpointManager.Config(**{**fields, "keep_latest_k": 0, "exclude_from_loading": excluded})
        return CheckpointManager(config, states=dict(self._states), **self._given)

    def _load(self, step: int = -1) -> bool:
        """Restore a step of the root, the newest without ``step``.  If there is none, do what torchtitan does.

        Blocks until done, on all ranks.  Raises: what :meth:`stillframe.Checkpointer.restore` raises.
        """
        how: dict[str, Any] = {
            "step": None if step == -1 else step,
            "exclude": self._config.exclude_from_loading or None,
        }
        try:
            if self._checkpointer is not None:
                report = self._checkpointer.restore(self._state, **how)
            else:
                more = {name: self._config.options[name] for name in _OF_READING if name in self._config.options}
                report = stillframe.restore(self._root, self._state, **how, **more)
        except NotFoundError:
            if step == -1:
                raise
        except MismatchError as error:
            if f"{DATALOADER}/" not in str(error):
                raise
            raise MismatchError(
                f"{error}. Data loaders of torchtitan go on only where as many ranks read data as before; to begin the "
                f"data anew: exclude_from_loading=[{DATALOADER!r}]"
            ) from error
        else:
            if report.step is not None:
                self.restored = report
                return True
        return bool(self._stock().load(step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Request a checkpoint, if the step is due.

        Blocks: as :meth:`stillframe.Checkpointer.save`; for the last step until it is committed.  Raises the error of
        that one, and of others as ``on_error`` says.
        """
        config = self._config
        if curr_step == 0:
            return bool(self._stock().save(curr_step, last_step))
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if self._checkpointer is None or not (last_step or is_first or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:  # before the save: once that is there, nobody would make it up
            self._stock().save(curr_step, last_step=True)
        self.save_future = self._checkpointer.save(curr_step, self._state)
        if last_step:
            self._wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.fence()

    def _wait_for_saving(self) -> None:
        save, self.save_future = self.save_future, None
        if save is not None:
            save.wait("committed")

    def _close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
