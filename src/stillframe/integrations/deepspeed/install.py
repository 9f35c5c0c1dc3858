"""Puts the checkpoint engine where DeepSpeed looks for the package ``datastates``."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from typing import Any

from stillframe.errors import ConfigError
from stillframe.integrations.deepspeed.engine import CheckpointEngine
from stillframe.integrations.deepspeed.pickled import register_deepspeed_types


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
    from deepspeed.runtime.checkpoint_engine import datastates_checkpoint_engine as place
    from deepspeed.runtime.engine import DeepSpeedEngine

    register_deepspeed_types()
    stand_in: Any = types.ModuleType("datastates", "stillframe, where DeepSpeed looks for DataStates-LLM.")
    stand_in.CheckpointEngine = CheckpointEngine
    sys.modules["datastates"] = stand_in
    place.DataStatesCheckpointEngine = _wrapper(place.DataStatesCheckpointEngine)
    save_checkpoint, load_checkpoint = DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint

    @functools.wraps(save_checkpoint)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _engine_of(self)
        try:
            done = save_checkpoint(self, *args, **kwargs)
        except BaseException:
            if ours is not None:
                ours.drop()
            raise
        if ours is not None:
            ours.finish()
        return done

    @functools.wraps(load_checkpoint)
    def load(self: Any, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _engine_of(self)
        if ours is not None:
            ours.settle(load_dir)
        return load_checkpoint(self, load_dir, *args, **kwargs)

    DeepSpeedEngine.save_checkpoint, DeepSpeedEngine.load_checkpoint = save, load


def _engine_of(engine: Any) -> CheckpointEngine | None:
    found = getattr(engine.checkpoint_engine, "ckpt_engine", None)
    return found if isinstance(found, CheckpointEngine) else None


def _wrapper(base: Any) -> Any:
    """DeepSpeed's wrapper of ``datastates``, which does not pass on tags and fails when it is cleaned up twice."""

    class StillframeCheckpointEngine(base):  # type: ignore[misc]
        def create(self, info: Any) -> None:
            self.ckpt_engine.create(info)

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            if not self.ckpt_engine.is_of_tag(path):  # a tag's directory appears when it is committed
                super().makedirs(path, exist_ok=exist_ok)

        def get_commit_info(self) -> None:
            """DeepSpeed asks right before an update."""
            self.ckpt_engine.fence()

        def commit(self, info: Any) -> bool:
            self.ckpt_engine.drop()  # only save_16bit_model comes here, and has written its file
            return True

        def cleanup(self) -> None:
            if getattr(self, "ckpt_engine", None) is not None:
                self.ckpt_engine.wait()

    return StillframeCheckpointEngine
