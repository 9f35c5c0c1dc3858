"""``ModelParallelStrategy``, of a ``Trainer`` and of a ``Fabric``: FSDP2, tensor parallelism, or both.

Lightning copies the state to the host and writes it with torch.distributed.checkpoint, past its own plugins.  With our
plugin every rank saves the DTensors that it holds, in place, and restores them in place.  What else is in the dict each
rank saves for itself.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
from lightning.fabric.utilities.load import _move_state_into
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy

from stillframe.errors import ConfigError

_SHARDED = ("optimizer_states", "state_dict")


def ours(strategy: Any) -> Any:
    """The plugin of a strategy, if it is ours."""
    from stillframe.integrations.lightning.checkpoint_io import CheckpointIO

    plugin = getattr(strategy, "_checkpoint_io", None)
    return plugin if isinstance(plugin, CheckpointIO) else None


# --- of a Trainer ----------------------------------------------------------------------------


def model_state(stock: Any, self: Any) -> Any:
    return stock(self) if ours(self) is None else ParallelStrategy.lightning_module_state_dict(self)


def optimizer_state(stock: Any, self: Any, optimizer: Any) -> Any:
    return stock(self, optimizer) if ours(self) is None else ParallelStrategy.optimizer_state(self, optimizer)


def save(stock: Any, self: Any, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
    plugin = ours(self)
    if plugin is None or storage_options is not None:
        stock(self, checkpoint, filepath, storage_options)
    else:
        plugin.save_together(checkpoint, self.broadcast(filepath), _SHARDED)


def load(stock: Any, self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
    plugin, path, rest = ours(self), self.broadcast(checkpoint_path), None
    if plugin is not None:
        live = {"state_dict": self.lightning_module, "optimizer_states": self.optimizers or None}
        rest = plugin.restore(path, live, self.lightning_module.strict_loading, weights_only)
    return stock(self, path, weights_only) if rest is None else rest


def teardown(stock: Any, self: Any) -> None:
    stock(self)
    if ours(self) is not None:
        self._checkpoint_io.teardown()


# --- of a Fabric -----------------------------------------------------------------------------


def plugin_of(stock: property) -> property:
    """Lightning's own is an error: it takes no plugin."""

    def get(self: Any) -> Any:
        return ours(self) or stock.__get__(self)

    def put(self: Any, plugin: Any) -> None:
        self._checkpoint_io, before = plugin, self._checkpoint_io
        if ours(self) is None:
            self._checkpoint_io = before
            stock.__set__(self, plugin)

    return property(get, put)


def fabric_save(stock: Any, self: Any, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
    plugin = ours(self)
    if plugin is None or storage_options is not None:
        stock(self, path, state, storage_options, filter)
    else:
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        plugin.save_together(converted, self.broadcast(path), list(_live(state)))


def fabric_load(
    stock: Any, self: Any, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
) -> Any:
    plugin, path = ours(self), self.broadcast(path)
    if plugin is None:
        return stock(self, path, state, strict, weights_only=weights_only)
    if not state:
        return plugin.load_checkpoint(path, weights_only=weights_only)
    if not isinstance(state, dict):
        if plugin.find(path) is not None:
            raise ConfigError(
                f"{path}: load_raw() reads Lightning's own files; use fabric.load(path, {{'model': model}})"
            )
        return stock(self, path, state, strict, weights_only=weights_only)
    rest = plugin.restore(path, _live(state), strict, weights_only)
    if rest is None:
        return stock(self, path, state, strict, weights_only=weights_only)
    others = state.keys() - _live(state).keys()
    _validate_keys_for_strict_loading(others, rest.keys(), strict=strict)
    _move_state_into(source=rest, destination=state, keys=others)
    return rest


def _live(state: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in state.items() if isinstance(each, torch.nn.Module | torch.optim.Optimizer)}


HOOKS: list[tuple[Any, str, Any]] = [
    (ModelParallelStrategy, "lightning_module_state_dict", model_state),
    (ModelParallelStrategy, "optimizer_state", optimizer_state),
    (ModelParallelStrategy, "save_checkpoint", save),
    (ModelParallelStrategy, "load_checkpoint", load),
    (ModelParallelStrategy, "teardown", teardown),
    (FabricStrategy, "checkpoint_io", plugin_of),
    (FabricStrategy, "save_checkpoint", fabric_save),
    (FabricStrategy, "load_checkpoint", fabric_load),
]
