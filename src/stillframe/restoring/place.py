"""Placing: which live tensors the bytes of each shard go to, straight from the verified chunk.

No second copy of the state is made: bytes go from the read buffer into the tensors.  There are two exceptions, which
are read into a new tensor and copied from there: a stored tensor that is a strided view of a shard, and a live tensor
that maps several items to one address.  A live tensor may be plain or a DTensor, a stored one may be whole or divided
into boxes.  Only the chunks that hold what both have in common are read.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, sub
from typing import Any

import torch

from stillframe.checkpoint.read import read_chunks
from stillframe.checkpoint.stored import Located, Stored, StoredBox
from stillframe.errors import FormatError, MismatchError, UnsupportedStateError
from stillframe.format import tree
from stillframe.format.layout import make_up
from stillframe.format.segment import ITEM_BYTES
from stillframe.state.boxes import Box
from stillframe.state.dtypes import DTYPES, PLAIN_TENSORS
from stillframe.state.memory import byte_extent, is_plain, row_slices
from stillframe.state.spread import boxes_of
from stillframe.state.torch_internals import is_dtensor, local_of
from stillframe.state.wrappers import is_wrapper


@dataclass(frozen=True, slots=True)
class _ShardBox:
    """A box of a shard, and the tensor that it goes into; ``first`` and ``end`` bound its items in the shard."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    into: torch.Tensor
    first: int
    end: int

    @property
    def is_contiguous(self) -> bool:
        """Its items lie together in the shard."""
        return self.end - self.first == self.into.numel()


