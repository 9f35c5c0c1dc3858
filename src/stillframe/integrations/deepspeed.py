"""DeepSpeed on stillframe: one line, before ``deepspeed.initialize``, and the key ``"datastates_ckpt"`` in its config::

    stillframe.integrations.deepspeed.install()

DeepSpeed has a place for the engine of the paper that stillframe realises; this takes it.  A ``save_dir`` is a
stillframe root, each tag a step of it.  ``<save_dir>/<tag>`` and ``latest`` appear when the step is committed; the
files in it that DeepSpeed looks for say where their content lies.

The config: ``host_cache_size`` in GiB (0: as much as one save takes); ``allow_pickle``: store, and load, what only
pickle can hold.  Loading such a checkpoint runs code from it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import json
import os
import pickle
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stillframe
from stillframe.convert.objects import write_object, write_objects
from stillframe.errors import ConfigError, ExistsError, FormatError, NotFoundError, StateError, UnsupportedStateError
from stillframe.integrations.runs import open_run
from stillframe.integrations.still import Still

_KEY = "datastates_ckpt"
_FILES = "files"


class CheckpointEngine:
    """What DeepSpeed hands its files to.  Thread: the training thread's."""

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        config = deepspeed_config.datastates_config.config
        config = dict(config) if isinstance(config, dict) else {}
        size, self._allow_pickle = config.pop("host_cache_size", 0), config.pop("allow_pickle", False)
        if config or isinstance(size, bool) or not isinstance(size, int | float) or size < 0:
            raise ConfigError(
                f'"{_KEY}": {{"host_cache_size": GiB, "allow_pickle": false}} is all there is, not {config or size!r}'
            )
        if not isinstance(self._allow_pickle, bool):
            raise ConfigError(f'"{_KEY}": "allow_pickle" is true or false, not {self._allow_pickle!r}')
        if getattr(deepspeed_config, "use_node_local_storage", False):
            raise ConfigError('"use_node_local_storage": stillframe needs a save_dir that all ranks see')
        self._arena: int | str = int(size * 2**30) or "auto"
        self._still = Still()
        self._info: Any = None
        self._files: dict[str, Any] = {}
        self._save: stillframe.Save | None = None
        self._tags: set[str] = set()

    def create(self, info: Any) -> None:
        """A checkpoint begins: DeepSpeed will hand over the files of this rank, perhaps none."""
        self.finish()
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

    def finish(self, is_checkpoint: bool = True) -> None:
        """This rank has handed over everything: request the save.  Does nothing if there is nothing begun.

        Raises, on every rank if on one: the error of the save before; :class:`ExistsError`; :class:`ConfigError`;
        :class:`UnsupportedStateError`.
        """
        info, self._info = self._info, None
        files, self._files = self._files, {}
        if info is None or not is_checkpoint:
            return
        run = open_run(info.save_dir, dist.get_rank(), dist.get_world_size(), self._arena)
        run.checkpointer.fence()
        step = _step_of(info.tag, run.next_step)
        with _together():
            label = self._label(info, files, step)
            state = {"tag": info.tag, _FILES: self._still.state(files, self._leaf)}
        self._save = run.checkpointer.save(run.take_step(step), state, label=label)
        self._tags.add(os.path.join(info.save_dir, info.tag))

    def _label(self, info: Any, files: Mapping[str, Any], step: int) -> stillframe.Label:
        tag, directory = info.tag, os.path.join(info.save_dir, info.tag)
        if self._save is not None and self._save.error is not None:
            failed, self._save = self._save.error, None
            raise type(failed)(f"the checkpoint before {tag!r} was not saved: {failed}") from failed
        if directory in self._tags or os.path.lexists(directory):
            raise ExistsError(f"the tag {tag!r} exists in {info.save_dir}: choose another, or remove {directory} first")
        return stillframe.Label(tag, tuple(files), _pointer(step, dist.get_rank()), is_latest=bool(info.save_latest))

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved as this file, verified."""
        step, rank = _follow(path)
        root, name = os.path.dirname(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
        state = stillframe.load(root, step, only=f"{_FILES}/{name}", rank=rank, merge=False)[_FILES][name]
        device = torch.device(map_location) if isinstance(map_location, str | torch.device) else torch.device("cpu")
        return self._unpickled(state, name, device)

    def wait(self, persist: bool = True) -> None:
        """Until the last save is committed.  Raises: its error."""
        self.finish()
        if self._save is not None:
            self._save.wait("committed" if persist else "staged")

    def _leaf(self, path: tuple[Any, ...], value: Any) -> Any:
        if stillframe.storable(value):
            return copy.deepcopy(value)
        where, kind = "/".join(map(str, path)), f"{type(value).__module__}.{type(value).__qualname__}"
        if not self._allow_pickle:
            raise UnsupportedStateError(
                f"{where} is a {kind}, which only pickle can hold: leave it out, or put "
                f'"allow_pickle": true into "{_KEY}" (loading the checkpoint will then run code from it)'
            )
        return Pickled(pickle.dumps(value), where, kind)

    def _unpickled(self, node: Any, where: str, device: torch.device) -> Any:
        if isinstance(node, torch.Tensor):
            return node.to(device)
        if isinstance(node, dict):
            items = [(key, self._unpickled(item, f"{where}/{key}", device)) for key, item in node.items()]
            return type(node)(items)
        if type(node) in (list, tuple):
            return type(node)(self._unpickled(item, f"{where}/{at}", device) for at, item in enumerate(node))
        if isinstance(node, Pickled):
            if not self._allow_pickle:
                raise UnsupportedStateError(
                    f"{where} is a {node.kind} that was pickled: to run what the checkpoint says, put "
                    f'"allow_pickle": true into "{_KEY}"'
                )
            return pickle.loads(node.data)
        return node


class Pickled:
    """The marked record of something that only pickle can hold."""

    def __init__(self, data: bytes, where: str, kind: str) -> None:
        self.data, self.where, self.kind = data, where, kind


def export(
    save_dir: str | os.PathLike[str], tag: str | None, to: str | os.PathLike[str], *, allow_pickle: bool = False
) -> str:
    """Write a tag (the latest if none is given) as DeepSpeed itself would, to ``<to>/<tag>``, for ``zero_to_fp32``,
    ``ds_to_universal`` and engines without stillframe.  One file at a time is in memory.

    Raises: :class:`NotFoundError`; :class:`ExistsError`; :class:`IntegrityError`; :class:`UnsupportedStateError`.
    """
    if tag is None:
        latest = Path(save_dir, "latest")
        if not latest.exists():
            raise NotFoundError(f"there is no file 'latest' in {save_dir}: give a tag")
        tag = latest.read_text().strip()
    directory = Path(save_dir, tag)
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    if not names:
        raise NotFoundError(f"{directory} is no tag of a checkpoint")
    config = types.SimpleNamespace(config={"allow_pickle": allow_pickle})
    engine = CheckpointEngine(types.SimpleNamespace(datastates_config=config), 0)
    files = {name: functools.partial(engine.load, str(directory / name)) for name in names}
    write_objects(Path(to, tag), files)
    return tag


def install() -> None:
    """Let DeepSpeed's key ``"datastates_ckpt"`` mean stillframe, in this process.  May be called again.

    Raises: :class:`ConfigError` if the package ``datastates`` is installed: which of the two is meant?
    """
    found = sys.modules.get("datastates") or importlib.util.find_spec("datastates")
    if found is not None and getattr(found, "CheckpointEngine", None) is not CheckpointEngine:
        raise ConfigError(
            'the package "datastates" is installed, and DeepSpeed would use it: uninstall it, or do not call install()'
        )
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.checkpoint_engine import datastates_checkpoint_engine as place
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    if found is not None:
        return
    stand_in = types.ModuleType("datastates", "stillframe, in the place where DeepSpeed looks for DataStates-LLM.")
    stand_in.CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]
    sys.modules["datastates"] = stand_in
    for kind in (LossScaler, DynamicLossScaler, fragment_address, SubparamShape):
        stillframe.register_leaf(kind, f"deepspeed.{kind.__name__}", _attributes, functools.partial(_with, kind))
    place.DataStatesCheckpointEngine = _wrapper(place.DataStatesCheckpointEngine)
    original = DeepSpeedEngine.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What has been saved is there to be loaded, on every rank."""
        if isinstance(getattr(self.checkpoint_engine, "ckpt_engine", None), CheckpointEngine):
            self.checkpoint_engine.ckpt_engine.wait()
            dist.barrier()
        return original(self, *args, **kwargs)

    DeepSpeedEngine.load_checkpoint = load_checkpoint


