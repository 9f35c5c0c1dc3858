"""DeepSpeed on stillframe: one line, before ``deepspeed.initialize``, and the key ``"datastates_ckpt"`` in its config::

    stillframe.integrations.deepspeed.install()

DeepSpeed has a place for the engine of the paper that stillframe realises; this takes it.  A ``save_dir`` is a
stillframe root, each tag a step of it.  ``<save_dir>/<tag>`` and ``latest`` appear when the step is committed; the
files in it that DeepSpeed looks for say where their content lies.

The config: ``host_cache_size``, GiB of host memory at most (0: what one save takes); ``keep_last``, how many tags stay
(0: all); ``allow_pickle``: store, and load, what only pickle can hold.  Loading such a checkpoint runs code from it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stillframe
from stillframe.convert.objects import write_object, write_objects, write_text
from stillframe.errors import BusyError, ConfigError, ExistsError, NotFoundError, StateError, StillframeError
from stillframe.integrations.pickled import from_leaves, register_attributes, to_leaf
from stillframe.integrations.pointers import follow, pointer
from stillframe.integrations.runs import Run, open_run, seat

logger = logging.getLogger("stillframe")

_KEY = "datastates_ckpt"
_ALLOW = f'put "allow_pickle": true into "{_KEY}" of the DeepSpeed config'
_FILES = "files"


class CheckpointEngine:
    """What DeepSpeed hands its files to.  Thread: the training thread's."""

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        config = deepspeed_config.datastates_config.config
        known = {"host_cache_size": 0, "keep_last": 0, "allow_pickle": False}
        given = {**known, **(config if isinstance(config, dict) else {})}
        size, count, self._allow_pickle = (given[name] for name in known)
        is_right = type(size) in (int, float) and size >= 0 and type(count) is int and count >= 0
        if not is_right or not isinstance(self._allow_pickle, bool) or given.keys() != known.keys():
            raise ConfigError(f'"{_KEY}": {config!r}: give "host_cache_size" (GiB), "keep_last", "allow_pickle"')
        if getattr(deepspeed_config, "use_node_local_storage", False):
            raise ConfigError('"use_node_local_storage": stillframe needs a save_dir that all ranks see')
        arena = f"auto:{int(size * 2**20)}KiB" if size else "auto"
        self._how: Any = arena, stillframe.KeepLast(count) if count else None
        self._info: Any = None
        self._files: dict[str, Any] = {}
        self._run: Run | None = None
        self._saves: dict[str, stillframe.Save] = {}
        """Those that nobody has been told of yet, by their directory."""

    def create(self, info: Any) -> None:
        """A checkpoint begins: DeepSpeed will hand over the files of this rank, perhaps none."""
        self._info, self._files = info, {}

    def save(self, state_dict: Any, path: str) -> None:
        """A file of the tag that was begun; any other (of ``save_16bit_model``) is one of ``torch.save``, at once."""
        if self.is_of_tag(os.path.dirname(path)):
            self._files[os.path.basename(path)] = state_dict
        else:
            write_object(path, state_dict)

    def is_of_tag(self, directory: str) -> bool:
        info = self._info
        return info is not None and os.path.abspath(directory) == os.path.abspath(os.path.join(info.save_dir, info.tag))

    def drop(self) -> None:
        """What was begun will not be saved."""
        self._info, self._files = None, {}

    def finish(self) -> None:
        """Every rank has handed over everything: request the save.

        Raises, on every rank if on one: the error of a save before; :class:`ExistsError`; :class:`ConfigError`;
        :class:`UnsupportedStateError`.
        """
        info, files = self._info, self._files
        self.drop()
        directory = os.path.abspath(os.path.join(info.save_dir, info.tag))
        run = self._run = open_run(info.save_dir, *seat(), *self._how)
        run.checkpointer.fence()  # the copies of the state before have been copied away
        step = run.take_step(least=_number(info.tag))
        with _together():
            self._tell_failure()
            label = stillframe.Label(info.tag, tuple(files), pointer(step, run.seat[0]), bool(info.save_latest))
            if directory in self._saves or os.path.lexists(directory):
                raise ExistsError(
                    f"the tag {info.tag!r} exists, or is being saved: choose another, or remove {directory}"
                )
            state = {"tag": info.tag, _FILES: run.still.state(files, self._leaf)}
        with _together():  # of its own: a rank that saved would wait for the commit of one that could not even try
            save = run.save(step, state, label)
        self._saves[directory] = save

    def _leaf(self, path: tuple[Any, ...], value: Any) -> Any:
        return to_leaf(path, value, self._allow_pickle, _ALLOW)

    def _tell_failure(self) -> None:
        """Raises the error of the first save that failed, once; forgets those that are committed."""
        for directory, save in list(self._saves.items()):
            if save.phase == "committed" or save.error is not None:
                del self._saves[directory]
            if save.error is not None:
                raise type(save.error)(f"{directory} was not saved: {save.error}") from save.error

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved as this file, verified."""
        step, rank = follow(path)
        root, name = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
        state = stillframe.load(root, step, only=f"{_FILES}/{name}", rank=rank, merge=False)[_FILES][name]
        device = torch.device(map_location) if isinstance(map_location, str | torch.device) else torch.device("cpu")
        return from_leaves(state, device, self._allow_pickle, _ALLOW, (name,))

    def wait(self, persist: bool = True) -> None:
        """Until everything is committed.  Raises: the error of a save that failed, once."""
        for save in self._saves.values():
            with contextlib.suppress(StillframeError):
                save.wait("committed" if persist else "staged")
        self._tell_failure()

    def fence(self) -> None:
        """Before an update, and earlier than the optimizer's own hook: DeepSpeed may change its state before."""
        if self._run is not None:
            self._run.checkpointer.fence()

    def settle(self, directory: str) -> None:
        """Before a load: what was saved there, also by a run that was just killed, is there, on every rank."""
        try:
            self.wait()
        except StillframeError as error:
            logger.warning("%s", error)
        is_root = [os.path.isdir(directory) and bool(stillframe.Catalog(directory).step_dirs())]
        dist.broadcast_object_list(is_root)
        if is_root[0]:
            with contextlib.suppress(BusyError):  # another run trains there: its keepers are alive, and publish
                open_run(directory, *seat(), *self._how)
        dist.barrier()


