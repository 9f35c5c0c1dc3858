"""A tensor's memory: its bytes, the stretch it spans, and which tensors share it.

Memory that several tensors share is written once.

Tensors of the same form at the same address are one.  Stable tensors whose memory overlaps are written as
the one that covers the others, or else as the stretch of memory they span; the others are views of it.  Only
where that stretch is mostly gaps (``x[::8]`` beside ``x[::4]``) is each written by itself, and the tie is lost.
Volatile tensors may be new objects at every save, and parts of tensors that other ranks hold parts of are boxes by
themselves: these are tied only if they are exactly alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from stillframe.format.tree import View
from stillframe.state.boxes import Spread
from stillframe.state.dtypes import DTYPE_NAMES


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A plain contiguous tensor as one row of bytes, sharing memory."""
    # Not reshape(-1): a single item counts as contiguous whatever its stride, and keeps that stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its content: contiguous, no lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_byte_row(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()


def as_row(tensor: torch.Tensor) -> torch.Tensor:
    """Any tensor's content as one row of bytes; a copy only if its memory is not its content."""
    return as_bytes(tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous())


def byte_extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage, from first to last, that a tensor with items spans."""
    item_bytes = tensor.element_size()
    start = int(tensor.storage_offset()) * item_bytes
    items = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + items * item_bytes


def pieces(tensor: torch.Tensor, start: int, count: int) -> Iterator[torch.Tensor]:
    """Views that hold ``count`` items of a strided tensor from item ``start`` on, in row-major order.

    A piece is a run of whole rows, or a part of a single row: no temporary is ever as large as the tensor.
    """
    if count <= 0:
        return
    if tensor.dim() == 0 or count == tensor.numel():
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, skipped = divmod(start, row)
    if skipped:
        head = min(count, row - skipped)
        yield from pieces(tensor[first], skipped, head)
        first, count = first + 1, count - head
    whole, tail = divmod(count, row)
    if whole:
        yield tensor[first : first + whole]
    if tail:
        yield from pieces(tensor[first + whole], 0, tail)


@dataclass(slots=True)
class _Extent:
    """The bytes of its storage that a tensor spans."""

    index: int
    tensor: torch.Tensor
    start: int
    end: int

    @property
    def form(self) -> tuple[object, ...]:
        return (self.start, self.tensor.shape, self.tensor.stride(), self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Base:
    """Memory to be written once, and which tensors lie in it, each whole (``None``) or as a view."""

    source: torch.Tensor
    name: str
    leaves: list[tuple[int, View | None]]
    is_volatile: bool = False


def form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """All that tells one tensor from another at the same address."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())


def share_memory(
    tensors: Sequence[torch.Tensor],
    is_volatile: Sequence[bool],
    names: Sequence[str],
    spreads: Mapping[int, Spread] = MappingProxyType({}),
    wholes: Mapping[int, object] = MappingProxyType({}),
) -> list[Base]:
    """The pieces of memory to write, so that every tensor lies in exactly one of them.

    ``spreads``: of those that other ranks hold, too, or hold parts of.  ``wholes``: the DTensors among them; where this
    rank holds nothing of two, only these tell that they are one.
    """
    bases: list[Base] = []
    storages: dict[tuple[torch.device, int], list[_Extent]] = {}
    tied: dict[tuple[object, ...], list[tuple[int, View | None]]] = {}
    for index, tensor in enumerate(tensors):
        if (is_volatile[index] or index in spreads) and tensor.numel():
            key = tensor.data_ptr(), spreads.get(index), *form_of(tensor)
            tied.setdefault(key, []).append((index, None))
        elif index in spreads and index in wholes:
            tied.setdefault(("empty", id(wholes[index])), []).append((index, None))
        elif tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            bases.append(Base(tensor, names[index], [(index, None)], is_volatile[index]))
        else:
            memory = tensor.device, tensor.untyped_storage().data_ptr()
            storages.setdefault(memory, []).append(_Extent(index, tensor, *byte_extent(tensor)))
    for members in tied.values():
        first = members[0][0]
        bases.append(Base(tensors[first], names[first], members, is_volatile[first]))
    for extents in storages.values():
        for group in _overlapping(extents):
            bases.extend(_bases(group, names))
    return sorted(bases, key=lambda base: base.leaves[0][0])


def _overlapping(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    """Groups of extents that touch common bytes, each in the order of the walk."""
    group: list[_Extent] = []
    end = -1
    for extent in sorted(extents, key=lambda extent: extent.start):
        if group and extent.start >= end:
            yield sorted(group, key=lambda extent: extent.index)
            group = []
        end = max(end, extent.end) if group else extent.end
        group.append(extent)
    yield sorted(group, key=lambda extent: extent.index)


def _bases(group: list[_Extent], names: Sequence[str]) -> list[Base]:
    """How the memory of one group is written: once if that can be, else each form by itself."""
    forms: dict[tuple[object, ...], list[_Extent]] = {}
    for extent in group:
        forms.setdefault(extent.form, []).append(extent)
    distinct = [members[0] for members in forms.values()]
    whole = _whole(distinct, names) if len(distinct) > 1 else None
    if whole is None:
        return [
            Base(members[0].tensor, names[members[0].index], [(extent.index, None) for extent in members])
            for members in forms.values()
        ]
    base, source, name = whole
    leaves = [(extent.index, None if extent.form == base.form else _view(extent, base.start)) for extent in group]
    return [Base(source, name, leaves)]


def _whole(distinct: list[_Extent], names: Sequence[str]) -> tuple[_Extent, torch.Tensor, str] | None:
    """One tensor that covers all of them: one of their own, or the stretch of memory from first to last."""
    start, end = min(extent.start for extent in distinct), max(extent.end for extent in distinct)
    if any((extent.start - start) % extent.tensor.element_size() for extent in distinct):
        return None
    for extent in distinct:
        if (extent.start, extent.end) == (start, end) and is_plain(extent.tensor):
            return extent, extent.tensor, names[extent.index]
    if end - start > 2 * sum(extent.tensor.nbytes for extent in distinct):
        return None  # mostly gaps
    first = distinct[0].tensor
    is_uniform = all(extent.tensor.dtype == first.dtype for extent in distinct)
    dtype = first.dtype if is_uniform else torch.uint8
    item_bytes = dtype.itemsize
    source = torch.empty(0, dtype=dtype, device=first.device).set_(
        first.untyped_storage(), start // item_bytes, ((end - start) // item_bytes,), (1,)
    )
    return _Extent(-1, source, start, end), source, names[distinct[0].index] + "~memory"


def _view(extent: _Extent, start: int) -> View:
    tensor = extent.tensor
    return View(
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=(extent.start - start) // tensor.element_size(),
    )
