"""Where Lightning has no place for a plugin, its functions are wrapped: each asks first whether the trainer is ours.

saving      ``dump_checkpoint`` runs on every rank, and is given the numbers and positions of all
resuming    ``restore_loops``, ``_load_combined_loader_states``: these put them back
validation  ``run`` of the evaluation loop: draws nothing that training would miss
names       ``file_exists`` knows of what is not committed yet, ``_link_checkpoint`` waits for the commit,
            ``_find_last_checkpoints`` waits for the keeper of a run that was killed
reading     ``_load``, in the place of its users: opens our directories
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch.distributed as dist
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from stillframe.errors import ConfigError
from stillframe.integrations.frameworks import check_version
from stillframe.integrations.lightning.directory import find, read, settle

TESTED = "2.6"
KEY = "stillframe"
"""What is added to Lightning's dict has this name there."""
_wrapped: list[str] = []


def install() -> None:
    """Let Lightning open checkpoints of stillframe in this process; ``CheckpointIO()`` calls it.  May be called again.

    Raises: :class:`ConfigError` for versions that were not tested.
    """
    check_version(lightning, TESTED, "train without CheckpointIO()")
    if _wrapped:
        return
    for owner, name, function in _HOOKS:
        _wrapped.append(name)
        wrapped = _around(getattr(owner, name), function)
        setattr(owner, name, staticmethod(wrapped) if name == "_link_checkpoint" else wrapped)


def _around(stock: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return wrapped


def _ours(trainer: Any) -> Any:
    """The plugin of a trainer, if it is ours."""
    from stillframe.integrations.lightning.checkpoint_io import CheckpointIO

    plugin = getattr(trainer.strategy, "_checkpoint_io", None)
    return plugin if isinstance(plugin, CheckpointIO) else None


# --- saving and resuming ---------------------------------------------------------------------


def _dump(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    checkpoint, trainer = stock(self, *args, **kwargs), self.trainer
    plugin = _ours(trainer)
    if plugin is not None and "callbacks" in checkpoint:
        is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        fetched = getattr(getattr(trainer.fit_loop, "_data_fetcher", None), "batches", ())
        said = [plugin.position.state(is_over, len(fetched))]
        if trainer.world_size > 1:
            own, said = said[0], [None] * trainer.world_size
            dist.gather_object(own, said if trainer.is_global_zero else None)
        checkpoint[KEY] = {"ranks": said}
    return checkpoint


def _restore(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    plugin, trainer = _ours(self.trainer), self.trainer
    if plugin is not None and trainer.state.fn == TrainerFn.FITTING:
        ranks = self._loaded_checkpoint.get(KEY, {}).get("ranks", [])
        plugin.position.restore(ranks[trainer.global_rank % len(ranks)] if ranks else None)


def _load_loaders(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    plugin, loader = _ours(self.trainer), self._combined_loader
    if plugin is not None:
        _check_strategy(self.trainer.strategy)
        loader.flattened = plugin.position.of(loader.flattened)
    stock(self, *args, **kwargs)
    if plugin is not None:
        plugin.position.begin()


def _check_strategy(strategy: Any) -> None:
    is_tried = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not is_tried:
        raise ConfigError(
            f"CheckpointIO() does not support {type(strategy).__name__}, which saves without its plugin, in a format "
            "of its own: give a single device or DDP"
        )


def _evaluate(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    plugin = _ours(self.trainer)
    if plugin is None or self.trainer.state.fn != TrainerFn.FITTING:
        return stock(self, *args, **kwargs)
    with plugin.position.apart():
        return stock(self, *args, **kwargs)


# --- names -----------------------------------------------------------------------------------


def _exists(stock: Any, self: Any, filepath: Any, trainer: Any) -> Any:
    plugin = _ours(trainer)
    is_requested = plugin is not None and trainer.is_global_zero and plugin.is_requested(filepath)
    if plugin is not None and trainer.strategy.reduce_boolean_decision(is_requested, all=False):
        return True
    return stock(self, filepath, trainer)


def _link(stock: Any, trainer: Any, filepath: str, linkpath: str) -> None:
    plugin = _ours(trainer)
    if plugin is None or (trainer.is_global_zero and not plugin.link(linkpath, filepath)):
        stock(trainer, filepath, linkpath)  # with a barrier at its end, too
    else:
        trainer.strategy.barrier()


def _find_last(stock: Any, self: Any, trainer: Any) -> Any:
    directory = str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))
    if _ours(trainer) is not None and "://" not in directory:
        settle(directory)
    return stock(self, trainer)


# --- reading ---------------------------------------------------------------------------------


def _load(stock: Any, path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    found = find(str(path_or_url)) if isinstance(path_or_url, str | Path) else None
    if found is None:
        return stock(path_or_url, map_location=map_location, weights_only=weights_only)
    return read(str(path_or_url), found, map_location, weights_only)


_HOOKS: list[tuple[Any, str, Callable[..., Any]]] = [
    (_CheckpointConnector, "dump_checkpoint", _dump),
    (_CheckpointConnector, "restore_loops", _restore),
    (_FitLoop, "_load_combined_loader_states", _load_loaders),
    (_EvaluationLoop, "run", _evaluate),
    (ModelCheckpoint, "file_exists", _exists),
    (ModelCheckpoint, "_link_checkpoint", _link),
    (ModelCheckpoint, "_find_last_checkpoints", _find_last),
    (saving, "pl_load", _load),
    (torch_io, "pl_load", _load),
]
