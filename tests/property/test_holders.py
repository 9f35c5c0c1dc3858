"""Who holds which box of a tensor, in whole numbers: the same as torch's own division of it, for any mesh."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stillframe.errors import FormatError
from stillframe.format.layout import MOST_WRITERS, Layout, check_layout, holders, make_layout, writers_of
from stillframe.state.torch_internals import division_of, split_as
from tests.property.states import examples


@dataclass
class Case:
    mesh: tuple[int, ...]
    ranks: list[int]
    placements: list[object]
    tensor: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        known = [division_of(placement) for placement in self.placements]
        cuts = [each for each in known if each is not None]
        assert len(cuts) == len(known)
        return make_layout(self.mesh, self.ranks, [dim for dim, _ in cuts], [factor for _, factor in cuts])


@st.composite
def numbered(draw: st.DrawFn, count: int) -> list[int]:
    """The ranks of a mesh: in a row, a part of a larger mesh, or in any order."""
    kind = draw(st.sampled_from(["row", "part", "any"]))
    if kind == "any":
        return draw(st.permutations(range(3, 3 + 2 * count, 2)))
    return list(range(5, 5 + count)) if kind == "row" else list(range(1, 1 + 4 * count, 4))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensor = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = st.integers(0, len(tensor) - 1)
    placement = (
        st.just(Replicate())
        | dims.map(Shard)
        | st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4))
    )
    offset = tuple(draw(st.integers(0, size - 1)) for size in tensor)
    shape = tuple(draw(st.integers(1, size - at)) for size, at in zip(tensor, offset, strict=True))
    ranks = draw(numbered(math.prod(mesh)))
    return Case(mesh, ranks, [draw(placement) for _ in mesh], tensor, offset, shape)


def held_by(case: Case, coordinate: tuple[int, ...]) -> list[set[int]]:
    """For each dimension of the tensor the indexes that torch gives to the rank at this place."""
    found = []
    for dim, size in enumerate(case.tensor):
        indexes = torch.arange(size)
        for mesh_dim, placement in enumerate(case.placements):
            if not isinstance(placement, Replicate) and placement.dim == dim:  # type: ignore[attr-defined]
                indexes = split_as(placement, indexes, case.mesh[mesh_dim])[coordinate[mesh_dim]]
        found.append(set(indexes.tolist()))
    return found


@examples(400)
@given(case=cases())
def test_the_ranks_that_hold_any_of_a_box_are_found_and_no_others(case: Case) -> None:
    wanted = [set(range(at, at + size)) for at, size in zip(case.offset, case.shape, strict=True)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in zip(case.ranks, itertools.product(*map(range, case.mesh)), strict=True):
        held = held_by(case, coordinate)
        if all(mine & its for mine, its in zip(held, wanted, strict=True)):
            places = zip(coordinate, case.placements, strict=True)
            fixed = tuple(-1 if isinstance(placement, Replicate) else at for at, placement in places)
            alike.setdefault(fixed, []).append(rank)
    found = holders(case.layout, case.tensor, case.offset, case.shape)
    assert sorted(found) == sorted(tuple(sorted(ranks)) for ranks in alike.values())


@examples(100)
@given(case=cases())
def test_a_mesh_is_written_down_and_read_back(case: Case) -> None:
    layout = case.layout
    check_layout(layout, max(case.ranks) + 1)
    places = itertools.product(*map(range, case.mesh))
    assert [layout.rank_at(coordinate) for coordinate in places] == case.ranks


def test_a_regular_mesh_of_any_size_takes_a_line() -> None:
    ranks = [stage + 4 * rank for stage in range(4) for rank in range(4096)]
    layout = make_layout((4, 512, 8), ranks, [None, 0, 1])
    assert (layout.first, layout.strides, layout.ranks) == (0, (1, 32, 4), ())
    assert holders(layout, (1024, 64), (512, 0), (2, 8)) == [tuple(8192 + stage for stage in range(4))]


@given(count=st.integers(1, 500))
def test_few_of_the_ranks_that_hold_the_same_write_it(count: int) -> None:
    ranks = range(7, 7 + 3 * count, 3)
    found = writers_of(ranks)
    assert len(set(found)) == len(found) == min(count, MOST_WRITERS)
    assert set(found) <= set(ranks)
    assert list(found) == sorted(found)
    gaps = [later - earlier for earlier, later in itertools.pairwise([*found, ranks[0] + 3 * count])]
    assert max(gaps) - min(gaps) <= 3


@pytest.mark.parametrize(
    ("layout", "about"),
    [
        (Layout((4,), (0,), strides=(0,)), "twice"),
        (Layout((2, 2), (0, 1), strides=(1, 0)), "twice"),
        (Layout((3,), (0,), ranks=(0, 1, 1)), "twice"),
        (Layout((5,), (0,), strides=(1,)), "twice"),
        (Layout((4,), (0,), factors=(2_000_000,), strides=(1,)), "impossible"),
    ],
)
def test_a_layout_that_would_take_for_ever_is_refused(layout: Layout, about: str) -> None:
    with pytest.raises(FormatError, match=about):
        check_layout(layout, 4)
