"""Puts the checkpoint engine where DeepSpeed has its own one for the package ``datastates``."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from stillframe.errors import ConfigError
from stillframe.integrations.deepspeed.engine import CheckpointEngine
from stillframe.integrations.pickled import register_deepspeed_types
from stillframe.store import directory_address


def install() -> None:
    """Let DeepSpeed's key ``"datastates_ckpt"`` mean stillframe, in this process.  May be called again.

    Raises: :class:`ConfigError` if the package ``datastates`` is installed: which of the two is meant?
    """
    if "datastates" in sys.modules or importlib.util.find_spec("datastates") is not None:
        raise ConfigError(
            'the package "datastates" is installed, and DeepSpeed would use it: uninstall it, or do not call install()'
        )
    from deepspeed.runtime import engine as runtime
    from deepspeed.runtime.checkpoint_engine import datastates_checkpoint_engine as place
    from deepspeed.utils import zero_to_fp32

    engine_type, stock = runtime.DeepSpeedEngine, place.DataStatesCheckpointEngine
    if issubclass(stock, CheckpointEngine):
        return
    register_deepspeed_types()
    place.DataStatesCheckpointEngine = _among_ranks(stock)
    save_checkpoint, load_checkpoint = engine_type.save_checkpoint, engine_type.load_checkpoint
    gathered = runtime.get_fp32_state_dict_from_zero_checkpoint

    @functools.wraps(save_checkpoint)
    def save(self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.checkpoint_engine
        if not isinstance(ours, CheckpointEngine):
            return save_checkpoint(self, save_dir, *args, **kwargs)
        directory_address(save_dir)  # of a URL DeepSpeed would make a directory "s3:" here, before it asks anybody
        try:
            done = save_checkpoint(self, save_dir, *args, **kwargs)
        except BaseException:
            ours.drop()
            raise
        ours.finish()
        return done

    @functools.wraps(load_checkpoint)
    def load(self: Any, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = self.checkpoint_engine
        if not isinstance(ours, CheckpointEngine):
            return load_checkpoint(self, load_dir, tag, *args, **kwargs)
        ours.settle(load_dir, tag, self.load_universal_checkpoint())
        # In stage 3 without optimizer states, DeepSpeed 0.19 takes the weights of ``latest``, whatever the tag, and
        # unpickles its files by itself.
        read = {"load": lambda path, map_location=None, **_: ours.load(path, map_location)}
        try:
            runtime.get_fp32_state_dict_from_zero_checkpoint = functools.partial(gathered, tag=tag)
            zero_to_fp32.torch = types.SimpleNamespace(**{**vars(torch), **read})
            return load_checkpoint(self, load_dir, tag, *args, **kwargs)
        finally:
            runtime.get_fp32_state_dict_from_zero_checkpoint, zero_to_fp32.torch = gathered, torch

    engine_type.save_checkpoint, engine_type.load_checkpoint = save, load


def _among_ranks(stock: Any) -> Any:
    """DeepSpeed's ranks meet in barriers as they save: if one raised, the others would wait there for ever.

    So an error is told in the end, and to every rank.
    """

    class StillframeCheckpointEngine(CheckpointEngine, stock):  # type: ignore[misc]
        def create(self, info: Any) -> None:
            self.info = info  # :meth:`finish` needs it, to tell an error
            self._try(super().create, info)

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            if not self.is_of_tag(path):  # a tag's directory appears when it is committed
                self._try(super().makedirs, path, exist_ok)

        def save(self, state_dict: Any, path: str) -> None:
            self._try(super().save, state_dict, path)

        def __del__(self) -> None:
            """DeepSpeed's own waits, also when the interpreter ends, where nobody would end that wait."""

        def _try(self, work: Callable[..., None], *args: Any) -> None:
            try:
                if self.error is None:
                    work(*args)
            except Exception as error:
                self.error = error

    return StillframeCheckpointEngine
