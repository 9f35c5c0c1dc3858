"""Checkpoint → files that others read."""

from __future__ import annotations

import io
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from stillframe.checkpoint.contents import Entry
from stillframe.checkpoint.stored import Located, Stored
from stillframe.convert.choose import Choice, Named, check_names
from stillframe.convert.foreign import dcp_errors, refused_by_torch
from stillframe.errors import ConfigError
from stillframe.format.segment import ITEM_BYTES, Shard, encode_header
from stillframe.format.tree import LeafNode
from stillframe.restoring.load import Builder, Later, pull
from stillframe.restoring.place import Placement
from stillframe.state.boxes import Box
from stillframe.state.torch_internals import fake_tensors, storage_identity
from stillframe.store import files

_INDEX = "model.safetensors.index.json"
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    files: list[Path]
    tensors: int
    bytes: int


def to_safetensors(stored: Stored, choice: Choice, to: Path, max_bytes: int, on_bytes: OnBytes) -> Exported:
    """One file if ``to`` is named ``*.safetensors``, else a directory as Hugging Face lays it out, with an index if
    there are several files.

    Raises: :class:`ExistsError` if it is there; :class:`IntegrityError`; :class:`StorageError`.
    """
    tensors = choice.tensors
    if not tensors:
        raise ConfigError("there is no tensor to export")
    check_names(tensors)
    _check_filled(stored, tensors)
    size = sum(_bytes(each.entry) for each in tensors)
    if to.suffix == ".safetensors":
        with files.publishing(to) as partial:
            _fill_safetensors(stored, tensors, partial, on_bytes)
        return Exported([to], len(tensors), size)
    groups = _split(tensors, max_bytes)
    names = [f"model-{at:05d}-of-{len(groups):05d}.safetensors" for at in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    with files.publishing(to) as partial:
        files.make_directory(partial)
        for name, group in zip(names, groups, strict=True):
            _fill_safetensors(stored, group, partial / name, on_bytes)
        if len(groups) > 1:
            where = {each.name: name for name, group in zip(names, groups, strict=True) for each in group}
            index = {"metadata": {"total_size": size}, "weight_map": where}
            files.write_file(partial / _INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2))
            names.append(_INDEX)
    return Exported([to / name for name in names], len(tensors), size)


def _check_filled(stored: Stored, tensors: Sequence[Named]) -> None:
    """Before room is reserved for them."""
    placement = Placement(stored)
    for each in tensors:
        placement.check_filled(each.entry.leaf)


def _split(tensors: Sequence[Named], max_bytes: int) -> list[list[Named]]:
    groups: list[list[Named]] = []
    size = 0
    for each in tensors:
        if not groups or size + _bytes(each.entry) > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += _bytes(each.entry)
    return groups


def _bytes(entry: Entry) -> int:
    return torch.Size(entry.shape).numel() * ITEM_BYTES[entry.dtype]


def _fill_safetensors(stored: Stored, group: Sequence[Named], path: Path, on_bytes: OnBytes) -> None:
    """A file of the right size, mapped, and filled by the reader of a restore."""
    ordered = sorted(group, key=lambda each: -ITEM_BYTES[each.entry.dtype])
    shards: list[Shard] = []
    at = 0
    for each in ordered:
        shards.append(Shard(each.name, each.entry.dtype, each.entry.shape, at, at + _bytes(each.entry)))
        at = shards[-1].end
    header = encode_header(shards, {})
    memory = files.mapped(path, len(header) + at)
    memory[: len(header)] = header
    placement = Placement(stored)
    for each, shard in zip(ordered, shards, strict=True):
        if shard.nbytes:
            leaf = each.entry.leaf
            dtype, shape = placement.form(leaf)
            count, begin = torch.Size(shape).numel(), len(header) + shard.start
            placement.add(leaf, torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape), "")
    placement.fill(on_bytes)


