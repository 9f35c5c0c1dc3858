"""Who writes what of that which several ranks hold alike: everything once, and everybody about as much."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stillframe.state.division import Cut, cut_dimension, shares

items = st.tuples(st.integers(0, 300), st.integers(0, 1 << 16)).map(lambda item: (item[0] * item[1], item[0]))
"""A tensor as (bytes, rows); all of its rows have as many bytes."""
uncuttable = st.tuples(st.integers(0, 1 << 20), st.just(1))
counts = st.integers(1, 9)


def written(sizes: list[tuple[int, int]], cuts: list[list[Cut]], count: int) -> list[int]:
    """How many bytes each holder writes."""
    totals = [0] * count
    for (nbytes, rows), each in zip(sizes, cuts, strict=True):
        for cut in each:
            totals[cut.holder] += (cut.end - cut.start) * nbytes // max(rows, 1)
    return totals


@given(sizes=st.lists(items | uncuttable, max_size=12), count=counts)
def test_every_row_is_written_exactly_once(sizes: list[tuple[int, int]], count: int) -> None:
    found = shares(sizes, count)
    assert len(found) == len(sizes)
    for (_, rows), cuts in zip(sizes, found, strict=True):
        ends = [0, *(cut.end for cut in cuts)]
        assert [cut.start for cut in cuts] == ends[:-1]
        assert ends[-1] == rows
        assert all(0 <= cut.holder < count for cut in cuts)


@given(sizes=st.lists(items | uncuttable, min_size=1, max_size=12), count=counts)
def test_every_holder_writes_its_share_to_within_a_row(sizes: list[tuple[int, int]], count: int) -> None:
    """At either end of its share a row, or something that cannot be cut, may go to a neighbour."""
    totals = written(sizes, shares(sizes, count), count)
    coarsest = max(math.ceil(nbytes / max(rows, 1)) for nbytes, rows in sizes)
    even = sum(nbytes for nbytes, _ in sizes) / count
    assert sum(totals) == sum(nbytes for nbytes, _ in sizes)
    assert all(abs(each - even) <= coarsest + 2 for each in totals)


@given(sizes=st.lists(items | uncuttable, max_size=12), count=counts)
def test_at_most_one_tensor_is_cut_for_each_border(sizes: list[tuple[int, int]], count: int) -> None:
    pieces = sum(len(cuts) for cuts in shares(sizes, count) if cuts)
    assert pieces <= len(sizes) + count - 1


@given(sizes=st.lists(items | uncuttable, max_size=12), count=counts)
def test_holders_follow_one_another_in_order(sizes: list[tuple[int, int]], count: int) -> None:
    """So each has one stretch of all the bytes."""
    holders = [
        cut.holder for (nbytes, _), cuts in zip(sizes, shares(sizes, count), strict=True) if nbytes for cut in cuts
    ]
    assert holders == sorted(holders)


@given(shape=st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_a_tensor_is_cut_where_it_is_fine_enough_else_where_it_is_finest(shape: list[int]) -> None:
    dim = cut_dimension(shape)
    if max(shape) < 64:
        assert shape[dim] == max(shape)
    else:
        assert shape[dim] >= 64
        assert all(size < 64 for size in shape[:dim])
