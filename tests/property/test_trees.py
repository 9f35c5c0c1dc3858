"""Any nesting of anything that is stored comes back equal in structure, types and bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import UnsupportedStateError
from stillframe.format import limits
from stillframe.state.codecs import register_leaf
from tests.property.exact import exact
from tests.property.states import DTYPES, RoundTrip, examples, filled, round_trips, states, tensors
from tests.support import assert_same


class Box:
    """A leaf of the user's own."""

    def __init__(self, content: Any) -> None:
        self.content = content


register_leaf(Box, "tests.property.Box", lambda box: box.content, Box)


class Loader:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundTrip]:
    with round_trips(tmp_path_factory.mktemp("trees")) as made:
        yield made


@examples(150)
@given(state=states)
def test_any_state_comes_back_exactly(trip: RoundTrip, state: Any) -> None:
    assert exact(trip.load(state)) == exact(state)


@examples(20)
@given(state=states)
def test_what_an_object_or_a_leaf_holds_comes_back_exactly(trip: RoundTrip, state: Any) -> None:
    loaded = trip.load({"object": Loader({"a": state}), "leaf": Box(state), "nested": [Box([Box(state)])]})
    assert exact(loaded["object"]) == exact({"a": state})
    assert exact(loaded["leaf"].content) == exact(state)
    assert exact(loaded["nested"][0].content[0].content) == exact(state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_in_every_size(trip: RoundTrip, dtype: torch.dtype) -> None:
    pattern = bytes(range(1, 252))
    state = {
        "0-dim": filled(dtype, 1, pattern).reshape(()),
        "no elements": filled(dtype, 0, pattern).reshape(3, 0, 2),
        "small": filled(dtype, 5, pattern),
        "lazy": filled(dtype, 1000, pattern).reshape(10, 100),
        "transposed": filled(dtype, 1000, pattern).reshape(10, 100).t(),
    }
    assert_same(trip.load(state), {**state, "transposed": state["transposed"].contiguous()})


@examples(20)
@given(made=st.lists(tensors(), min_size=1, max_size=12))
def test_the_same_structure_saved_again_holds_the_new_content(trip: RoundTrip, made: list[torch.Tensor]) -> None:
    trip.save(made)
    for tensor in made:
        tensor.copy_(filled(tensor.dtype, tensor.numel(), b"new content").reshape(tensor.shape))
    assert exact(trip.load(made)) == exact(made)


@examples(20)
@given(first=states, second=states)
def test_a_save_never_remembers_the_one_before(trip: RoundTrip, first: Any, second: Any) -> None:
    trip.save(first)
    assert exact(trip.load(second)) == exact(second)


def nested(depth: int, leaf: Any, is_dict: bool) -> Any:
    state = leaf
    for _ in range(depth):
        state = {"a": state} if is_dict else (state,)
    return state


@pytest.mark.parametrize(
    "leaf", [1, torch.ones(2), np.ones(2), Box(1), Loader({"a": 1}), {1, 2}], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("is_dict", [True, False])
def test_whatever_depth_is_accepted_can_be_loaded(trip: RoundTrip, leaf: Any, is_dict: bool) -> None:
    accepted = 0
    for depth in range(limits.MAX_DEPTH - 4, limits.MAX_DEPTH + 3):
        try:
            step = trip.save(nested(depth, leaf, is_dict))
        except UnsupportedStateError:
            continue
        accepted += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a list does not fit
            trip.checkpointer.restore(Loader({}), step=step, strict=False)
    assert accepted