def to_torch(stored: Stored, choice: Choice, to: Path, on_bytes: OnBytes) -> Exported:
    """A file that ``torch.load(path, weights_only=True)`` reads.

    It is laid out from tensors without data, then mapped, and filled by the reader of a restore.
    Raises: as :func:`to_safetensors`; :class:`UnsupportedStateError` for values that it would not read.
    """
    _check_filled(stored, choice.tensors)
    with fake_tensors():
        outline = _Unread(stored)
        state = _Plain(stored, outline).whole(choice.top)()
    bases = {storage_identity(base): (leaf, base) for leaf, base in outline.fresh_tensors()}
    with files.publishing(to) as partial, refused_by_torch(to):
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, partial)
        files.mapped(partial).close()  # its room is reserved
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            written = torch.load(partial, mmap=True, weights_only=True)
        filling = Placement(stored)
        done: set[int] = set()
        for reserved, into in _tensor_pairs(state, written):
            storage = storage_identity(reserved)
            if reserved.numel() and storage not in done:
                done.add(storage)
                leaf, base = bases[storage]
                whole = torch.empty(0, dtype=base.dtype).set_(into.untyped_storage(), 0, base.shape, base.stride())
                filling.add(leaf, whole, "")
        filling.fill(on_bytes)
        size = filling.nbytes
        del written, filling
    return Exported([to], len(choice.tensors), size)


def to_dcp(stored: Stored, choice: Choice, to: Path, on_bytes: OnBytes) -> Exported:
    """A directory that ``torch.distributed.checkpoint.load`` reads.

    Raises: as :func:`to_safetensors`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    described = _Described(stored)
    state = _Plain(stored, described).whole(choice.top)()
    check_names(choice.leaves)
    if not isinstance(state, dict):
        raise ConfigError("a DCP checkpoint is a dict; give --key a dict, or choose another format")
    planner = _planner(stored, described, on_bytes)
    with files.publishing(to) as partial, dcp_errors(f"exporting to {to}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")
        save(state, storage_writer=FileSystemWriter(partial), planner=planner, no_dist=True)
    return Exported([to], len(choice.tensors), sum(_bytes(each.entry) for each in choice.tensors))


class _Plain(Builder):
    """Builds what any reader knows: a numpy array or number becomes torch's or Python's, a registered leaf what it was
    encoded as, a path its text."""

    def value(self, leaf: Located) -> Any:
        value = super().value(leaf)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        is_numpy = type(value).__module__ == "numpy" and hasattr(value, "item")
        return value.item() if is_numpy else value

    def array(self, leaf: Located) -> Later:
        tensor = self._placement.fresh(leaf)
        return lambda: tensor

    def decoded(self, node: LeafNode, item: Later, path: tuple[Any, ...]) -> Later:
        return item


class _Unread(Placement):
    """Makes new tensors, and plans no reading."""

    def _fetch(self, leaf: Located, box: Box, into: torch.Tensor) -> None:
        pass


class _Described(Placement):
    """Makes tensors without data, one for each leaf, and knows what each stands for."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        self.leaves: list[Located] = []
        self.numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def fresh(
        self, leaf: Located, device: torch.device | None = None, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        dtype, shape = self.form(leaf)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._alive.append(tensor)
        self.numbers[id(tensor)] = len(self.leaves)
        self.leaves.append(leaf)
        return tensor


def _planner(stored: Stored, described: _Described, on_bytes: OnBytes) -> Any:
    """DCP's own planner, which gets each tensor's bytes when it comes to write them.

    In order they are read ahead, many small ones together; one that is asked for out of order is read alone.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    leaves = described.leaves
    ahead, coming = 0, pull(stored, leaves)

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            nonlocal ahead
            if write_item.type == WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            number = described.numbers[id(self.lookup_object(write_item.index))]
            if number == ahead:
                tensor = next(coming)
                ahead += 1
            else:
                tensor = next(pull(stored, leaves[number : number + 1]))
            on_bytes(tensor.nbytes)
            return tensor

    return Planner()


def _tensor_pairs(one: Any, other: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(one, torch.Tensor):
        yield one, other
    elif isinstance(one, dict):
        for key in one:
            yield from _tensor_pairs(one[key], other[key])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            yield from _tensor_pairs(a, b)
