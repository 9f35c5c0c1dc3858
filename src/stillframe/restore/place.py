"""Placing: which live tensors the bytes of each shard go to, straight from the verified chunk.

No second copy of the state is made: a chunk's bytes go from the read buffer into the tensors.  Only a tensor that
is a strided view of a shard, or that maps several items to one address, takes a detour.  A live tensor may be whole
or a DTensor, a stored one may be whole or in parts, and only the chunks that hold what they have in common are read.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.read import read_chunks
from stillframe.checkpoint.stored import Piece, Stored
from stillframe.errors import FormatError, MismatchError
from stillframe.format.segment import Shard
from stillframe.format.tree import ShardedNode, TensorNode, View
from stillframe.state.boxes import Box
from stillframe.state.dtypes import DTYPES
from stillframe.state.memory import byte_extent, is_plain, pieces
from stillframe.state.spread import boxes_of
from stillframe.state.torch_internals import is_dtensor, local_of

StoredTensor = TensorNode | ShardedNode


@dataclass(frozen=True, slots=True)
class _Region:
    """A box of a shard, where it goes, and which of the shard's items it lies among."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    into: torch.Tensor
    first: int
    end: int

    @property
    def is_run(self) -> bool:
        """Its items lie together in the shard."""
        return self.end - self.first == self.into.numel()


