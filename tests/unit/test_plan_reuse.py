"""A plan is used again exactly as long as it does what a new one would do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stillframe.save import survey
from stillframe.save.device import DeviceTable
from stillframe.save.plan import MOVED_BYTES, Plan, make_plan
from stillframe.save.survey import BLOCK
from stillframe.state.torch_internals import form_check
from stillframe.state.walk import Walk
from tests.unit.test_plan import Fresh, by_name, mixed_state, plan_of, staged


@pytest.fixture(autouse=True, params=["torch compares", "attribute by attribute"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch may lack the function that compares all forms at once."""
    if request.param == "attribute by attribute":
        monkeypatch.setattr(survey, "form_check", lambda tensors: lambda *others: False)


def fits_again(plan: Plan, state: Any) -> bool:
    return plan.fit(Walk(state)) is not None


def square(side: int = 8) -> torch.Tensor:
    return torch.arange(side * side).float().reshape(side, side)


def test_a_plan_fits_the_same_state_again() -> None:
    state = mixed_state()
    assert fits_again(plan_of(state), state)


def test_a_plan_fits_when_only_content_and_values_have_changed() -> None:
    state: dict[str, Any] = {"w": square(), "step": 1, "log": [1.0]}
    plan = plan_of(state)
    state["w"].zero_()
    state["step"], state["log"] = 2, [1.0, 2.0]
    assert fits_again(plan, state)
    assert by_name(plan, staged(plan, state))["w"] == bytes(256)


def test_a_plan_fits_new_objects_of_the_same_form_where_tensors_are_captured() -> None:
    state = {"fresh": Fresh((3, 3), (5,)), "array": np.zeros(5)}
    plan = plan_of(state)
    state["array"] = np.ones(5)
    assert fits_again(plan, state)
    assert by_name(plan, staged(plan, state))["array"] == np.ones(5).tobytes()


def test_a_plan_fits_another_view_of_the_same_memory_and_form() -> None:
    tensor = square()
    assert fits_again(plan_of({"a": tensor}), {"a": tensor.detach()})


def test_a_plan_fits_a_frozen_parameter_and_in_every_context() -> None:
    state = {"w": torch.nn.Parameter(square()), "b": square()}
    plan = plan_of(state)
    with torch.autocast("cpu"):
        assert fits_again(plan, state)
    with torch.inference_mode():
        assert fits_again(plan, state)
    assert fits_again(plan, state)
    state["w"].requires_grad_(False)
    assert fits_again(plan, state)


def test_torch_compares_the_forms_here_and_says_no_in_doubt() -> None:
    tensors = [square(), torch.nn.Parameter(square()), torch.zeros(4, dtype=torch.complex64)]
    is_same = form_check(tensors)
    assert is_same(*tensors)
    assert is_same(*(each.clone().detach_().requires_grad_(each.requires_grad) for each in tensors)) is False  # a class
    assert not is_same(*tensors[:2], tensors[2].conj())
    assert not is_same(*tensors[:2], torch._neg_view(tensors[2]))
    assert not is_same(square().t(), *tensors[1:])
    assert not is_same(square().to("meta"), *tensors[1:])
    assert not is_same(square().to_sparse(), *tensors[1:])


@pytest.mark.parametrize("index", [0, BLOCK - 1, BLOCK, BLOCK + 9])
def test_every_tensor_is_looked_at_whichever_block_it_is_in(index: int) -> None:
    tensors = [square() for _ in range(BLOCK + 10)]
    plan = plan_of(tensors)
    tensors[index].add_(1)
    survey = plan.fit(Walk(tensors))
    assert survey is not None
    assert survey.addresses == [each.data_ptr() for each in tensors]
    assert survey.versions == [each._version for each in tensors]
    assert survey.versions[index] == 1
    tensors[index].t_()  # where it was
    assert not fits_again(plan, tensors)


class Changes:
    """Ways in which the state may differ at the next save."""

    @staticmethod
    def swap_data(state: dict[str, Any]) -> None:
        state["w"].data = state["w"].data * 2

    @staticmethod
    def resize(state: dict[str, Any]) -> None:
        state["w"].resize_(2, 8)

    @staticmethod
    def other_dtype(state: dict[str, Any]) -> None:
        state["w"] = state["w"].double()

    @staticmethod
    def other_dtype_in_place(state: dict[str, Any]) -> None:
        state["w"].data = state["w"].data.double()

    @staticmethod
    def reinterpret(state: dict[str, Any]) -> None:
        state["w"].data = state["w"].data.view(torch.int32)

    @staticmethod
    def transpose_in_place(state: dict[str, Any]) -> None:
        state["w"].t_()

    @staticmethod
    def restride_in_place(state: dict[str, Any]) -> None:
        state["w"].as_strided_(state["w"].shape, (0, 1))

    @staticmethod
    def new_key(state: dict[str, Any]) -> None:
        state["new"] = torch.ones(100)

    @staticmethod
    def lost_key(state: dict[str, Any]) -> None:
        del state["v"]

    @staticmethod
    def other_order(state: dict[str, Any]) -> None:
        state["w"] = state.pop("w")

    @staticmethod
    def new_tensor(state: dict[str, Any]) -> None:
        state["w"] = state["w"] + 1

    @staticmethod
    def tie(state: dict[str, Any]) -> None:
        state["w"] = state["v"]

    @staticmethod
    def tie_the_other(state: dict[str, Any]) -> None:
        state["v"] = state["w"]

    @staticmethod
    def untie_the_first(state: dict[str, Any]) -> None:
        state["pair"][0] = (state["pair"][0] + 1).t().contiguous().t()

    @staticmethod
    def untie_the_second(state: dict[str, Any]) -> None:
        state["pair"][1] = (state["pair"][1] + 1).t().contiguous().t()

    @staticmethod
    def object_instead(state: dict[str, Any]) -> None:
        state["w"] = Fresh(tuple(state["w"].shape))

    @staticmethod
    def other_array(state: dict[str, Any]) -> None:
        state["array"] = np.zeros(5, np.float32)

    @staticmethod
    def longer_array(state: dict[str, Any]) -> None:
        state["array"] = np.zeros(6)

    @staticmethod
    def tie_captured(state: dict[str, Any]) -> None:
        state["fresh"].is_tied = True

    @staticmethod
    def untie_captured(state: dict[str, Any]) -> None:
        state["tied"].is_tied = False


