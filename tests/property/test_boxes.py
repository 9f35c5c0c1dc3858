"""Boxes make up a tensor if and only if each of its items lies in exactly one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import ConfigError, FormatError
from stillframe.format.layout import make_up
from stillframe.state.boxes import TensorBox


@st.composite
def cut(draw: Any) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], tuple[int, ...]]:
    """A tensor cut into boxes, perhaps with one of them moved, doubled or dropped."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offset, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, size in ((0, at), (at, sizes[dim] - at)):
            moved = (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])
            boxes.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :])))
    change = draw(st.sampled_from(["none", "drop", "double", "move"]))
    chosen = draw(st.integers(0, len(boxes) - 1))
    if change in ("drop", "move"):
        offset, sizes = boxes.pop(chosen)
        if change == "move":
            room = [st.integers(0, whole - size) for whole, size in zip(shape, sizes, strict=True)]
            boxes.append((draw(st.tuples(*room)), sizes))
    elif change == "double":
        boxes.append(boxes[chosen])
    return boxes, shape


@given(cut())
def test_boxes_make_up_a_tensor_if_each_item_lies_in_one(
    given: tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], tuple[int, ...]],
) -> None:
    boxes, shape = given
    count = torch.zeros(shape, dtype=torch.int64)
    for offset, sizes in boxes:
        count[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))] += 1
    assert make_up(boxes, shape) == bool((count == 1).all())


def test_many_dimensions_cost_nothing_unless_the_tensor_is_divided_in_them() -> None:
    ones = (1,) * 60
    halves = [((0, *(0,) * 60), (2, *ones)), ((2, *(0,) * 60), (2, *ones))]
    assert make_up(halves, (4, *ones))
    assert not make_up(halves[:1], (4, *ones))
    assert not make_up([((0,), (4,))], (4, *ones))  # a box of another tensor
    with pytest.raises(FormatError, match="13 dimensions"):
        make_up([((0,) * 13, (1,) * 13)], (2,) * 13)
    with pytest.raises(ConfigError, match="13 dimensions"):
        TensorBox(torch.zeros((1,) * 13), (2,) * 13, (0,) * 13)
