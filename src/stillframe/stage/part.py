"""A box of a tensor as a leaf of a state, for those who know better than stillframe how a tensor is spread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stillframe.errors import ConfigError


class Part:
    """The box of a tensor that this rank writes, standing in a state where the tensor would.

    ``tensor`` holds it, ``shape`` is that of the whole tensor, ``offset`` the place of the box's first item in it.  The
    ranks' parts under one path make up the tensor, and must not overlap.  A tensor that stands in a state as a DTensor
    needs none of this.
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
            raise ConfigError(f"Part: a box of {sizes} at {self.offset} does not lie within a tensor of {self.shape}")

    def __repr__(self) -> str:
        return f"Part(shape={self.shape}, offset={self.offset}, of={tuple(self.tensor.shape)})"
