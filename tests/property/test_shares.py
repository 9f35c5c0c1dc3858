"""Who writes which box of what several ranks hold alike: everything once, and every rank about as much."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stillframe.state.boxes import Box
from stillframe.state.division import HeldBox, assign, row_dimension


@st.composite
def held_boxes(draw: st.DrawFn, *, least: int = 0, largest: int = 300) -> list[HeldBox]:
    shapes = st.lists(st.integers(0, largest), max_size=2) | st.lists(st.integers(1, 70), min_size=3, max_size=3)
    found = []
    for _ in range(draw(st.integers(least, 12))):
        shape = tuple(draw(shapes))
        offset = tuple(draw(st.integers(0, 100)) for _ in shape)
        local = tuple(draw(st.integers(0, 100)) for _ in shape)
        found.append(HeldBox(Box(offset, shape, local), draw(st.sampled_from([1, 2, 4, 8])), draw(st.booleans())))
    return found


ranks = st.lists(st.integers(0, 100), min_size=1, max_size=9, unique=True).map(sorted)


def nbytes(held: HeldBox, box: Box) -> int:
    return held.item_bytes * math.prod(box.shape)


@given(boxes=held_boxes(), ranks=ranks)
def test_the_assigned_boxes_tile_each_box(boxes: list[HeldBox], ranks: list[int]) -> None:
    found = assign(boxes, ranks)
    for held, parts in zip(boxes, found, strict=True):
        assert all(rank in ranks for rank, _ in parts)
        if len(parts) == 1:
            assert parts[0][1] == held.box
            continue
        assert held.is_divisible
        dim = row_dimension(held.box.shape)
        end = held.box.offset[dim]
        for _, box in parts:
            assert box.offset[dim] == end
            assert box.shape[dim] > 0
            assert box.local[dim] - held.box.local[dim] == box.offset[dim] - held.box.offset[dim]
            for one, other in ((box.offset, held.box.offset), (box.shape, held.box.shape), (box.local, held.box.local)):
                assert (*one[:dim], *one[dim + 1 :]) == (*other[:dim], *other[dim + 1 :])
            end += box.shape[dim]
        assert end == held.box.offset[dim] + held.box.shape[dim]


@given(boxes=held_boxes(least=1), ranks=ranks)
def test_every_rank_writes_its_share_to_within_a_row(boxes: list[HeldBox], ranks: list[int]) -> None:
    """At either end of its share a row, or a box that cannot be divided, may go to a neighbour."""
    written = dict.fromkeys(ranks, 0)
    for held, parts in zip(boxes, assign(boxes, ranks), strict=True):
        for rank, box in parts:
            written[rank] += nbytes(held, box)
    coarsest = max(math.ceil(held.nbytes / max(held.rows, 1)) for held in boxes)
    total = sum(held.nbytes for held in boxes)
    assert sum(written.values()) == total
    assert all(abs(each - total / len(ranks)) <= coarsest + 2 for each in written.values())


@given(boxes=held_boxes(), ranks=ranks)
def test_at_most_one_box_is_divided_for_each_border(boxes: list[HeldBox], ranks: list[int]) -> None:
    assert sum(len(parts) for parts in assign(boxes, ranks)) <= len(boxes) + len(ranks) - 1


@given(boxes=held_boxes(), ranks=ranks)
def test_ranks_follow_one_another_in_order(boxes: list[HeldBox], ranks: list[int]) -> None:
    """So each has one stretch of all the bytes."""
    found = [rank for held, parts in zip(boxes, assign(boxes, ranks), strict=True) if held.nbytes for rank, _ in parts]
    assert found == sorted(found)


@given(boxes=held_boxes(), rank=st.integers(0, 5))
def test_a_rank_alone_writes_everything_whole(boxes: list[HeldBox], rank: int) -> None:
    assert assign(boxes, [rank]) == [[(rank, held.box)] for held in boxes]


@given(shape=st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_a_tensor_is_divided_where_it_is_fine_enough_else_where_it_is_finest(shape: list[int]) -> None:
    dim = row_dimension(shape)
    if max(shape) < 64:
        assert shape[dim] == max(shape)
    else:
        assert shape[dim] >= 64
        assert all(size < 64 for size in shape[:dim])
