"""Small tensors: an optimizer's are staged lazily on a device, and so behind the fence; all others are captured."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.save import capture
from stillframe.save.device import AcceleratorDevice, DeviceTable
from stillframe.save.plan import Plan, make_plan
from stillframe.state.walk import Walk
from tests.device import queued
from tests.device.running import on_device
from tests.device.streams import training_on

LAYERS = 8
PARAMETERS = 2 * LAYERS
WAIT_S = 30.0


class Renewing(torch.optim.SGD):
    """Its count of steps is another tensor after each update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                before = self.state[parameter].get("step", torch.zeros((), device=parameter.device))
                self.state[parameter]["step"] = before + 1


def made(device: str, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    model = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(LAYERS)).to(device)
    optimizer = kind(model.parameters(), lr=1e-3, **options)  # type: ignore[call-arg]
    state = {"model": model, "optimizer": optimizer, "count": torch.zeros((), device=device)}
    update(state)
    return state


def update(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def steps_in(root: Path, step: int) -> set[float]:
    saved = stillframe.load(root, step)["optimizer"]["state"]
    assert len(saved) == PARAMETERS
    return {each["step"].item() for each in saved.values()}


def plan_of(state: Any) -> Plan:
    return make_plan(Walk(state), DeviceTable())


@on_device
def test_of_small_tensors_on_a_device_only_those_of_an_optimizer_are_lazy() -> None:
    assert plan_of(made("queued", fused=True)).captured_bytes == 4  # "count"
    on_host = made("cpu", fused=True)
    assert plan_of(on_host).captured_bytes == 4 * (PARAMETERS + 1)
    offloaded = {"optimizer": made("queued")["optimizer"]}  # without fused=True the steps are on the host
    assert plan_of(offloaded).captured_bytes == 4 * PARAMETERS
    state = made("queued", fused=True)
    assert plan_of({"optimizer": state["optimizer"].state_dict()}).captured_bytes == 4 * PARAMETERS  # nobody's


@on_device
def test_what_is_lazy_and_small_goes_in_one_copy() -> None:
    plan = plan_of(made("queued", fused=True))
    small = [shard for shard in plan.shards if shard.name.endswith("/step")]
    assert len(small) == PARAMETERS
    assert all(a.end == b.start for a, b in itertools.pairwise(small))
    assert len(plan.chunks[0].copies) == 2  # "count", and all the rest


@on_device
def test_a_small_tensor_that_an_optimizer_shares_with_somebody_else_is_captured() -> None:
    state = made("queued", fused=True)
    tied = next(iter(state["optimizer"].state.values()))["step"]
    assert plan_of({**state, "count": tied.view(1)}).captured_bytes == 4


@pytest.mark.parametrize("is_held", [True, False])
@on_device
def test_the_next_update_waits_for_the_copy_of_the_steps(tmp_path: Path, is_held: bool) -> None:
    """If it does not (the control), its own values are saved, so they were not captured."""
    with training_on("own") as (stream, _), Checkpointer(tmp_path) as checkpointer:
        state = made("queued", fused=True)
        stream.synchronize()
        queued.stop_copies()
        with contextlib.nullcontext() if is_held else mock.patch.object(AcceleratorDevice, "order_after"):
            save = checkpointer.save(1, state)
            checkpointer.fence()
            update(state)
            if not is_held:
                stream.synchronize()
        queued.let_copies_go()
        save.wait(timeout_s=WAIT_S)
        stream.synchronize()
    assert steps_in(tmp_path, 1) == ({1.0} if is_held else {2.0})


@on_device
def test_a_counter_of_the_users_own_may_change_right_after_save(tmp_path: Path) -> None:
    with training_on("own") as (stream, _), Checkpointer(tmp_path) as checkpointer:
        state = made("queued", fused=True)
        queued.stop_copies()
        save = checkpointer.save(1, state)
        state["count"].add_(1)
        stream.synchronize()
        queued.let_copies_go()
        save.wait(timeout_s=WAIT_S)
    assert stillframe.load(tmp_path, 1)["count"] == 0


@on_device
def test_an_optimizer_that_makes_its_steps_anew_costs_one_more_plan(tmp_path: Path) -> None:
    with training_on("own"), Checkpointer(tmp_path) as checkpointer:
        state = made("queued", Renewing)
        with mock.patch.object(capture, "make_plan", wraps=make_plan) as plans:
            for step in range(1, 7):
                checkpointer.save(step, state).wait(timeout_s=WAIT_S)
                update(state)
        assert plans.call_count == 2
    assert [steps_in(tmp_path, step) for step in range(1, 7)] == [{float(step)} for step in range(1, 7)]
