"""TrainState in one process: names instead of numbers, whatever the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Checkpointer, ConfigError, MismatchError, TrainState
from tests import layout
from tests.support import assert_same, make_model, train_step


def trained(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(parameter.numel()))
    optimizer.step()
    return optimizer


def by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }


def test_the_state_finds_its_parameter_in_another_order(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = trained(model, list(model.parameters()))
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["exp_avg"].fill_(number)
    expected = by_name(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, TrainState(model, optimizer)).wait()
        for parameters in (list(model.parameters())[::-1], list(model.parameters())):
            for fresh in (torch.optim.AdamW(parameters), trained(model, parameters)):
                checkpointer.restore(TrainState(model, fresh))
                assert_same(by_name(model, fresh), expected)


def test_it_resumes_exactly_as_a_part_of_a_state_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"train": TrainState(model, optimizer, position=7), "note": ["a"]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait()
        train_step(model, optimizer)
        state["train"].more["position"] = 9  # type: ignore[attr-defined]
        assert checkpointer.restore(state).step == 1
    assert_same(dict(model.state_dict()), before)
    assert state["train"].more == {"position": 7}  # type: ignore[attr-defined]


def test_what_was_saved_from_an_optimizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).wait()
        with pytest.raises(MismatchError, match="numbers its parameters"):
            checkpointer.restore(TrainState(model, optimizer))


def test_what_is_no_model_or_not_its_optimizer_is_refused(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    with pytest.raises(ConfigError, match=r"not a torch\.nn\.Module"):
        TrainState({})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not a torch\.optim\.Optimizer"):
        TrainState(model, model)  # type: ignore[arg-type]
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="not one of the model's"):
        checkpointer.save(1, TrainState(model, torch.optim.SGD(other.parameters())))


@pytest.mark.parametrize("shared", [0, 1, "no"])
def test_shared_is_yes_or_no(tmp_path: Path, shared: Any) -> None:
    with pytest.raises(ConfigError, match="give True, False or None"):
        Checkpointer(tmp_path, shared=shared)


def test_only_the_node_is_replaced_in_a_root(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only thing in braces"):
        Checkpointer(tmp_path / "{nod}")


def test_a_root_of_ranks_that_did_not_share_it_is_no_fresh_start(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait()
    layout.unshare(tmp_path, 1)
    before = layout.files_of(tmp_path, 1)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(MismatchError, match="did not share their roots"):
        checkpointer.restore(state)
    assert layout.files_of(tmp_path, 1) == before
