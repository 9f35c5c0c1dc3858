"""Puts the checkpoint engine where DeepSpeed looks for the package ``datastates``."""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

from stillframe.errors import ConfigError
from stillframe.integrations.deepspeed.engine import CheckpointEngine
from stillframe.integrations.pickled import register_deepspeed_types
from stillframe.open_roots import fence
from stillframe.store import directory_address

_tag: contextvars.ContextVar[str | None] = contextvars.ContextVar("_tag", default=None)
"""Of the load under way.  In stage 3 without optimizer states, DeepSpeed 0.19 takes the weights of ``latest``, whatever
the tag."""


def install() -> None:
    """Let DeepSpeed's key ``"datastates_ckpt"`` mean stillframe, in this process.  May be called again.

    Raises: :class:`ConfigError` if the package ``datastates`` is installed: which of the two is meant?
    """
    found = sys.modules.get("datastates") or importlib.util.find_spec("datastates")
    if getattr(found, "CheckpointEngine", None) is CheckpointEngine:
        return
    if found is not None:
        raise ConfigError(
            'the package "datastates" is installed, and DeepSpeed would use it: uninstall it, or do not call install()'
        )
    from deepspeed.runtime import engine as runtime
    from deepspeed.runtime.checkpoint_engine import datastates_checkpoint_engine as place

    engine_type = runtime.DeepSpeedEngine
    register_deepspeed_types()
    stand_in: Any = types.ModuleType("datastates", "stillframe, where DeepSpeed looks for DataStates-LLM.")
    stand_in.CheckpointEngine = CheckpointEngine
    sys.modules["datastates"] = stand_in
    place.DataStatesCheckpointEngine = _wrapper(place.DataStatesCheckpointEngine)
    save_checkpoint, load_checkpoint = engine_type.save_checkpoint, engine_type.load_checkpoint

    @functools.wraps(save_checkpoint)
    def save(self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _engine_of(self)
        if ours is not None and save_dir:
            directory_address(save_dir)  # of a URL DeepSpeed would make a directory "s3:" here, before it asks anybody
        try:
            done = save_checkpoint(self, save_dir, *args, **kwargs)
        except BaseException:
            if ours is not None:
                ours.drop()
            raise
        if ours is not None:
            ours.finish()
        return done

    @functools.wraps(load_checkpoint)
    def load(self: Any, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = _engine_of(self)
        if ours is None:
            return load_checkpoint(self, load_dir, tag, *args, **kwargs)
        ours.settle(load_dir, tag)
        token = _tag.set(tag)
        try:
            return load_checkpoint(self, load_dir, tag, *args, **kwargs)
        finally:
            _tag.reset(token)

    engine_type.save_checkpoint, engine_type.load_checkpoint = save, load
    gathered = runtime.get_fp32_state_dict_from_zero_checkpoint

    @functools.wraps(gathered)
    def gather(checkpoint_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return gathered(checkpoint_dir, tag or _tag.get(), *args, **kwargs)

    runtime.get_fp32_state_dict_from_zero_checkpoint = gather


def _engine_of(engine: Any) -> CheckpointEngine | None:
    found = getattr(engine.checkpoint_engine, "ckpt_engine", None)
    return found if isinstance(found, CheckpointEngine) else None


def _wrapper(base: Any) -> Any:
    """DeepSpeed's wrapper of ``datastates``, which does not pass on tags and fails when it is cleaned up twice."""

    class StillframeCheckpointEngine(base):  # type: ignore[misc]
        def create(self, info: Any) -> None:
            self._try(self.ckpt_engine.create, info)

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            if not self.ckpt_engine.is_of_tag(path):  # a tag's directory appears when it is committed
                self._try(super().makedirs, path, exist_ok)

        def save(self, state_dict: Any, path: str) -> None:
            self._try(self.ckpt_engine.save, state_dict, path)

        def _try(self, work: Callable[..., None], *args: Any) -> None:
            """DeepSpeed's ranks meet in barriers as they save: if one raised, the others would wait there for ever.

            So an error is told in the end, and to every rank.
            """
            try:
                if self.ckpt_engine.error is None:
                    work(*args)
            except Exception as error:
                self.ckpt_engine.error = error

        def get_commit_info(self) -> None:
            """DeepSpeed asks right before an update: it may change state before the hook of the optimizer is called."""
            fence()

        def commit(self, info: Any) -> bool:
            error = self.ckpt_engine.error
            self.ckpt_engine.drop()  # only save_16bit_model comes here, and has written its file
            if error is not None:
                raise error
            return True

        def cleanup(self) -> None:
            if getattr(self, "ckpt_engine", None) is not None:
                self.ckpt_engine.wait()

    return StillframeCheckpointEngine