class Placement:
    """Collects destinations, then fills them in one pass over the segments."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._boxes: dict[tuple[int, int], list[_ShardBox]] = {}
        self._shards: dict[tuple[int, int], StoredBox] = {}
        """Those that boxes are taken from."""
        self._detours: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fresh: dict[object, tuple[Located, torch.Tensor]] = {}
        self._taken: dict[tuple[torch.device, int], list[tuple[int, int, Any, str]]] = {}

    @property
    def nbytes(self) -> int:
        """How many bytes of the segments are wanted; a box that goes into several tensors counts once."""
        return sum(
            box.into.nbytes
            for boxes in self._boxes.values()
            for box in {(each.offset, each.shape): each for each in boxes}.values()
        )

    def form(self, leaf: Located) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a stored tensor."""
        dtype, shape = self._stored.form(leaf)
        return _dtype(dtype), shape

    def fits(self, leaf: Located, live: Any) -> bool:
        """Whether ``live`` is a tensor of the stored one's dtype and shape, with memory of its own."""
        if not isinstance(live, torch.Tensor) or live.is_nested or not _has_memory(local_of(live)):
            return False
        return (live.dtype, tuple(live.shape)) == self.form(leaf)

    def device_type(self, leaf: Located) -> str:
        return self._stored.device_type(leaf)

    def add(self, leaf: Located, tensor: torch.Tensor, name: str) -> None:
        """The stored tensor goes into this live one, of the same dtype and shape; ``name`` is for messages."""
        tensor = tensor.detach()
        local = local_of(tensor)
        if local.numel() and local.is_contiguous():
            memory = local.device, local.untyped_storage().data_ptr()
            self._taken.setdefault(memory, []).append((*byte_extent(local), leaf.identity, name))
        for box in boxes_of(tensor):
            self.add_box(leaf, box, box.of(local))

    def add_box(self, leaf: Located, box: Box, into: torch.Tensor) -> None:
        """A box of the stored tensor goes into this tensor, of its dtype and shape."""
        has_overlap = any(stride == 0 and size > 1 for stride, size in zip(into.stride(), into.shape, strict=True))
        if leaf.view is not None or has_overlap:
            whole = self.fresh(leaf)
            source = Box(box.offset, box.shape, box.offset).of(whole)
            self._detours.append((source, _without_repeats(into)))
        else:
            self._fetch(leaf, box, into)

    def _fetch(self, leaf: Located, box: Box, into: torch.Tensor) -> None:
        """Note which boxes of which shards make up this box of the tensor."""
        if 0 in box.shape:
            return
        for found in self._stored.sources(leaf, box.offset, box.shape):
            overlaps = list(_overlaps(found, box))
            if make_up([(in_box, shape) for _, _, in_box, shape in overlaps], box.shape):
                break
        else:
            raise self._incomplete(leaf)
        for stored, in_shard, in_box, shape in overlaps:
            target = Box((), shape, in_box).of(into)
            first = _flat(in_shard, stored.shape)
            last = _flat([at + size - 1 for at, size in zip(in_shard, shape, strict=True)], stored.shape)
            self._shards[stored.rank, stored.shard] = stored
            noted = self._boxes.setdefault((stored.rank, stored.shard), [])
            noted.append(_ShardBox(in_shard, shape, target, first, last + 1))

    def check_filled(self, leaf: Located) -> None:
        """Before memory or disk is asked for: the boxes of a sharded tensor make it up.

        Raises: :class:`FormatError`; :class:`MismatchError` if the other boxes lie in other roots.
        """
        if not isinstance(leaf.node, tree.ShardedNode):
            return
        shape = leaf.node.shape
        for found in self._stored.sources(leaf, (0,) * len(shape), shape):
            if make_up([(box.offset, box.shape) for box in found], shape):
                return
        raise self._incomplete(leaf)

    def _incomplete(self, leaf: Located) -> Exception:
        """Why the boxes of a sharded tensor do not make it up."""
        assert isinstance(leaf.node, tree.ShardedNode)
        checkpoint, name = self._stored.checkpoint, leaf.node.tensor
        if len(checkpoint.ranks) < checkpoint.world_size:
            return MismatchError(
                f"tensor {name!r} lies elsewhere: roots that are not shared hold each rank's own boxes, "
                "and can be restored only into the layout that was saved"
            )
        return FormatError(f"{checkpoint.path}: boxes of tensor {name!r} overlap, or are in no segment")

    def conflicts(self) -> list[str]:
        """Live tensors that alias each other but are stored apart: the one that is placed last would win."""
        found: list[str] = []
        for taken in self._taken.values():
            taken.sort()
            for (_, end, stored, name), (start, _, other, next_name) in itertools.pairwise(taken):
                if start < end and stored != other:
                    found.append(f"{next_name}: shares memory with {name} in the state, but not in the checkpoint")
        return found

    def fresh(
        self, leaf: Located, device: torch.device | None = None, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A new tensor to be filled, spread like another if one is given; what was tied when saved is tied again."""
        key, view = leaf.identity, leaf.view
        if key not in self._fresh:
            whole = leaf if view is None else _base(leaf)
            dtype, shape = self.form(whole)
            if like is None:
                self.check_filled(whole)
            base = _empty(shape, dtype, device, like)
            self._fresh[key] = whole, base
            for box in boxes_of(base):
                self._fetch(whole, box, box.of(local_of(base)))
        base = self._fresh[key][1]
        return base if view is None else _strided(base, view)

    def fresh_tensors(self) -> list[tuple[Located, torch.Tensor]]:
        """The new tensors so far, each with what goes into it."""
        return list(self._fresh.values())

    def fill(self, on_bytes: Callable[[int], None] = lambda _count: None) -> None:
        """Read, verify and place; ``on_bytes`` is called from several threads with the size of each chunk read.

        Of an accelerator, all that is queued on its streams comes before, and what is queued next comes after: the
        reading threads compute on other streams than the one that trains.

        Blocks.  Raises: :class:`IntegrityError`.
        """
        checkpoint = self._stored.checkpoint
        devices = {box.into.device for boxes in self._boxes.values() for box in boxes}
        devices |= {into.device for _, into in self._detours}

        def place(rank: int, shards: Sequence[int], start: int, end: int, buffer: memoryview) -> None:
            self._place(rank, shards, start, end, buffer)
            on_bytes(end - start)

        with torch.no_grad():
            _synchronize(devices)
            read_chunks(checkpoint, self._chunks(), place, borrows=True)
            _synchronize(devices)
            for source, into in self._detours:
                into.copy_(source.as_strided(into.shape, source.stride(), source.storage_offset()))
            if self._detours:
                _synchronize(devices)

    def _chunks(self) -> set[tuple[int, int]]:
        """(rank, chunk) of everything that is wanted."""
        chunks: set[tuple[int, int]] = set()
        for (rank, number), boxes in self._boxes.items():
            shard, chunk_bytes = self._shards[rank, number], self._stored.chunk_bytes(rank)
            for box in boxes:
                if box.into.numel():
                    item_bytes = box.into.element_size()
                    start = shard.start + box.first * item_bytes
                    end = shard.start + box.end * item_bytes
                    chunks.update((rank, each) for each in range(start // chunk_bytes, (end - 1) // chunk_bytes + 1))
        return chunks

    def _place(self, rank: int, shards: Sequence[int], start: int, end: int, buffer: memoryview) -> None:
        """Copy one chunk's bytes into every tensor that has bytes in it.  Thread: a reading one."""
        memory = _Memory(buffer)
        for number in shards:
            shard = self._shards.get((rank, number))
            if shard is None:
                continue
            for box in self._boxes[rank, number]:
                item_bytes = box.into.element_size()
                begin = max(shard.start + box.first * item_bytes, start)
                until = min(shard.start + box.end * item_bytes, end)
                if begin < until:
                    data = slice(begin - start, until - start)
                    at = (begin - shard.start) // item_bytes
                    if box.is_contiguous:
                        _put(memory, data, box.into, begin - shard.start - box.first * item_bytes)
                    else:
                        _scatter(memory.tensor[data].view(box.into.dtype), at, shard.shape, box.offset, box.into)


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) in PLAIN_TENSORS:
        return True
    if is_wrapper(tensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def _overlaps(
    found: Sequence[StoredBox], box: Box
) -> Iterator[tuple[StoredBox, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(stored box, place in it, place in the box, shape) of everything that stored boxes and the box have in common."""
    for stored in found:
        if (stored.offset, stored.shape) == (box.offset, box.shape):
            origin = (0,) * len(box.shape)
            yield stored, origin, origin, box.shape
            return
    for stored in found:
        begin = tuple(map(max, stored.offset, box.offset))
        ends = map(min, map(add, stored.offset, stored.shape), map(add, box.offset, box.shape))
        shape = tuple(map(sub, ends, begin))
        if min(shape, default=1) > 0:
            yield stored, tuple(map(sub, begin, stored.offset)), tuple(map(sub, begin, box.offset)), shape


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    at = 0
    for each, size in zip(index, shape, strict=True):
        at = at * size + each
    return at


class _Memory:
    """A verified chunk.  What a store has lent is read-only, and torch has no tensors of such memory."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    @cached_property
    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._buffer) if self._buffer.readonly else self._buffer, dtype=torch.uint8)

    def copy(self, part: slice, address: int) -> None:
        if not self._buffer.readonly:
            ctypes.memmove(address, self.tensor.data_ptr() + part.start, part.stop - part.start)
            return
        with memoryview((ctypes.c_ubyte * (part.stop - part.start)).from_address(address)).cast("B") as into:
            into[:] = self._buffer[part]


def _put(memory: _Memory, part: slice, tensor: torch.Tensor, offset: int) -> None:
    """Bytes ``offset`` and following of the tensor's content."""
    if tensor.device.type == "cpu" and is_plain(tensor):
        memory.copy(part, tensor.data_ptr() + offset)
        return
    data = memory.tensor[part]
    item_bytes = tensor.element_size()
    at = 0
    with torch.no_grad():
        for rows in row_slices(tensor, offset // item_bytes, data.numel() // item_bytes):
            rows.copy_(data[at : at + rows.nbytes].view(tensor.dtype).view(rows.shape))
            at += rows.nbytes


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


def _base(view: Located) -> Located:
    """The tensor that fills the shard of which this one is a view."""
    assert isinstance(view.node, tree.TensorNode)
    return Located(view.rank, tree.TensorNode(view.node.shard))


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


def _strided(base: torch.Tensor, view: tree.View) -> torch.Tensor:
    """A view that has passed :func:`tree.check_tree`."""
    window = torch.empty(0, dtype=_dtype(view.dtype), device=base.device)
    return window.set_(base.untyped_storage(), view.offset, view.shape, view.stride)


def _dtype(name: str) -> torch.dtype:
    dtype = DTYPES.get(name)
    if dtype is None and name in ITEM_BYTES:
        raise UnsupportedStateError(
            f"a tensor is stored as {name}, a dtype that torch {torch.__version__} does not have: use a newer torch"
        )
    if dtype is None:
        raise FormatError(f"{name!r} is not a dtype that this stillframe knows")
    return dtype
