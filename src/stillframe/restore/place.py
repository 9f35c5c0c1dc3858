"""Placing: which live tensors each shard's bytes go to, straight from the verified chunk.

No second copy of the state is made: a chunk's bytes go from the read buffer into the tensors.  Only a
tensor that is a strided view of a shard, or that maps several items to one address, takes a detour.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import mmap

import torch

from stillframe.catalog import Checkpoint
from stillframe.errors import FormatError
from stillframe.format.segment import Shard
from stillframe.format.tree import TensorNode, View
from stillframe.restore.read import read_chunks
from stillframe.stage.copies import pieces
from stillframe.stage.device import is_plain
from stillframe.stage.leaves import DTYPES, byte_extent


class Placement:
    """Collects destinations, then fills them in one pass over the segment."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._shards = checkpoint.seal.shards
        self._starts = [shard.start for shard in self._shards]
        self._into: dict[int, list[torch.Tensor]] = {}
        self._detours: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fresh: dict[int, torch.Tensor] = {}
        self._taken: dict[tuple[torch.device, int], list[tuple[int, int, int, str]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._shards[shard].nbytes for shard in self._into)

    def form(self, node: TensorNode) -> tuple[torch.dtype, tuple[int, ...]]:
        """What a stored tensor looks like."""
        form = node.view or self._shards[node.shard]
        return _dtype(form.dtype), form.shape

    def device_type(self, node: TensorNode) -> str:
        return self._shards[node.shard].device

    def add(self, node: TensorNode, tensor: torch.Tensor, name: str) -> None:
        """The stored tensor goes into this live one, of the same dtype and shape; ``name`` is for messages."""
        tensor = tensor.detach()
        if tensor.numel() and tensor.is_contiguous():
            memory = tensor.device, tensor.untyped_storage().data_ptr()
            self._taken.setdefault(memory, []).append((*byte_extent(tensor), node.shard, name))
        has_overlap = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        if node.view is not None or has_overlap:
            self._detours.append((self.fresh(node), _without_repeats(tensor)))
        else:
            self._into.setdefault(node.shard, []).append(tensor)

    def conflicts(self) -> list[str]:
        """Live tensors that share memory but are stored apart: whatever went in last would win."""
        found: list[str] = []
        for taken in self._taken.values():
            taken.sort()
            for (_, end, shard, name), (start, _, other, next_name) in itertools.pairwise(taken):
                if start < end and shard != other:
                    found.append(f"{next_name}: shares memory with {name} in the state, but not in the checkpoint")
        return found

    def fresh(self, node: TensorNode, device: torch.device | None = None) -> torch.Tensor:
        """A new tensor to be filled; tensors that shared memory when saved share it again."""
        base = self._fresh.get(node.shard)
        if base is None:
            shard = self._shards[node.shard]
            base = torch.empty(shard.shape, dtype=_dtype(shard.dtype), device=device or "cpu")
            self._fresh[node.shard] = base
            self._into.setdefault(node.shard, []).append(base)
        return base if node.view is None else _window(base, node.view, self._shards[node.shard])

    def fill(self) -> None:
        """Read, verify, place.  Blocks; raises :class:`IntegrityError`."""
        segment = self._checkpoint.seal.segment
        chunks: set[int] = set()
        for number in self._into:
            shard = self._shards[number]
            if shard.nbytes:
                chunks.update(range(shard.start // segment.chunk_bytes, (shard.end - 1) // segment.chunk_bytes + 1))
        with torch.no_grad():
            read_chunks(self._checkpoint, chunks, self._place)
            for source, into in self._detours:
                into.copy_(source.as_strided(into.shape, source.stride(), source.storage_offset()))

    def _place(self, start: int, end: int, buffer: mmap.mmap) -> None:
        """One chunk's bytes to every tensor that has a part in them; runs on the reading threads."""
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        first = bisect.bisect_right(self._starts, start) - 1
        for number in range(max(first, 0), len(self._shards)):
            shard = self._shards[number]
            if shard.start >= end:
                break
            begin, until = max(shard.start, start), min(shard.end, end)
            if begin < until:
                for tensor in self._into.get(number, ()):
                    _put(memory[begin - start : until - start], tensor, begin - shard.start)


def _put(data: torch.Tensor, tensor: torch.Tensor, offset: int) -> None:
    """Bytes ``offset`` and following of the tensor's content."""
    if tensor.device.type == "cpu" and is_plain(tensor):
        ctypes.memmove(tensor.data_ptr() + offset, data.data_ptr(), data.numel())
        return
    item_bytes = tensor.element_size()
    at = 0
    with torch.no_grad():
        for piece in pieces(tensor, offset // item_bytes, data.numel() // item_bytes):
            piece.copy_(data[at : at + piece.nbytes].view(tensor.dtype).view(piece.shape))
            at += piece.nbytes


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with every repeated dimension (stride 0) cut down to one."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _window(base: torch.Tensor, view: View, shard: Shard) -> torch.Tensor:
    dtype = _dtype(view.dtype)
    numbers = (view.offset, *view.shape, *view.stride)
    if len(view.shape) != len(view.stride) or not all(0 <= number < 1 << 62 for number in numbers):
        raise FormatError(f"a view of {shard.name!r} is malformed")
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
    if not 0 < math.prod(view.shape) < 1 << 62 or (last + 1) * dtype.itemsize > shard.nbytes:
        raise FormatError(f"a view of {shard.name!r} reaches outside of it")
    window = torch.empty(0, dtype=dtype, device=base.device)
    return window.set_(base.untyped_storage(), view.offset, view.shape, view.stride)


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise FormatError(f"{name!r} is not a dtype that this stillframe knows")
    return dtype
