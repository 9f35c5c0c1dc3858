"""Where Lightning has no place for a plugin, its functions are wrapped: each asks first whether the trainer is ours.

saving      ``dump_checkpoint`` runs on every rank, and is given the numbers and positions of those that it is saved for
resuming    ``restore_loops``, ``_load_combined_loader_states``: these put them back, in the epoch where they were
validation  ``run`` of the evaluation loop: draws nothing that training would miss
averages    before validation, and before ``on_train_end`` (``on_run_end``), weights are copied: callbacks replace them
            there by averages, and no optimizer's step says so
names       ``file_exists`` knows of what is not committed yet, ``_link_checkpoint`` waits for the commit,
            ``_find_last_checkpoints`` waits for the keeper of a run that was killed
reading     ``_load``, in the place of its users: opens our directories
strategies  those that save past the plugin: :mod:`.sharded`
"""

from __future__ import annotations

import functools
import sys
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
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from stillframe.errors import ConfigError
from stillframe.integrations.frameworks import check_version
from stillframe.integrations.lightning import sharded
from stillframe.integrations.lightning.reading import find, read, settle
from stillframe.integrations.lightning.sharded import ours
from stillframe.open_roots import fence

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
    for owner, name, function in (*_HOOKS, *sharded.HOOKS):
        _wrapped.append(name)
        stock = getattr(owner, name)
        wrapped = function(stock) if isinstance(stock, property) else _around(stock, function)
        setattr(owner, name, staticmethod(wrapped) if name == "_link_checkpoint" else wrapped)


def _around(stock: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return wrapped


# --- saving and resuming ---------------------------------------------------------------------


def _dump(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    checkpoint, trainer = stock(self, *args, **kwargs), self.trainer
    plugin = ours(trainer.strategy)
    if plugin is not None and "callbacks" in checkpoint:
        batches = trainer.fit_loop.epoch_loop.batch_progress
        at_hand = _at_hand(batches.current)
        fetched = getattr(getattr(trainer.fit_loop, "_data_fetcher", None), "batches", ())
        said = [plugin.position.state(batches.is_last_batch and not at_hand, len(fetched) + at_hand)]
        if trainer.world_size > 1 and not isinstance(trainer.strategy, ModelParallelStrategy):
            own, said = said[0], [None] * trainer.world_size
            dist.gather_object(own, said if trainer.is_global_zero else None)
        checkpoint[KEY] = {"ranks": said}
    return checkpoint


def _at_hand(batches: Any) -> int:
    """How many were taken, and not trained on: one, if an error or a signal saves in the middle of a step."""
    is_left_out = batches.started < batches.ready and sys.exc_info()[0] is None  # on_train_batch_start has said so
    return 0 if is_left_out else int(batches.ready - batches.processed)


def _restore(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self, *args, **kwargs)
    plugin, trainer = ours(self.trainer.strategy), self.trainer
    if plugin is not None and trainer.state.fn == TrainerFn.FITTING:
        ranks = self._loaded_checkpoint.get(KEY, {}).get("ranks", [])
        plugin.position.restore(ranks[trainer.global_rank % len(ranks)] if ranks else None)
        if ranks:
            _choose_epoch(trainer.fit_loop)


def _choose_epoch(loop: Any) -> None:
    """The state was saved when Lightning had left an epoch: the next begins, unless training was stopped in the middle.

    Lightning itself asks whether ``max_steps`` is set.  If so, it goes back into an epoch that is over: it trains on
    one batch more there, steps the schedulers again and calls ``on_train_epoch_end`` again.  If not, it drops the rest
    of an epoch in which training was stopped.
    """
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    has_left = epochs.current.ready == epochs.current.started == epochs.current.processed
    if not has_left or not batches.current.ready:
        return
    is_over = batches.is_last_batch or batches.current.processed < batches.current.ready  # a step found no batch
    if not is_over:
        for each in (epochs.total, epochs.current):
            each.processed = each.completed = each.started - 1
    _Loop.restarting.fset(loop, not is_over)


def _load_loaders(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    plugin, loader = ours(self.trainer.strategy), self._combined_loader
    if plugin is not None:
        _check_strategy(self.trainer.strategy)
        loader.flattened = plugin.position.of(loader.flattened)
    stock(self, *args, **kwargs)
    if plugin is not None:
        plugin.position.begin()


def _check_strategy(strategy: Any) -> None:
    tried = SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy
    if not isinstance(strategy, tried) or isinstance(strategy, DeepSpeedStrategy):
        raise ConfigError(
            f"CheckpointIO() was not tried with {type(strategy).__name__}, which saves past its plugin, in a format of "
            "its own: give a single device, DDP or ModelParallelStrategy"
        )


def _evaluate(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    plugin = ours(self.trainer.strategy)
    if plugin is None or self.trainer.state.fn != TrainerFn.FITTING:
        return stock(self, *args, **kwargs)
    fence()
    with plugin.position.apart():
        return stock(self, *args, **kwargs)


def _end(stock: Any, self: Any) -> None:
    if ours(self.trainer.strategy) is not None:
        fence()
    stock(self)


# --- names -----------------------------------------------------------------------------------


def _exists(stock: Any, self: Any, filepath: Any, trainer: Any) -> Any:
    plugin = ours(trainer.strategy)
    is_requested = plugin is not None and trainer.is_global_zero and plugin.is_requested(filepath)
    if plugin is not None and trainer.strategy.reduce_boolean_decision(is_requested, all=False):
        return True
    return stock(self, filepath, trainer)


def _link(stock: Any, trainer: Any, filepath: str, linkpath: str) -> None:
    plugin = ours(trainer.strategy)
    if plugin is None or (trainer.is_global_zero and not plugin.link(linkpath, filepath)):
        stock(trainer, filepath, linkpath)  # with a barrier at its end, too
    else:
        trainer.strategy.barrier()


def _find_last(stock: Any, self: Any, trainer: Any) -> Any:
    directory = str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))
    if ours(trainer.strategy) is not None and "://" not in directory:
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
    (_FitLoop, "on_run_end", _end),
    (_EvaluationLoop, "run", _evaluate),
    (ModelCheckpoint, "file_exists", _exists),
    (ModelCheckpoint, "_link_checkpoint", _link),
    (ModelCheckpoint, "_find_last_checkpoints", _find_last),
    (saving, "pl_load", _load),
    (torch_io, "pl_load", _load),
]
