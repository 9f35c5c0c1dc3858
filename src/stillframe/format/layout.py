"""Which ranks hold which boxes of a tensor: a mesh of ranks, and the tensor's dimension that each of its own divides.

A seal records the layout of every tensor whose ranks are known.  So whoever wants a box of a tensor works out which
ranks may have written it, and reads only their seals.  A layout says where to look; what is there, the seals say.

The geometry is that of DTensor, in whole numbers: a mesh dimension of ``n`` ranks divides a tensor's dimension as
``torch.chunk`` does.  With a split factor ``f`` it first makes ``f`` pieces, and then divides each of these.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from stillframe.errors import FormatError
from stillframe.format import limits

MOST_WRITERS = 64
"""So many of the ranks that hold the same boxes write them, at most.  Who reads these boxes reads the seals of all."""

_Cuts = tuple[tuple[int, int], ...]
"""How often a dimension is divided, one time after the other: into how many, and the split factor."""
_Stretches = tuple[tuple[int, int], ...]
"""Parts of a dimension, in order: where each begins, and its length."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``mesh`` is its shape; ``dims`` has for each of its dimensions the one that it divides, ``None``: replicas.

    The rank at a coordinate is ``first`` and each index times its stride; or, where that does not tell, ``ranks`` has
    all of them in row-major order.
    """

    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]
    factors: tuple[int, ...] = ()
    """Split factors; empty: all are 1."""
    first: int = 0
    strides: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def rank_at(self, coordinate: Sequence[int]) -> int:
        if not self.ranks:
            return self.first + sum(at * stride for at, stride in zip(coordinate, self.strides, strict=True))
        number = 0
        for at, size in zip(coordinate, self.mesh, strict=True):
            number = number * size + at
        return self.ranks[number]


def make_layout(
    mesh: Sequence[int], ranks: Sequence[int], dims: Sequence[int | None], factors: Sequence[int] = ()
) -> Layout:
    """``ranks``: of the mesh, in row-major order."""
    shape = tuple(mesh)
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    strides = tuple(
        ranks[step] - ranks[0] if size > 1 else 0 for size, step in zip(shape, steps, strict=True)
    )  # fmt: skip
    split = tuple(factors) if any(factor != 1 for factor in factors) else ()
    found = Layout(shape, tuple(dims), split, ranks[0], strides)
    is_regular = all(
        found.rank_at(coordinate) == rank
        for coordinate, rank in zip(itertools.product(*map(range, shape)), ranks, strict=True)
    )
    return found if is_regular else Layout(shape, tuple(dims), split, ranks=tuple(ranks))


def writers_of(ranks: Sequence[int]) -> tuple[int, ...]:
    """Of the ranks that hold the same boxes, in order, those that write them: spread over all, so over all nodes."""
    count = min(len(ranks), MOST_WRITERS)
    return tuple(ranks[number * len(ranks) // count] for number in range(count))


def holders(
    layout: Layout, tensor: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> list[tuple[int, ...]]:
    """The ranks that hold anything of a box of a tensor of this shape: for each part of it those that hold it alike.

    Each is in order.
    """
    cuts: list[list[int]] = [[] for _ in tensor]
    for mesh_dim, dim in enumerate(layout.dims):
        if dim is not None:
            cuts[dim].append(mesh_dim)
    factors = layout.factors or (1,) * len(layout.mesh)
    fixed: list[list[tuple[tuple[int, int], ...]]] = []
    """For each dimension of the tensor that is divided: (mesh dimension, index) of each part that is wanted."""
    for dim, mesh_dims in enumerate(cuts):
        if mesh_dims:
            how = tuple((layout.mesh[each], factors[each]) for each in mesh_dims)
            found = _wanted(tensor[dim], how, offset[dim], offset[dim] + shape[dim])
            fixed.append([tuple(zip(mesh_dims, indexes, strict=True)) for indexes in found])
    return [_alike(layout, tuple(itertools.chain(*each))) for each in itertools.product(*fixed)]


@lru_cache(maxsize=1024)
def _alike(layout: Layout, fixed: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The ranks at these indexes of the mesh; any along its other dimensions."""
    indexes: list[Iterable[int]] = [range(size) for size in layout.mesh]
    for mesh_dim, index in fixed:
        indexes[mesh_dim] = (index,)
    return tuple(sorted(map(layout.rank_at, itertools.product(*indexes))))


@lru_cache(maxsize=1024)
def _wanted(length: int, cuts: _Cuts, start: int, end: int) -> list[tuple[int, ...]]:
    """Many tensors have the same shape."""
    return _indexes(((0, length),), cuts, start, end)


def _indexes(stretches: _Stretches, cuts: _Cuts, start: int, end: int) -> list[tuple[int, ...]]:
    """The parts, by their index in each of the cuts, that have anything between ``start`` and ``end``."""
    if not cuts:
        return [()]
    (count, factor), rest = cuts[0], cuts[1:]
    found: list[tuple[int, ...]] = []
    for index in _candidates(stretches, count, factor, start, end):
        part = _part(stretches, count, factor, index)
        if any(at < end and start < at + length for at, length in part):
            found += [(index, *more) for more in _indexes(part, rest, start, end)]
    return found


