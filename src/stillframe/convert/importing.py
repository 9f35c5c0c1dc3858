"""Files of others → a checkpoint: torch.save (never by unpickling objects), safetensors, DCP directories.

The files are mapped where their format allows it, and staged and written by an ordinary save.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from stillframe.checkpointer import Checkpointer
from stillframe.convert.foreign import dcp_errors, refusal
from stillframe.errors import DeadlineError, FormatError, NotFoundError, UnsupportedStateError
from stillframe.format import names
from stillframe.state.torch_internals import load_everything_planner, load_without_ranks, set_element
from stillframe.store import files
from stillframe.untrusted import decode_json

_DCP_INDEX = ".metadata"
_MODEL = "model"
_PART = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What torch.save began its files with before they were zip archives."""
_POLL_S = 0.2


class _Index(msgspec.Struct):
    """What Hugging Face writes beside several files."""

    weight_map: dict[str, str]


def import_state(source: Path, root: Path, step: int, under: str | None, on_bytes: Callable[[int], None]) -> int:
    """Save what a file or directory holds as a step; tells how many bytes.  Blocks until it is committed.

    A plain set of named tensors, as a model's ``state_dict()`` is, goes under ``under`` (``"model"`` if none is given);
    anything nested keeps its shape, unless ``under`` is given.
    Raises: :class:`NotFoundError`, :class:`UnsupportedStateError`, :class:`FormatError`, and whatever a save raises.
    """
    state = read_state(source)
    is_flat = isinstance(state, dict) and all(isinstance(item, torch.Tensor) for item in state.values())
    key = under if under is not None else _MODEL if is_flat else ""
    with Checkpointer(root, rank=0, world_size=1) as checkpointer:
        save = checkpointer.save(step, {key: state} if key else state)
        done = 0
        while save.phase not in ("committed", "failed"):
            with contextlib.suppress(DeadlineError):
                save.wait(timeout_s=_POLL_S)
            on_bytes(save.progress.flushed_bytes - done)
            done = save.progress.flushed_bytes
        save.wait()
        return save.progress.total_bytes


def read_state(source: Path) -> Any:
    """What a file or directory holds."""
    kind = files.kind_of(source)
    if kind == "directory":
        return _read_dcp(source) if _DCP_INDEX in files.names_in(source) else _read_directory(source)
    if kind != "file":
        raise NotFoundError(f"there is no {source}" if kind == "nothing" else f"{source} is not a file")
    return _read_safetensors(source) if source.suffix == ".safetensors" else _read_torch(source)


def _read_directory(source: Path) -> dict[str, torch.Tensor]:
    """The files that an index names, or all there are; nothing may be missing, nothing there twice."""
    entries = files.names_in(source)
    indexes = [source / name for name in entries if name.endswith(".safetensors.index.json")]
    parts = [source / name for name in entries if name.endswith(".safetensors")]
    if any(names.parse_step_dir(name) is not None for name in entries):
        raise NotFoundError(f"{source} is a root of stillframe already: copy the directory, or use `stillframe copy`")
    if len(indexes) > 1 or not parts:
        what = "more than one index" if indexes else f"no *.safetensors, and no {_DCP_INDEX} of DCP's"
        raise NotFoundError(f"there is nothing to import in {source}: {what}; give one file")
    named: dict[str, str] = {}
    if indexes:
        try:
            named = decode_json(files.read_file(indexes[0]), _Index).weight_map
        except ValueError as error:
            raise FormatError(f"{indexes[0]} cannot be read: {error}") from None
        if not named:
            raise FormatError(f"{indexes[0]} names no tensor")
        parts = [source / name for name in sorted(set(named.values()))]
    else:
        _check_parts(parts)
    state: dict[str, torch.Tensor] = {}
    for file in parts:
        if file.name not in entries or file.parent != source:
            raise NotFoundError(f"{indexes[0]} names {file.name}, which is not there")
        found = _read_safetensors(file)
        found = {name: tensor for name, tensor in found.items() if named.get(name, file.name) == file.name}
        if state.keys() & found.keys():
            raise FormatError(
                f"{min(state.keys() & found.keys())!r} is in more than one file of {source}: give one file"
            )
        state.update(found)
    if named.keys() - state.keys():
        raise FormatError(f"{indexes[0]} names {min(named.keys() - state.keys())!r}, which is in none of the files")
    return state


def _check_parts(parts: list[Path]) -> None:
    numbered = [match for part in parts if (match := _PART.search(part.name))]
    for match in numbered:
        if len(numbered) != int(match[2]):
            raise NotFoundError(f"{parts[0].parent} has {len(numbered)} of {int(match[2])} files")


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise FormatError(f"{path} is not a complete safetensors file: {error}") from None


def _read_torch(path: Path) -> Any:
    is_legacy = files.read_file(path, len(_LEGACY)) == _LEGACY
    if not is_legacy and not zipfile.is_zipfile(path):
        raise UnsupportedStateError(
            f"{path} is neither a file of torch.save's nor *.safetensors nor a directory of DCP's"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the errors say
            return torch.load(path, map_location="cpu", mmap=not is_legacy, weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(path, error) from None
    except MemoryError:
        raise
    except Exception as error:  # whatever torch trips over in a damaged file
        raise FormatError(f"{path} is not a complete file of torch.save's: {type(error).__name__}: {error}") from None


def _read_dcp(source: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem

    base = load_everything_planner()

    class Planner(base):  # type: ignore[misc, valid-type]
        """As DCP's own for this purpose, but plain values only: no object is unpickled."""

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            try:
                found = torch.load(value, weights_only=True)
            except pickle.UnpicklingError as error:
                raise refusal(source / name, error) from None
            if self.flatten_state_dict:
                set_element(self.original_state_dict, self.mappings[name], found)
            else:
                self.original_state_dict[name] = found

    state: dict[str, Any] = {}
    with dcp_errors(f"{source} is no whole DCP checkpoint", FormatError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")
        load_without_ranks(state, FileSystemReader(source), Planner())
    _number_parameters(state)
    return state


def _number_parameters(state: Any) -> None:
    """DCP makes text of a dict's keys; an optimizer's own state dict has numbers."""
    if isinstance(state, dict):
        if isinstance(state.get("state"), dict) and "param_groups" in state:
            state["state"] = {int(key) if str(key).isdecimal() else key: item for key, item in state["state"].items()}
        for item in state.values():
            _number_parameters(item)