def _wrapper(base: Any) -> Any:
    """DeepSpeed's wrapper of the ``datastates`` package, which says nothing to it of tags and of the end of a save,
    writes no ``latest``, and cannot be cleaned up twice."""

    class StillframeCheckpointEngine(base):  # type: ignore[misc]
        def create(self, info: Any) -> None:
            self.ckpt_engine.create(info)

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            if not self.ckpt_engine.is_of_tag(path):  # a tag's directory appears when it is committed
                super().makedirs(path, exist_ok=exist_ok)

        def is_decoupled(self) -> bool:
            """DeepSpeed asks when a rank has handed over its last file, before an update, and at the end."""
            self.ckpt_engine.finish()
            return True

        def commit(self, info: Any) -> bool:
            self.ckpt_engine.finish(is_checkpoint=False)  # only save_16bit_model comes here, and has written its file
            return True

        def cleanup(self) -> None:
            if getattr(self, "ckpt_engine", None) is not None:
                self.ckpt_engine.wait()

    return StillframeCheckpointEngine


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """If it fails on one rank it fails on all: the others would wait for it in DeepSpeed's next barrier."""
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


def _step_of(tag: str, least: int) -> int:
    """The number at a tag's end, as in ``global_step100``, if no step has reached it; else the next."""
    found = re.search(r"(\d{1,11})$", tag)
    return max(int(found[1]), least) if found else least