class Placement:
    """Collects destinations, then fills them in one pass over the segments."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._regions: dict[tuple[int, int], list[_Region]] = {}
        self._detours: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fresh: dict[str, tuple[StoredTensor, torch.Tensor]] = {}
        self._taken: dict[tuple[torch.device, int], list[tuple[int, int, str, str]]] = {}

    @property
    def nbytes(self) -> int:
        """How much of the segments goes somewhere."""
        return sum(
            region.into.nbytes
            for regions in self._regions.values()
            for region in {(each.offset, each.shape): each for each in regions}.values()
        )

    def form(self, node: StoredTensor) -> tuple[torch.dtype, tuple[int, ...]]:
        """What a stored tensor looks like."""
        dtype, shape = self._stored.form(node)
        return _dtype(dtype), shape

    def device_type(self, node: StoredTensor) -> str:
        return self._stored.device_type(node)

    def add(self, node: StoredTensor, tensor: torch.Tensor, name: str) -> None:
        """The stored tensor goes into this live one, of the same dtype and shape; ``name`` is for messages."""
        tensor = tensor.detach()
        local = local_of(tensor)
        if local.numel() and local.is_contiguous():
            memory = local.device, local.untyped_storage().data_ptr()
            self._taken.setdefault(memory, []).append((*byte_extent(local), _identity(node), name))
        for box in boxes_of(tensor):
            self.add_box(node, box, box.of(local))

    def add_box(self, node: StoredTensor, box: Box, into: torch.Tensor) -> None:
        """A box of the stored tensor goes into this one, of its dtype and shape."""
        has_overlap = any(stride == 0 and size > 1 for stride, size in zip(into.stride(), into.shape, strict=True))
        if (isinstance(node, TensorNode) and node.view is not None) or has_overlap:
            whole = self.fresh(node)
            source = Box(box.offset, box.shape, box.offset).of(whole)
            self._detours.append((source, _without_repeats(into)))
        else:
            self._fetch(node, box, into)

    def _fetch(self, node: StoredTensor, box: Box, into: torch.Tensor) -> None:
        """Note which boxes of which shards make up this box of the tensor."""
        wanted = math.prod(box.shape)
        if not wanted:
            return
        for found in self._stored.pieces(node):
            reads = list(_reads(found, box))
            if sum(math.prod(shape) for _, _, _, shape in reads) == wanted:
                break
        else:
            assert isinstance(node, ShardedNode)
            checkpoint = self._stored.checkpoint
            if len(checkpoint.ranks) < checkpoint.world_size:
                raise MismatchError(
                    f"tensor {node.tensor!r} lies elsewhere: roots that are not shared hold each rank's own part, "
                    "and can be restored only into the layout that was saved"
                )
            raise FormatError(
                f"{self._stored.checkpoint.path}: parts of tensor {node.tensor!r} overlap, or are in no segment"
            )
        for piece, in_shard, in_box, shape in reads:
            part = Box((), shape, in_box).of(into)
            first = _flat(in_shard, piece.shape)
            last = _flat([at + size - 1 for at, size in zip(in_shard, shape, strict=True)], piece.shape)
            region = _Region(in_shard, shape, part, first, last + 1)
            self._regions.setdefault((piece.rank, piece.shard), []).append(region)

    def conflicts(self) -> list[str]:
        """Live tensors that share memory but are stored apart: whatever went in last would win."""
        found: list[str] = []
        for taken in self._taken.values():
            taken.sort()
            for (_, end, stored, name), (start, _, other, next_name) in itertools.pairwise(taken):
                if start < end and stored != other:
                    found.append(f"{next_name}: shares memory with {name} in the state, but not in the checkpoint")
        return found

    def fresh(
        self, node: StoredTensor, device: torch.device | None = None, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A new tensor to be filled, spread like another if one is given; what was tied when saved is tied again."""
        key = _identity(node)
        if key in self._fresh:
            base = self._fresh[key][1]
        else:
            if isinstance(node, TensorNode):
                shard = self._stored.shard(node.shard)
                dtype, shape = _dtype(shard.dtype), shard.shape
            else:
                dtype, shape = self.form(node)
            base = _empty(shape, dtype, device, like)
            whole = TensorNode(node.shard) if isinstance(node, TensorNode) else node
            self._fresh[key] = whole, base
            for box in boxes_of(base):
                self._fetch(whole, box, box.of(local_of(base)))
        if isinstance(node, TensorNode) and node.view is not None:
            return _window(base, node.view, self._stored.shard(node.shard))
        return base

    def fresh_tensors(self) -> list[tuple[StoredTensor, torch.Tensor]]:
        """The new tensors so far, each with what goes into it."""
        return list(self._fresh.values())

    def fill(self, on_bytes: Callable[[int], None] = lambda _count: None) -> None:
        """Read, verify, place; ``on_bytes`` is told, from several threads, of what has been read.

        Blocks; raises :class:`IntegrityError`.
        """
        checkpoint = self._stored.checkpoint

        def place(rank: int, shards: Sequence[int], start: int, end: int, buffer: mmap.mmap) -> None:
            self._place(rank, shards, start, end, buffer)
            on_bytes(end - start)

        with torch.no_grad():
            read_chunks(checkpoint, self._chunks(checkpoint), place)
            for source, into in self._detours:
                into.copy_(source.as_strided(into.shape, source.stride(), source.storage_offset()))

    def _chunks(self, checkpoint: Checkpoint) -> set[tuple[int, int]]:
        """(rank, chunk) of everything that goes somewhere."""
        chunks: set[tuple[int, int]] = set()
        for (rank, number), regions in self._regions.items():
            sealed = checkpoint.of(rank)
            shard, chunk_bytes = sealed.seal.shards[number], sealed.seal.segment.chunk_bytes
            for region in regions:
                if region.into.numel():
                    item_bytes = region.into.element_size()
                    start = shard.start + region.first * item_bytes
                    end = shard.start + region.end * item_bytes
                    chunks.update((rank, each) for each in range(start // chunk_bytes, (end - 1) // chunk_bytes + 1))
        return chunks

    def _place(self, rank: int, shards: Sequence[int], start: int, end: int, buffer: mmap.mmap) -> None:
        """One chunk's bytes to every tensor that has a part in them; runs on the reading threads."""
        memory = torch.frombuffer(buffer, dtype=torch.uint8)
        seal = self._stored.checkpoint.of(rank).seal
        for number in shards:
            shard = seal.shards[number]
            for region in self._regions.get((rank, number), ()):
                item_bytes = region.into.element_size()
                begin = max(shard.start + region.first * item_bytes, start)
                until = min(shard.start + region.end * item_bytes, end)
                if begin < until:
                    data = memory[begin - start : until - start]
                    at = (begin - shard.start) // item_bytes
                    if region.is_run:
                        _put(data, region.into, begin - shard.start - region.first * item_bytes)
                    else:
                        typed = data.view(region.into.dtype)
                        _scatter(typed, at, shard.shape, region.offset, region.into)


def _reads(
    found: Sequence[Piece], box: Box
) -> Iterator[tuple[Piece, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(piece, place in it, place in the box, shape) of everything that pieces and box have in common."""
    for piece in found:
        if (piece.offset, piece.shape) == (box.offset, box.shape):
            origin = (0,) * len(box.shape)
            yield piece, origin, origin, box.shape
            return
    if not found:
        return
    # The geometry is DCP's own.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    stored = [ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)) for piece in found]
    wanted = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
    described = TensorStorageMetadata(TensorProperties(), torch.Size(box.shape), stored)
    for item in create_read_items_for_chunk_list("", described, [wanted]):
        index = item.storage_index.index
        assert index is not None
        yield found[index], tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    at = 0
    for each, size in zip(index, shape, strict=True):
        at = at * size + each
    return at


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


def _scatter(data: torch.Tensor, at: int, shape: Sequence[int], offset: Sequence[int], into: torch.Tensor) -> None:
    """Items ``at`` and following of a tensor of this shape, as far as they belong to the box at ``offset``."""
    if not shape:
        into.copy_(data[0])
        return
    row = math.prod(shape[1:])
    first, skipped = divmod(at, row)
    while data.numel():
        if skipped or data.numel() < row:
            count, rows = min(row - skipped, data.numel()), 1
            if 0 <= first - offset[0] < into.shape[0]:
                _scatter(data[:count], skipped, shape[1:], offset[1:], into[first - offset[0]])
        else:
            rows = data.numel() // row
            count = rows * row
            begin, end = max(first, offset[0]), min(first + rows, offset[0] + into.shape[0])
            if begin < end:
                source = data[(begin - first) * row : (end - first) * row].view(end - begin, *shape[1:])
                inner = tuple(slice(o, o + n) for o, n in zip(offset[1:], into.shape[1:], strict=True))
                with torch.no_grad():
                    into[begin - offset[0] : end - offset[0]].copy_(source[(slice(None), *inner)])
        data, first, skipped = data[count:], first + rows, 0


def _identity(node: StoredTensor) -> str:
    """Equal for tensors that are stored in the same place."""
    return f"{node.shard}" if isinstance(node, TensorNode) else f"={node.tensor}"


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None, like: Any) -> torch.Tensor:
    if like is None or not is_dtensor(like) or tuple(like.shape) != tuple(shape):
        return torch.empty(shape, dtype=dtype, device=device or "cpu")
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(local_of(like), dtype=dtype)
    spread: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread


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
