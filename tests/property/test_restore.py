"""Restoring in place: the same objects hold, bit for bit, what was saved."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillframe import Catalog, MismatchError, UnsupportedStateError
from tests.property.exact import exact
from tests.property.states import (
    RoundTrip,
    arrays,
    containers,
    examples,
    filled,
    findable_keys,
    round_trips,
    tensors,
    values,
)  # fmt: skip


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundTrip]:
    with round_trips(tmp_path_factory.mktemp("restore")) as made:
        yield made


# --- random states -------------------------------------------------------------------------


def restorable(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Keys without NaN: no dict can be asked for one."""
    return containers(inner, findable_keys)


holdings = st.dictionaries(
    st.text(max_size=4) | st.integers(0, 5),
    st.recursive(tensors() | values | arrays(), restorable, max_leaves=10),
    max_size=4,
)


def other_layout(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype, with other content and any strides."""
    junk = filled(tensor.dtype, 2 * tensor.numel(), b"\x55\xaa\x33")
    form = draw(st.sampled_from(["plain", "transposed", "strided", "offset", "parameter"]))
    if form == "transposed":
        return junk[: tensor.numel()].reshape(tensor.shape[::-1]).permute(tuple(reversed(range(tensor.dim()))))
    if form == "strided":
        return junk[::2].as_strided(tensor.shape, [2 * stride for stride in tensor.contiguous().stride()])
    if form == "offset":
        return junk[tensor.numel() :].reshape(tensor.shape)
    if form == "parameter":
        return torch.nn.Parameter(junk[: tensor.numel()].reshape(tensor.shape), requires_grad=False)
    return junk[: tensor.numel()].reshape(tensor.shape)


def blank(draw: st.DrawFn, state: Any) -> Any:
    """The same structure with other content."""
    if isinstance(state, torch.Tensor):
        return other_layout(draw, state)
    if isinstance(state, np.ndarray):
        return np.zeros(state.shape, state.dtype)
    if isinstance(state, dict):
        return type(state)((key, blank(draw, item)) for key, item in state.items())
    if type(state) in (list, tuple):
        return type(state)(blank(draw, item) for item in state)
    return draw(st.sampled_from([None, 0, "other", 2.5]))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    saved = draw(holdings)
    return saved, blank(draw, saved)


def objects(state: Any) -> list[Any]:
    """Everything that must stay the very same object."""
    found: list[Any] = []
    if isinstance(state, dict):
        found += [state, *(each for item in state.values() for each in objects(item))]
    elif isinstance(state, list):
        found += [state, *(each for item in state for each in objects(item))]
    elif type(state) is tuple:
        found += [each for item in state for each in objects(item)]
    elif isinstance(state, torch.Tensor | np.ndarray):
        found.append(state)
    return found


def addresses(state: Any) -> list[int]:
    return [each.data_ptr() for each in objects(state) if isinstance(each, torch.Tensor)]


@examples(120)
@given(pair=pairs())
def test_any_state_is_restored_in_place(trip: RoundTrip, pair: tuple[Any, Any]) -> None:
    saved, live = pair
    step = trip.save(saved)
    before, memory = objects(live), addresses(live)
    assert trip.checkpointer.restore(live).step == step
    assert exact(live) == exact(saved)
    assert [id(each) for each in objects(live)] == [id(each) for each in before]
    assert addresses(live) == memory


@examples(30)
@given(saved=holdings)
def test_restoring_what_was_just_saved_changes_nothing(trip: RoundTrip, saved: dict[Any, Any]) -> None:
    before = exact(saved)
    trip.save(saved)
    trip.checkpointer.restore(saved)
    assert exact(saved) == before


@examples(40)
@given(pair=pairs(), more=tensors())
def test_a_state_that_does_not_fit_is_not_touched(trip: RoundTrip, pair: tuple[Any, Any], more: torch.Tensor) -> None:
    saved, live = pair
    step = trip.save({"state": saved, "more": torch.zeros(3)})
    whole = {"state": live, "more": torch.full((4,), 7.0), "else": more}
    before = exact(whole)
    with pytest.raises(MismatchError, match="nothing was touched"):
        trip.checkpointer.restore(whole, step=step)
    assert exact(whole) == before


@examples(40)
@given(pair=pairs())
def test_what_matches_is_restored_when_asked_for(trip: RoundTrip, pair: tuple[Any, Any]) -> None:
    saved, live = pair
    step = trip.save({"state": saved, "gone": torch.ones(100), "other": torch.zeros(3)})
    whole = {"state": live, "other": torch.ones(4), "new": torch.ones(2)}
    with pytest.warns(RuntimeWarning, match="restored in part"):
        report = trip.checkpointer.restore(whole, step=step, strict=False)
    assert report.step == step
    assert exact(live) == exact(saved)
    assert exact(whole["other"]) == exact(torch.ones(4))
    assert (report.missing, report.unexpected) == (("new",), ("gone",))
    assert [line.split(":")[0] for line in report.mismatched] == ["other"]


# --- layouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_saved_expanded", [True, False])
def test_an_expanded_tensor_is_restored_in_the_one_row_it_has(trip: RoundTrip, is_saved_expanded: bool) -> None:
    row = torch.arange(50.0)
    trip.save({"w": row.expand(4, 50) if is_saved_expanded else row.repeat(4, 1)})
    live = {"w": torch.zeros(50).expand(4, 50)}
    trip.checkpointer.restore(live)
    assert exact(live["w"]) == exact(row.repeat(4, 1))
    assert live["w"].stride() == (0, 1)


def test_tied_tensors_stay_tied(trip: RoundTrip) -> None:
    weight = torch.randn(20, 20)
    trip.save({"a": weight, "b": weight.t(), "c": weight[3:9]})
    other = torch.zeros(20, 20)
    live = {"a": other, "b": other.t(), "c": other[3:9]}
    trip.checkpointer.restore(live)
    assert exact(other) == exact(weight)
    assert live["b"].data_ptr() == live["c"].data_ptr() - 3 * 20 * 4 == other.data_ptr()


def test_tied_tensors_are_restored_into_tensors_that_are_not(trip: RoundTrip) -> None:
    weight = torch.randn(20, 20)
    trip.save({"a": weight, "b": weight.t(), "c": weight[3:9]})
    live = {"a": torch.zeros(20, 20), "b": torch.zeros(20, 20), "c": torch.zeros(6, 20)}
    trip.checkpointer.restore(live)
    assert exact(live) == exact({"a": weight, "b": weight.t(), "c": weight[3:9]})


def test_a_conjugate_view_is_restored(trip: RoundTrip) -> None:
    saved = torch.randn(10, 10, dtype=torch.complex64)
    trip.save({"plain": saved, "conj": saved.conj()})
    live = {
        "plain": torch.zeros(10, 10, dtype=torch.complex64).conj(),
        "conj": torch.zeros(10, 10, dtype=torch.complex64),
    }
    trip.checkpointer.restore(live)
    assert exact(live) == exact({"plain": saved, "conj": saved.conj()})


def test_a_bare_tensor_is_restored(trip: RoundTrip) -> None:
    saved, live = torch.randn(100), torch.zeros(100)
    trip.save(saved)
    trip.checkpointer.restore(live)
    assert exact(live) == exact(saved)


def test_an_ordered_dict_stays_one(trip: RoundTrip) -> None:
    trip.save({"a": OrderedDict(x=1, y=torch.ones(2))})
    live = {"a": OrderedDict(x=0, y=torch.zeros(2))}
    trip.checkpointer.restore(live)
    assert exact(live) == exact({"a": OrderedDict(x=1, y=torch.ones(2))})


def read_only(size: int) -> Any:
    array = np.zeros(size)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("live", [(np.zeros(4),), (read_only(3),), np.zeros(4)], ids=["shape", "read-only", "bare"])
def test_an_array_that_can_neither_be_filled_nor_replaced_is_a_mismatch(trip: RoundTrip, live: Any) -> None:
    step = trip.save((np.ones(3),) if isinstance(live, tuple) else np.ones(3))
    with pytest.raises(MismatchError):
        trip.checkpointer.restore(live, step=step)


# --- modules, optimizers, objects ----------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5, centered=True),
}


class Training:
    def __init__(self, name: str, width: int, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
        ).to(dtype)
        self.model[2].weight = self.model[0].weight
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.data = torch.randn(4, width, generator=torch.Generator().manual_seed(7)).to(dtype)
        self.done = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.done += 1

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": {"done": self.done}}

    def content(self) -> Any:
        return exact([dict(self.model.state_dict()), self.optimizer.state_dict()])


@examples(25)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    width=st.integers(1, 24),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    steps=st.integers(0, 3),
    live_steps=st.integers(0, 2),
)
def test_a_module_and_its_optimizer_go_on_as_if_nothing_had_happened(
    trip: RoundTrip, name: str, width: int, dtype: torch.dtype, steps: int, live_steps: int
) -> None:
    first, second = Training(name, width, dtype, 1), Training(name, width, dtype, 2)
    for _ in range(steps):
        first.step()
    for _ in range(live_steps):
        second.step()
    parameters = [parameter.data_ptr() for parameter in second.model.parameters()]
    trip.save(first.state)
    live = second.state
    trip.checkpointer.restore(live)
    assert live["progress"] == {"done": steps}
    assert second.content() == first.content()
    assert [parameter.data_ptr() for parameter in second.model.parameters()] == parameters
    first.step()
    second.step()
    assert second.content() == first.content()


class Loader:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def test_an_object_gets_its_state_dict(trip: RoundTrip) -> None:
    trip.save({"loader": Loader(position=7, order=torch.randperm(50), names=("a", "b"))})
    live = {"loader": Loader(position=0)}
    trip.checkpointer.restore(live)
    assert live["loader"].state["position"] == 7
    assert live["loader"].state["names"] == ("a", "b")
    assert sorted(live["loader"].state["order"].tolist()) == list(range(50))


@pytest.mark.parametrize("stored", [5, "text", torch.ones(3), [1, 2]], ids=lambda stored: type(stored).__name__)
def test_an_object_does_not_get_what_is_no_state_dict(trip: RoundTrip, stored: Any) -> None:
    step = trip.save({"first": torch.ones(3), "loader": stored})
    live: dict[str, Any] = {"first": torch.zeros(3), "loader": Loader(position=0)}
    with pytest.raises(MismatchError):
        trip.checkpointer.restore(live, step=step)
    assert not live["first"].any()


# --- the checkpoint is not to blame --------------------------------------------------------


class Phase(enum.Enum):
    WARMUP = 1


class Renamed(enum.Enum):
    WARMING_UP = 1


@pytest.mark.parametrize("now", [None, Renamed], ids=["gone", "renamed"])
def test_an_enum_the_program_no_longer_has_never_condemns_the_checkpoint(
    trip: RoundTrip, monkeypatch: pytest.MonkeyPatch, now: Any
) -> None:
    step = trip.save({"phase": Phase.WARMUP, "w": torch.ones(3)})
    monkeypatch.setitem(globals(), "Phase", now)
    with pytest.raises(UnsupportedStateError):
        trip.checkpointer.restore({"phase": None, "w": torch.zeros(3)})
    assert Catalog(trip.root).latest() == step