def _pointer(step: int, rank: int) -> bytes:
    """What a file of a tag holds: where its content is, after a pickle for others that tells them so."""
    where = json.dumps({"stillframe": 1, "step": step, "rank": rank})
    return pickle.dumps(_Elsewhere()) + b"\n" + where.encode()


class _Elsewhere:
    """Whoever unpickles it with ``torch.load`` gets an error that says what to do."""

    def __reduce__(self) -> Any:
        return only_through_stillframe, ()


def only_through_stillframe() -> None:
    raise FormatError(
        "this file belongs to a checkpoint of stillframe: put "
        f'"{_KEY}": {{}} into the DeepSpeed config and call stillframe.integrations.deepspeed.install(), or write '
        "DeepSpeed's own files with stillframe.integrations.deepspeed.export(save_dir, tag, to)"
    )


def _follow(path: str) -> tuple[int, int]:
    try:
        data = Path(path).read_bytes()[-200:]
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}; is a rank's file missing?") from error
    try:
        where = json.loads(data.rpartition(b"\n")[2])
        return int(where["step"]), int(where["rank"])
    except (ValueError, TypeError, LookupError):
        raise FormatError(
            f"{path} was not written by stillframe; if it is DeepSpeed's own, load it once without "
            f'"{_KEY}" in the config, and save it with it'
        ) from None


def _attributes(value: Any) -> dict[str, Any]:
    return dict(vars(value))


def _with(kind: Any, attributes: Mapping[str, Any]) -> Any:
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


for _kind in (argparse.Namespace, types.SimpleNamespace):
    stillframe.register_leaf(_kind, f"namespace.{_kind.__name__}", _attributes, functools.partial(_with, _kind))
stillframe.register_leaf(
    Pickled,
    "pickle",
    lambda value: [torch.frombuffer(bytearray(value.data), dtype=torch.uint8), value.where, value.kind],
    lambda parts: Pickled(parts[0].numpy().tobytes(), parts[1], parts[2]),
)
