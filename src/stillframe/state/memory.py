"""A tensor's memory: its bytes, the extent of storage that it spans, and which tensors are aliases.

Memory that several tensors share is written once.

Tensors of the same form at the same address are one.  Stable tensors that overlap are written as the tensor that covers
the others, or else as the extent of storage that they span; the others become views of it.  Only where that extent is
mostly gaps (``x[::8]`` beside ``x[::4]``) is each of them written by itself, and the alias is lost; so is that of an
expanded tensor that repeats its memory very often (:func:`stillframe.format.tree.max_view_bytes`).  Volatile tensors
may be new objects at every save, and a tensor of which other ranks hold boxes is stored as boxes: such tensors are
aliases only if they are exactly alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from stillframe.format.tree import View, max_view_bytes
from stillframe.state.dtypes import DTYPE_NAMES
from stillframe.state.forms import Forms


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
    return start, start + _items_spanned(tensor.shape, tensor.stride()) * item_bytes


def _items_spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of its storage; 0 if that has no bytes."""
    return int(tensor.untyped_storage().data_ptr())


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Of those that have bytes."""
    return set(map(storage_of, tensors)) - {0}


def row_slices(tensor: torch.Tensor, start: int, count: int) -> Iterator[torch.Tensor]:
    """Views that hold ``count`` items of a strided tensor from item ``start`` on, in row-major order.

    Each is a slice of rows, or of a single row: no temporary is ever as large as the tensor.
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
        yield from row_slices(tensor[first], skipped, head)
        first, count = first + 1, count - head
    whole, tail = divmod(count, row)
    if whole:
        yield tensor[first : first + whole]
    if tail:
        yield from row_slices(tensor[first + whole], 0, tail)


@dataclass(frozen=True, slots=True)
class Extent:
    """Memory that is written once."""

    source: torch.Tensor
    """Covers all of it."""
    cover: int | None
    """Which tensor of the walk that is; ``None``: a row of items from the first byte to the last, made for it."""
    members: tuple[tuple[int, View | None], ...]
    """The tensors of the walk that lie in it, in order: each is all of it (``None``), or a view."""

    @property
    def index(self) -> int:
        """The first of its tensors."""
        return self.members[0][0]


def extents_of(tensors: Sequence[torch.Tensor], forms: Forms, ties: Mapping[int, object]) -> list[Extent]:
    """The memory to write, so that every tensor lies in exactly one extent; in the order of their first tensors.

    ``ties`` has the tensors that are aliases only of their exact equals, each with what else must be equal.
    """
    found: list[Extent] = []
    equals: dict[tuple[object, ...], list[int]] = {}
    stable: dict[torch.device, list[int]] = {device: [] for device in set(forms.devices)}
    for index, nbytes in enumerate(forms.nbytes):
        if index in ties:
            equals.setdefault((ties[index], *forms.key(index)), []).append(index)
        elif nbytes and not forms.is_conj[index] and not forms.is_neg[index]:
            stable[forms.devices[index]].append(index)
        else:
            found.append(Extent(tensors[index], index, ((index, None),)))
    for group in equals.values():
        found.append(Extent(tensors[group[0]], group[0], tuple((index, None) for index in group)))
    aliases = _Aliases(tensors, forms)
    for indexes in stable.values():
        for group in aliases.overlapping(indexes):
            if len(group) == 1:
                found.append(Extent(tensors[group[0]], group[0], ((group[0], None),)))
            else:
                found.extend(aliases.extents(group))
    found.sort(key=lambda extent: extent.members[0][0])
    return found


class _Aliases:
    """Stable tensors that may overlap, by their indexes in the walk."""

    def __init__(self, tensors: Sequence[torch.Tensor], forms: Forms) -> None:
        self._tensors = tensors
        self._forms = forms

    def overlapping(self, indexes: Iterable[int]) -> Iterator[list[int]]:
        """Groups of tensors of one device that touch common addresses, each in the order of the walk."""
        addresses = self._forms.addresses
        group: list[int] = []
        end = -1
        for index in sorted(indexes, key=addresses.__getitem__):
            if group and addresses[index] >= end:
                yield sorted(group)
                group = []
                end = -1
            end = max(end, self._end(index))
            group.append(index)
        if group:
            yield sorted(group)

    def extents(self, group: Iterable[int]) -> Iterator[Extent]:
        """How tensors that touch common addresses are written.  Only those of one storage can be written as one."""
        storages: dict[int, list[int]] = {}
        for index in group:
            storages.setdefault(self._tensors[index].untyped_storage().data_ptr(), []).append(index)
        for members in storages.values():
            for each in self.overlapping(members):
                yield from self._extents(each)

    def _extents(self, group: list[int]) -> Iterator[Extent]:
        """Of tensors that overlap in one storage: one extent if that can be, else one for each form."""
        forms: dict[tuple[object, ...], list[int]] = {}
        for index in group:
            forms.setdefault(self._place(index), []).append(index)
        distinct = [members[0] for members in forms.values()]
        cover = self._cover(distinct) if len(distinct) > 1 else None
        if cover is None:
            for members in forms.values():
                yield Extent(self._tensors[members[0]], members[0], tuple((index, None) for index in members))
            return
        limit = max_view_bytes(cover.nbytes)
        for members in forms.values():
            if self._forms.nbytes[members[0]] > limit:  # it repeats the same few bytes very often
                yield Extent(self._tensors[members[0]], members[0], tuple((index, None) for index in members))
                group = [index for index in group if index not in members]
        index_of = {id(self._tensors[index]): index for index in distinct}
        start = cover.data_ptr()
        whole = start, cover.shape, cover.stride(), cover.dtype
        views = ((index, None if self._place(index) == whole else self._view(index, start)) for index in group)
        if group:
            yield Extent(cover, index_of.get(id(cover)), tuple(views))

    def _cover(self, distinct: list[int]) -> torch.Tensor | None:
        """One tensor that covers all of them: one of their own, or the extent of storage from first to last byte."""
        forms = self._forms
        start = min(forms.addresses[index] for index in distinct)
        end = max(self._end(index) for index in distinct)
        if any((forms.addresses[index] - start) % forms.dtypes[index].itemsize for index in distinct):
            return None
        for index in distinct:
            if (forms.addresses[index], self._end(index)) == (start, end) and forms.is_plain(index):
                return self._tensors[index]
        if end - start > 2 * sum(forms.nbytes[index] for index in distinct):
            return None  # mostly gaps
        first = self._tensors[distinct[0]]
        is_uniform = len({forms.dtypes[index] for index in distinct}) == 1
        dtype = first.dtype if is_uniform else torch.uint8
        storage = first.untyped_storage()
        offset, count = (start - storage.data_ptr()) // dtype.itemsize, (end - start) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=first.device).set_(storage, offset, (count,), (1,))

    def _place(self, index: int) -> tuple[object, ...]:
        forms = self._forms
        return forms.addresses[index], forms.shapes[index], forms.strides[index], forms.dtypes[index]

    def _end(self, index: int) -> int:
        forms = self._forms
        if forms.is_contiguous[index]:
            return forms.addresses[index] + forms.nbytes[index]
        items = _items_spanned(forms.shapes[index], forms.strides[index])
        return forms.addresses[index] + items * forms.dtypes[index].itemsize

    def _view(self, index: int, start: int) -> View:
        forms = self._forms
        return View(
            dtype=DTYPE_NAMES[forms.dtypes[index]],
            shape=tuple(forms.shapes[index]),
            stride=tuple(forms.strides[index]),
            offset=(forms.addresses[index] - start) // forms.dtypes[index].itemsize,
        )
