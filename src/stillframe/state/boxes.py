"""A box: one rectangle of a tensor.

Everything that is stored, written by one rank or read by another is a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stillframe.errors import ConfigError


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

    __slots__ = ("offset", "shape", "tensor")

    def __init__(self, tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> None:
        self.tensor = tensor
        self.shape = tuple(map(int, shape))
        self.offset = tuple(map(int, offset))
        sizes = tuple(tensor.shape)
        fits = len(self.shape) == len(self.offset) == len(sizes) and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(self.offset, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"TensorBox: a box of {sizes} at {self.offset} does not lie within a tensor of {self.shape}"
            )

    def __repr__(self) -> str:
        return f"TensorBox(shape={self.shape}, offset={self.offset}, of={tuple(self.tensor.shape)})"
