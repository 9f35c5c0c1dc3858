"""How a tensor is spread over the ranks: which boxes of it this rank holds, and who holds the same ones.

All of it is known to each rank alone, from placements and meshes; no rank asks another.  The geometry is that of
torch.distributed; only shards that are strided are worked out here, because there one rank's part is several boxes,
of which torch's own function gives the first.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stillframe.errors import ConfigError
from stillframe.format.values import Unencodable


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, and where it lies in the rank's local one."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box's part of the local tensor, sharing memory."""
        for dim, (start, size) in enumerate(zip(self.local, self.shape, strict=True)):
            if local.shape[dim] != size:
                local = local.narrow(dim, start, size)
        return local


@dataclass(frozen=True, slots=True)
class Spread:
    """One tensor as this rank sees it."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    """The ranks, this one among them, that hold exactly these boxes; in order."""
    team: tuple[int, ...]
    """The ranks that hold a part of it at all, this one among them or not; in order."""
    layout: str
    """What must be the same on all of the team, as text."""


def dtensor_class() -> type | None:
    """``DTensor``, if anything has loaded it: importing it takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_dtensor(value: object) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(value, kind)


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, sharing memory; a plain tensor as it is."""
    # Not to_local(): that makes a new tensor each time where gradients are recorded, and takes five times as long.
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local


def spread_of(tensor: Any) -> Spread:
    """Of a DTensor.  Raises :class:`Unencodable` if its parts do not make up a tensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise Unencodable("a DTensor with Partial placements, whose parts are yet to be added up; redistribute it")
    shape = tuple(tensor.shape)
    ranks = mesh.mesh
    coordinate = mesh.get_coordinate()
    team = tuple(sorted(ranks.flatten().tolist()))
    layout = f"{tuple(map(str, placements))} on {tuple(ranks.shape)}"
    if coordinate is None:
        return Spread(shape, (), (), team, layout)  # others hold it
    same = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(placements, coordinate, strict=True)
    )
    ranks = tuple(sorted(ranks[same].flatten().tolist()))
    boxes = _boxes(tensor, shape, coordinate)
    local = tuple(local_of(tensor).shape)
    extent = tuple(max((box.local[dim] + box.shape[dim] for box in boxes), default=0) for dim in range(len(shape)))
    if boxes and extent != local:
        raise Unencodable(f"a DTensor whose local part has shape {local}, where its placements make {extent}")
    return Spread(shape, boxes, ranks, team, layout)


def replicated(tensor: torch.Tensor, ranks: Sequence[int]) -> Spread:
    """A plain tensor of which all these ranks hold the same."""
    shape = tuple(tensor.shape)
    return Spread(shape, (whole_box(shape),), tuple(ranks), tuple(ranks), "replicated")


def whole_box(shape: Sequence[int]) -> Box:
    origin = (0,) * len(shape)
    return Box(origin, tuple(shape), origin)


def boxes_of(tensor: torch.Tensor) -> tuple[Box, ...]:
    """What of itself a live tensor holds here: all, or the boxes of a DTensor."""
    return spread_of(tensor).boxes if is_dtensor(tensor) else (whole_box(tensor.shape),)


def _boxes(tensor: Any, shape: tuple[int, ...], coordinate: Sequence[int]) -> tuple[Box, ...]:
    if any("Strided" in type(placement).__name__ for placement in tensor.placements):
        runs = _strided_runs(tensor, shape, coordinate)
    else:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
        runs = [[(at, 0, size)] for at, size in zip(offsets, sizes, strict=True)]
    found = []
    for combination in itertools.product(*runs):
        box = Box(
            tuple(run[0] for run in combination),
            tuple(run[2] for run in combination),
            tuple(run[1] for run in combination),
        )
        if 0 not in box.shape:
            found.append(box)
    return tuple(found)


def _strided_runs(tensor: Any, shape: tuple[int, ...], coordinate: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For each dimension the stretches of it that this rank holds: (first index, place in the local one, length).

    Found by sharding the list of indexes as torch shards the dimension: from the first mesh dimension to the last.
    """
    runs = []
    for dim, size in enumerate(shape):
        indexes = torch.arange(size)
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_replicate() or placement.dim != dim:
                continue
            flat = _along_first(placement)
            parts, _ = flat._split_tensor(
                indexes, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
            )
            indexes = parts[coordinate[mesh_dim]]
        runs.append(list(_stretches(indexes.tolist())))
    return runs


def _along_first(placement: Any) -> Any:
    """The same placement for a tensor of one dimension."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)


def _stretches(indexes: list[int]) -> Iterable[tuple[int, int, int]]:
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield indexes[start], start, at - start
            start = at


class TensorBox:
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
            raise ConfigError(
                f"TensorBox: a box of {sizes} at {self.offset} does not lie within a tensor of {self.shape}"
            )

    def __repr__(self) -> str:
        return f"TensorBox(shape={self.shape}, offset={self.offset}, of={tuple(self.tensor.shape)})"
