"""A box: one rectangle of a tensor.

Everything that is stored, written by one rank or read by another is a box.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stillframe.errors import ConfigError
from stillframe.format import limits


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor, and where it begins in this rank's local tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box as a view of the local tensor."""
        for dim, (start, size) in enumerate(zip(self.local, self.shape, strict=True)):
            if local.shape[dim] != size:
                local = local.narrow(dim, start, size)
        return local

    def between(self, dim: int, start: int, end: int) -> Box:
        """The rows from ``start`` to ``end`` of it along one dimension."""

        def moved(place: tuple[int, ...], to: int) -> tuple[int, ...]:
            return (*place[:dim], to, *place[dim + 1 :])

        return Box(
            moved(self.offset, self.offset[dim] + start),
            moved(self.shape, end - start),
            moved(self.local, self.local[dim] + start),
        )


def whole_box(shape: Sequence[int]) -> Box:
    origin = (0,) * len(shape)
    return Box(origin, tuple(shape), origin)


class TensorBox:
    """The box of a tensor that this rank writes; stands in a state where the tensor would.

    ``tensor`` holds its content.  ``shape`` is the shape of the whole tensor, ``offset`` the position of the box's
    first item in it.  The boxes of all ranks under one path tile the tensor; they must not overlap.  A DTensor needs
    none of this.
    """

    __slots__ = ("boxes", "offset", "shape", "tensor")

    def __init__(self, tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> None:
        self.tensor = tensor
        self.shape = tuple(map(int, shape))
        self.offset = tuple(map(int, offset))
        sizes = tuple(tensor.shape)
        self.boxes: tuple[Box, ...] = () if 0 in sizes else (Box(self.offset, sizes, (0,) * len(sizes)),)
        fits = len(self.shape) == len(self.offset) == len(sizes) and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(self.offset, sizes, self.shape, strict=True)
        )
        divided = sum(size != whole for size, whole in zip(sizes, self.shape, strict=False))
        if fits and divided > limits.MAX_DIVIDED:
            raise ConfigError(f"TensorBox: divided in {divided} dimensions; {limits.MAX_DIVIDED} are allowed")
        if not fits:
            raise ConfigError(
                f"TensorBox: a box of {sizes} at {self.offset} does not lie within a tensor of {self.shape}"
            )

    @classmethod
    def of(cls, parts: Sequence[TensorBox]) -> torch.Tensor | TensorBox:
        """What this rank writes of one tensor: the tensor itself if one of the boxes is all of it, else all in one."""
        whole = [each.tensor for each in parts if tuple(each.tensor.shape) == each.shape]
        return whole[0] if whole else parts[0] if len(parts) == 1 else cls.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence[TensorBox]) -> TensorBox:
        """Several boxes that this rank writes of one tensor.  Raises :class:`ConfigError`.

        They are copied, unless they lie one behind the other in one memory, as the halves of ``torch.chunk`` do.
        """
        first = parts[0]
        if len({(each.shape, each.tensor.dtype, each.tensor.device) for each in parts}) > 1 or not first.shape:
            raise ConfigError("TensorBox.joined: these are not boxes of one tensor")
        joined = cls(first.tensor, first.shape, first.offset)
        sizes = [tuple(each.tensor.shape) for each in parts]
        rows, *others = zip(*sizes, strict=True)
        in_place = _in_one([each.tensor for each in parts])
        joined.tensor = first.tensor.new_zeros((sum(rows), *map(max, others))) if in_place is None else in_place
        at = itertools.accumulate(rows, initial=0)
        boxes = [
            Box(each.offset, size, (start, *(0 for _ in others)))
            for each, size, start in zip(parts, sizes, at, strict=False)
        ]
        if in_place is None:
            for each, box in zip(parts, boxes, strict=True):
                box.of(joined.tensor).copy_(each.tensor)
        joined.boxes = tuple(box for box in boxes if 0 not in box.shape)
        return joined

    def __repr__(self) -> str:
        return f"TensorBox(shape={self.shape}, offset={self.offset}, of={tuple(self.tensor.shape)})"


def _in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose rows are those of these, if they lie in this order in one memory; else ``None``."""
    first, end = tensors[0], tensors[0].storage_offset()
    for each in tensors:
        is_next = (
            each.layout is torch.strided
            and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and (each.stride(), each.shape[1:]) == (first.stride(), first.shape[1:])
            and each.storage_offset() == end
        )
        if not is_next:
            return None
        end += each.shape[0] * each.stride(0)
    rows = sum(each.shape[0] for each in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
