"""Counts of steps of torch's own optimizers are staged lazily on a device, behind the fence; all else that is small is
captured."""

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


class Own(torch.optim.AdamW):
    """Of no class that torch has: nobody knows what it writes when."""


class Stateless(torch.optim.Optimizer):
    """As some wrappers are: it has nothing of torch's optimizer but the class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


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
def test_of_small_tensors_on_a_device_only_counts_of_steps_are_lazy() -> None:
    assert plan_of(made("queued", fused=True)).captured_bytes == 4  # "count"
    on_host = made("cpu", fused=True)
    assert plan_of(on_host).captured_bytes == 4 * (PARAMETERS + 1)
    offloaded = {"optimizer": made("queued")["optimizer"]}  # without fused=True the steps are on the host
    assert plan_of(offloaded).captured_bytes == 4 * PARAMETERS
    state = made("queued", fused=True)
    assert plan_of({"optimizer": state["optimizer"].state_dict()}).captured_bytes == 4 * PARAMETERS  # nobody's
    assert plan_of({"optimizer": made("queued", Own, fused=True)["optimizer"]}).captured_bytes == 4 * PARAMETERS


@on_device
def test_nothing_else_of_an_optimizer_is_lazy_and_small() -> None:
    state = made("queued", fused=True)
    optimizer, model = state["optimizer"], state["model"]
    optimizer.state["micro"] = {"step": torch.zeros((), device="queued")}
    optimizer.state[model[0].weight]["scale"] = torch.zeros((), device="queued")
    optimizer.helper = Stateless(optimizer)
    assert plan_of(state).captured_bytes == 4 * len(["count", "micro", "scale"])


@on_device
def test_what_is_lazy_and_small_goes_in_one_copy() -> None:
    plan = plan_of(made("queued", fused=True))
    small = [shard for shard in plan.shards if shard.name.endswith("/step")]
    assert len(small) == PARAMETERS
    assert all(a.end == b.start for a, b in itertools.pairwise(small))
    assert len(plan.chunks[0].copies) == 2  # "count", and all the rest


@pytest.mark.parametrize(
    ("shared", "captured"),
    [("itself", 1), ("view", 1), ("buffer", 2), ("unsaved buffer", 1), ("group", 1), ("storage", PARAMETERS + 1)],
)
@on_device
def test_a_count_of_steps_whose_memory_is_somebody_elses_too_is_captured(shared: str, captured: int) -> None:
    state = made("queued", fused=True)
    optimizer, model = state["optimizer"], state["model"]
    tied = next(iter(optimizer.state.values()))["step"]
    del state["count"]
    if shared == "storage":  # one with a counter of the user's own, which may change at any time
        flat = torch.zeros(PARAMETERS + 1, device="queued")
        for number, each in enumerate(optimizer.state.values()):
            each["step"] = flat[number]
        state["count"] = flat[PARAMETERS]
    elif "buffer" in shared:
        model[0].register_buffer("amax", tied, persistent=shared == "buffer")
    elif shared == "group":
        optimizer.param_groups[0]["lr"] = tied
    else:
        state["count"] = tied if shared == "itself" else tied.view(1)
    assert plan_of(state).captured_bytes == 4 * captured


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
def test_counts_of_steps_that_are_made_anew_cost_one_more_plan(tmp_path: Path) -> None:
    with training_on("own"), Checkpointer(tmp_path) as checkpointer:
        state = made("queued", fused=True)
        with mock.patch.object(capture, "make_plan", wraps=make_plan) as plans:
            for step in range(1, 7):
                checkpointer.save(step, state).wait(timeout_s=WAIT_S)
                update(state)
                for each in state["optimizer"].state.values():
                    each["step"] = each["step"].clone()
        assert plans.call_count == 2
    assert [steps_in(tmp_path, step) for step in range(1, 7)] == [{float(step)} for step in range(1, 7)]
