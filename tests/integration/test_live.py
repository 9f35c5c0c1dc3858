"""A state dict that stands still: live memory where an update alone changes it, copies of the rest."""

from __future__ import annotations

import threading
from typing import Any

import torch

from stillframe.spi import LiveState, mapped


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_parameters_and_optimizer_state_stay_and_buffers_are_copied() -> None:
    model, optimizer = made()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loose": torch.ones(3)}
    still = LiveState().state(state)
    weight, buffer = "0.weight", "1.running_mean"
    assert still["model"][weight].data_ptr() == state["model"][weight].data_ptr()
    assert still["model"][buffer].data_ptr() != state["model"][buffer].data_ptr()
    assert torch.equal(still["model"][buffer], state["model"][buffer])
    assert still["optimizer"]["state"][0]["exp_avg"] is state["optimizer"]["state"][0]["exp_avg"]
    assert still["loose"] is not state["loose"]


def test_parameters_that_no_optimizer_has_are_copied_if_asked_for() -> None:
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    state = {"model": model.state_dict(), "average": average.module.state_dict(), "optimizer": optimizer.state_dict()}
    still = LiveState(by_optimizers=True).state(state)
    assert still["model"]["0.weight"].data_ptr() == state["model"]["0.weight"].data_ptr()
    assert still["average"]["0.weight"].data_ptr() != state["average"]["0.weight"].data_ptr()
    assert still["optimizer"]["state"][0]["exp_avg"] is state["optimizer"]["state"][0]["exp_avg"]


def test_a_part_of_a_flat_parameter_stays() -> None:
    flat = torch.zeros(100)
    optimizer = torch.optim.SGD([flat[10:60]], lr=1.0)
    state = {"in": flat[20:40], "across": flat[50:70], "before": flat[:5]}
    still = LiveState().state(state)
    assert still["in"] is state["in"]
    assert still["across"] is not state["across"]
    assert still["before"] is not state["before"]
    del optimizer


def test_a_parameter_that_became_a_buffer_is_copied() -> None:
    """Even at the same path and in the same memory."""
    memory = torch.zeros(50)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(memory)
    still = LiveState()
    assert still.state(model.state_dict())["weight"].data_ptr() == memory.data_ptr()
    del model.weight
    model.register_buffer("weight", memory)
    assert still.state(model.state_dict())["weight"].data_ptr() != memory.data_ptr()


def test_copies_lie_in_the_same_memory_from_state_to_state_and_keep_ties() -> None:
    still = LiveState()
    buffer = torch.zeros(50)
    first = still.state({"a": buffer, "b": buffer})
    assert first["a"] is first["b"]
    buffer += 1
    second = still.state({"a": buffer, "b": buffer})
    assert second["a"] is first["a"]
    assert torch.equal(second["a"], torch.ones(50))


def test_values_are_copied() -> None:
    state: dict[str, Any] = {"list": [1, [2]], "set": {1}, "tuple": (1, {"x": [3]})}
    still = LiveState().state(state)
    state["list"][1].append(9)
    state["set"].add(9)
    state["tuple"][1]["x"].append(9)
    assert still == {"list": [1, [2]], "set": {1}, "tuple": (1, {"x": [3]})}


def test_what_was_tied_once_is_not_tied_forever() -> None:
    still = LiveState()
    now = torch.ones(50)
    still.state({"now": now, "best": now})
    later = still.state({"now": now * 2, "best": now})
    assert torch.equal(later["now"], torch.full((50,), 2.0))
    assert torch.equal(later["best"], torch.ones(50))


def test_only_what_is_the_same_item_by_item_is_tied() -> None:
    square = torch.arange(9.0).view(3, 3)
    number = torch.tensor([1 + 2j])
    state = {"a": square, "b": square.t(), "c": number, "d": number.conj(), "e": torch.ones(2).to_sparse()}
    still = LiveState().state(state)
    for name, each in state.items():
        assert torch.equal(still[name].to_dense(), each.to_dense()), name


def test_a_dict_with_keys_of_its_own_kind_is_a_leaf() -> None:
    seen = []

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        seen.append(path)
        return value

    mapped({"a": {torch.float32: torch.ones(2)}, "b": {1: 2}}, leaf)
    assert seen == [("a",), ("b", 1)]


def test_frozen_parameters_and_neighbours_in_memory_are_copied() -> None:
    big = torch.zeros(100)
    model = torch.nn.Module()
    model.even = torch.nn.Parameter(big[::2])
    model.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    model.register_buffer("odd", big[1:-1:2])
    still = LiveState().state(dict(model.state_dict()))
    big += 1
    with torch.no_grad():
        model.frozen.add_(1)
    assert float(still["odd"].max()) == 0
    assert float(still["frozen"].max()) == 0


def test_an_embedding_that_its_forward_scales_down_is_copied_but_not_its_optimizer_state() -> None:
    model = torch.nn.EmbeddingBag(6, 4, max_norm=0.1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = model.weight.detach().clone()
    still = LiveState().state(state)
    model(torch.tensor([[3, 4]]))
    assert not torch.equal(model.weight, before)
    assert torch.equal(still["model"]["weight"], before)
    assert still["optimizer"]["state"][0]["exp_avg"] is state["optimizer"]["state"][0]["exp_avg"]


def test_what_cannot_be_copied_is_left_for_others_to_refuse() -> None:
    lock = threading.Lock()
    assert LiveState().state({"x": lock})["x"] is lock