CHANGES = [name for name in vars(Changes) if not name.startswith("_")]


def changing_state(side: int) -> dict[str, Any]:
    strided = square(side).t()
    return {
        "w": square(side),
        "v": square(side),
        "pair": [strided, strided],
        "array": np.zeros(5),
        "fresh": Fresh((9,), (9,)),
        "tied": Fresh((9,), (9,), is_tied=True),
    }


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_does_not_fit_after(change: str) -> None:
    state = changing_state(8)
    plan = plan_of(state)
    assert fits_again(plan, state)
    getattr(Changes, change)(state)
    assert not fits_again(plan, state)


@pytest.mark.parametrize("side", [2, 4, 8])
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_fits_does_what_a_new_one_would_do(change: str, side: int) -> None:
    """Small tensors are captured at every save anew, so a plan may fit although they were replaced."""
    state = changing_state(side)
    plan = plan_of(state)
    getattr(Changes, change)(state)
    if fits_again(plan, state):
        new = plan_of(state)
        assert plan.layout == new.layout
        assert staged(plan, state) == staged(new, state)


def test_a_plan_does_not_fit_a_parameter_that_became_conjugate() -> None:
    state = {"z": torch.randn(20, dtype=torch.complex64)}
    plan = plan_of(state)
    state["z"].data = state["z"].data.conj()
    assert not fits_again(plan, state)


def test_a_plan_does_not_fit_a_tensor_that_became_sparse() -> None:
    plan = plan_of({"w": square()})
    assert not fits_again(plan, {"w": square().to_sparse()})


def test_a_plan_keeps_the_memory_it_knows_by_address() -> None:
    state = {"w": square()}
    plan = plan_of(state)
    for _ in range(20):
        state["w"] = square()  # would get the old address if the plan did not hold on to it
        assert not fits_again(plan, state)


def test_a_small_tensor_that_is_new_at_each_save_costs_one_more_plan() -> None:
    weights = square()
    first = plan_of({"w": weights, "random": torch.full((1000,), 1.0), "view": weights[2:]})
    second = {"w": weights, "random": torch.full((1000,), 2.0), "view": weights[2:]}
    assert not fits_again(first, second)
    moved = first.moved(Walk(second))
    assert [Walk(second).tensors[index].numel() for index in moved] == [1000]
    plan = make_plan(Walk(second), DeviceTable(), moved=moved)
    third = {"w": weights, "random": torch.full((1000,), 3.0), "view": weights[2:]}
    assert fits_again(plan, third)
    assert by_name(plan, staged(plan, third)) == {"random": third["random"].numpy().tobytes(), "w": bytes_of(weights)}
    other = {"w": square(), "random": third["random"], "view": weights[2:]}
    assert not fits_again(plan, other)
    assert plan.moved(Walk(other)) == moved  # a tensor with aliases is never captured for that


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_tensors_that_are_large_or_became_sparse_are_planned_anew() -> None:
    large = plan_of({"w": torch.zeros(MOVED_BYTES // 4 + 1)})
    assert not large.moved(Walk({"w": torch.zeros(MOVED_BYTES // 4 + 1)}))
    assert plan_of({"w": square()}).moved(Walk({"w": square()}))
    assert not plan_of({"w": square()}).moved(Walk({"w": square().to_sparse()}))
    assert not plan_of({"w": square()}).moved(Walk({"v": square()}))


def test_what_was_alone_and_is_a_view_now_is_planned_anew() -> None:
    """Tensors that are new at every save may be tied at one of them."""
    apart = plan_of({"a": torch.zeros(1000), "b": torch.zeros(500)})
    whole = torch.zeros(1000)
    tied = Walk({"a": whole, "b": whole[200:700]})
    assert not apart.moved(tied), "each would be stored by itself"
    small = plan_of({"a": torch.zeros(8), "b": torch.zeros(2)})
    whole = torch.zeros(8)
    assert fits_again(small, {"a": torch.zeros(8), "b": torch.zeros(2)})
    assert not fits_again(small, {"a": whole, "b": whole[3:5]})
    assert not fits_again(small, {"a": whole, "b": whole[:2]})
    fixed = torch.zeros(1000)
    beside = plan_of({"a": fixed, "b": torch.zeros(2)})
    assert fits_again(beside, {"a": fixed, "b": torch.zeros(2)})
    assert not fits_again(beside, {"a": fixed, "b": fixed[5:7]})