def _candidates(stretches: _Stretches, count: int, factor: int, start: int, end: int) -> Iterable[int]:
    """The indexes that come into question.  Of one stretch these are few, however many ranks there are."""
    if len(stretches) != 1:
        return range(count)
    begin, length = stretches[0]
    found: set[int] = set()
    for at, until in _pieces(length, factor):
        first, last = max(start - begin, at) - at, min(end - begin, until) - at
        if first < last:
            size = -(-(until - at) // count)
            found.update(range(first // size, (last - 1) // size + 1))
    return sorted(found)


def _part(stretches: _Stretches, count: int, factor: int, index: int) -> _Stretches:
    """What one of ``count`` ranks holds of what these stretches make up."""
    found: list[tuple[int, int]] = []
    for at, until in _pieces(sum(length for _, length in stretches), factor):
        size = -(-(until - at) // count)
        found += _between(stretches, min(at + index * size, until), min(at + (index + 1) * size, until))
    return tuple(found)


def _pieces(length: int, factor: int) -> Iterable[tuple[int, int]]:
    size = max(-(-length // factor), 1)
    return ((at, min(at + size, length)) for at in range(0, length, size))


def _between(stretches: _Stretches, start: int, end: int) -> Iterable[tuple[int, int]]:
    """These positions, counted along the stretches laid end to end."""
    position = 0
    for at, length in stretches:
        first, last = max(start - position, 0), min(end - position, length)
        if first < last:
            yield at + first, last - first
        position += length


def make_up(boxes: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether these boxes, each given by offset and shape, tile a tensor: every item lies in exactly one of them.

    A box is the sum, with alternating signs, of the orthants that begin at its corners, and no other sum of orthants is
    the same.  So boxes tile the tensor if and only if their corners add up to those of the whole.  Sizes alone do not
    tell: boxes that overlap hide a hole.
    Raises :class:`FormatError` if it is divided in more dimensions than the format allows.
    """
    if 0 in shape:
        return True
    if any(not len(offset) == len(sizes) == len(shape) for offset, sizes in boxes):
        return False
    divided = [
        dim
        for dim, size in enumerate(shape)
        if any(offset[dim] != 0 or sizes[dim] != size for offset, sizes in boxes)
    ]  # fmt: skip
    if not divided:
        return len(boxes) == 1
    if len(divided) > limits.MAX_DIVIDED:
        raise FormatError(f"a tensor is divided in {len(divided)} dimensions; {limits.MAX_DIVIDED} are allowed")
    corners: Counter[tuple[int, ...]] = Counter()
    for weight, offset, sizes in [(-1, (0,) * len(shape), shape), *((1, *box) for box in boxes)]:
        ends = [(offset[dim], offset[dim] + sizes[dim]) for dim in divided]
        for which in itertools.product((0, 1), repeat=len(divided)):
            corners[tuple(end[at] for end, at in zip(ends, which, strict=True))] += weight * (-1) ** sum(which)
    return not any(corners.values())


def check_layout(layout: Layout, world_size: int) -> None:
    """Raises :class:`FormatError`."""
    mesh, count = layout.mesh, math.prod(layout.mesh[: limits.MAX_DIMENSIONS])
    is_mesh = len(mesh) <= limits.MAX_DIMENSIONS and min(mesh, default=1) > 0 and count <= limits.MAX_RANKS
    factors = layout.factors or (1,) * len(mesh)
    is_divided = (
        len(layout.dims) == len(factors) == len(mesh)
        and min(factors, default=1) > 0
        and math.prod(factors) * count <= limits.MAX_PIECES
    )
    if not is_mesh or not is_divided:
        raise FormatError(f"a layout has an impossible mesh {mesh}")
    if len(layout.ranks) not in (0, count) or (not layout.ranks and len(layout.strides) != len(mesh)):
        raise FormatError(f"a layout names {len(layout.ranks)} ranks of a mesh {mesh}")
    is_alone = all(stride != 0 for size, stride in zip(mesh, layout.strides, strict=False) if size > 1)
    if count > world_size or not is_alone or len({*layout.ranks}) < len(layout.ranks):
        raise FormatError(f"a layout has a rank twice in its mesh {mesh}")
    ends = [(size - 1) * stride for size, stride in zip(mesh, layout.strides, strict=False)]
    lowest = min(layout.ranks, default=layout.first + sum(min(end, 0) for end in ends))
    highest = max(layout.ranks, default=layout.first + sum(max(end, 0) for end in ends))
    if lowest < 0 or highest >= world_size:
        raise FormatError(f"a layout has rank {lowest if lowest < 0 else highest} of {world_size}")


def check_divides(layout: Layout, dimensions: int, tensor: str) -> None:
    """Raises :class:`FormatError` if it cannot be the layout of a tensor of so many dimensions."""
    for dim in layout.dims:
        if dim is not None and not 0 <= dim < dimensions:
            raise FormatError(f"tensor {tensor!r} of {dimensions} dimensions has a layout that divides {layout.dims}")