def export(
    save_dir: str | os.PathLike[str], tag: str | None, to: str | os.PathLike[str], *, allow_pickle: bool = False
) -> str:
    """Write a tag (the latest if none is given) as DeepSpeed itself would, to ``<to>/<tag>`` with ``<to>/latest``, for
    ``zero_to_fp32``, ``ds_to_universal`` and engines without stillframe.  One file at a time is in memory.

    Raises: :class:`NotFoundError`; :class:`ExistsError`; :class:`IntegrityError`; :class:`UnsupportedStateError`.
    """
    _register()
    if tag is None:
        latest = Path(save_dir, "latest")
        if not latest.exists():
            raise NotFoundError(f"there is no file 'latest' in {save_dir}: give a tag")
        tag = latest.read_text().strip()
    directory = Path(save_dir, tag)
    names = sorted(each.name for each in directory.glob("*.pt"))
    if not names:
        raise NotFoundError(f"{directory} is no tag of a checkpoint")
    config = types.SimpleNamespace(config={"allow_pickle": allow_pickle})
    engine = CheckpointEngine(types.SimpleNamespace(datastates_config=config), 0)
    write_objects(Path(to, tag), {name: functools.partial(engine.load, str(directory / name)) for name in names})
    write_text(Path(to, "latest"), tag)
    return tag


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

    _register()
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


def _register() -> None:
    """What DeepSpeed itself puts into its dicts."""
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    for kind in (LossScaler, DynamicLossScaler, fragment_address, SubparamShape):
        register_attributes(kind, f"deepspeed.{kind.__name__}")


def _wrapper(base: Any) -> Any:
    """DeepSpeed's wrapper of the ``datastates`` package tells it nothing of tags, and cannot be cleaned up twice."""

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


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """If it fails on one rank it fails on all: else the others would train on, and wait for it in a collective."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    for rank, word in enumerate(said):
        if word is not None:
            raise StateError(f"rank {rank} could not save: {word}")


def _number(tag: str) -> int:
    """The number at a tag's end, as in ``global_step100``: its step, if none has come so far yet."""
    found = re.search(r"(\d{1,11})$", tag)
    return int(found[1]) if found else 0
