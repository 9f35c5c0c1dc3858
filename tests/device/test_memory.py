"""Device memory: none is kept between saves, and ``save`` takes little of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.latch import Latch
from stillframe.save.device import CAPTURE_BYTES
from stillframe.save.survey import BLOCK
from tests.device import queued
from tests.device.models import Recipe, Training, on_cpu
from tests.device.running import on_device
from tests.device.streams import side_streams, training_on
from tests.device.test_order import Weights, odd_tensors
from tests.support import assert_same, until

WAIT_S = 30.0


class Average:
    """Neither module nor optimizer: it may change at any moment."""

    def __init__(self, count: int, parts: int) -> None:
        self.parts = [torch.zeros(count, device="queued") for _ in range(parts)]
        self.steps = [torch.zeros((), device="queued") for _ in range(50)]

    def fill(self, value: float) -> None:
        for each in (*self.parts, *self.steps):
            each.fill_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def to(training: Training, device: str) -> None:
    """The model and its optimizer, which has to be told: for this device torch makes other parameters."""
    optimizer, before = training.state["optimizer"], list(training.model.parameters())
    training.model.to(device)
    for old, new in zip(before, training.model.parameters(), strict=True):
        optimizer.state[new] = {key: value.to(device) for key, value in optimizer.state.pop(old).items()}
    optimizer.param_groups[0]["params"] = list(training.model.parameters())


def moves() -> dict[str, Callable[[Training], None]]:
    """How a loop makes room."""

    def move(training: Training) -> None:
        to(training, "cpu")

    def clear(training: Training) -> None:
        for tensor in (*training.model.parameters(), *training.model.buffers()):
            tensor.data = torch.empty(0, device="queued")
        training.state["optimizer"].state.clear()

    def drop(training: Training) -> None:
        training.state.clear()
        training._optimizers.clear()
        del training.model

    return {"move": move, "clear": clear, "drop": drop}


def linger_when_staged(checkpointer: Checkpointer) -> Latch:
    """Whoever says that a save is staged does nothing more until this is unlocked."""
    go_on, saves = Latch(), checkpointer._stager._saves
    say = saves.staged

    def linger(*arguments: Any) -> None:
        say(*arguments)
        go_on.wait(WAIT_S)

    saves.staged = linger  # type: ignore[assignment,method-assign]
    return go_on


@pytest.mark.parametrize("how", ["move", "clear", "drop"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
@on_device
def test_a_state_that_is_moved_away_frees_its_memory(tmp_path: Path, kind: str, how: str) -> None:
    """While the checkpointer is open, its plan at hand, which has served twice, and somebody has the save.

    At once when the save is staged: the thread that says so comes no further here.
    """
    gc.collect()
    before = queued.allocated()
    with training_on("own") as (stream, _), Checkpointer(tmp_path) as checkpointer:
        training = Training(Recipe(kind=kind))  # type: ignore[arg-type]
        training.step()
        checkpointer.save(0, training.state).wait(timeout_s=WAIT_S)
        go_on = linger_when_staged(checkpointer)
        save = checkpointer.save(1, training.state)
        save.wait("staged", timeout_s=WAIT_S)
        wanted = on_cpu(training.state)
        training.model.zero_grad(set_to_none=True)
        moves()[how](training)
        gc.collect()
        stream.synchronize()
        assert queued.allocated() == before
        go_on.unlock()
        save.wait(timeout_s=WAIT_S)
        if how == "move":  # and back: the next save is right, in other memory
            to(training, "queued")
            checkpointer.save(2, training.state).wait(timeout_s=WAIT_S)
            assert_same(stillframe.load(tmp_path, 2), wanted)
    assert_same(stillframe.load(tmp_path, 1), wanted)


@on_device
def test_what_lies_where_the_state_lay_is_saved_in_its_place(tmp_path: Path) -> None:
    """The same addresses and forms, so the same plan; once in storages of their own, once in another's."""
    with training_on("own"), Checkpointer(tmp_path) as checkpointer:
        flat = torch.zeros(3_000_000, device="queued")
        state = [flat[:1_000_000], flat[1_000_000:2_999_000], flat[2_999_000:]]
        for step in range(3):
            flat.fill_(step)
            checkpointer.save(step, state).wait(timeout_s=WAIT_S)
            state = [each.view(each.shape) for each in state]  # other objects
            if step == 1:
                state[1] = torch.full_like(state[1], 2.0)  # elsewhere
    for step in range(3):
        assert [each.unique().tolist() for each in stillframe.load(tmp_path, step)] == [[float(step)]] * 3


@pytest.mark.parametrize("before", [0, 2], ids=["a new plan", "a plan used again"])
@on_device
def test_a_tensor_that_is_given_other_memory_before_it_is_copied_is_saved_as_it_was(
    tmp_path: Path, before: int
) -> None:
    """No fence, and nothing that torch counts: the stager has not begun when the memory is exchanged."""
    with training_on("own") as (stream, _), Checkpointer(tmp_path) as checkpointer:
        small = [torch.nn.Parameter(torch.ones(300, device="queued")) for _ in range(BLOCK + 20)]
        large = torch.nn.Parameter(torch.ones(1000, 1000, device="queued"))
        state = [*small, large, torch.ones(30, 40, device="queued").t()]
        for step in range(before):
            checkpointer.save(step, state).wait(timeout_s=WAIT_S)
        stream.synchronize()
        hold = Latch()
        checkpointer._stager.run_soon(lambda: hold.wait(WAIT_S))  # type: ignore[arg-type]
        save = checkpointer.save(9, state)
        for parameter in (*small[:10], *small[-10:], large):
            parameter.data = torch.full_like(parameter, 7.0)
        for _ in range(3):
            torch.full((1000, 1000), 9.0, device="queued")
        hold.unlock()
        save.wait(timeout_s=WAIT_S)
    assert {value for each in stillframe.load(tmp_path, 9) for value in each.unique().tolist()} == {1.0}


@on_device
def test_odd_tensors_are_saved_by_a_plan_that_is_used_again(tmp_path: Path) -> None:
    with training_on("own"), Checkpointer(tmp_path) as checkpointer:
        state = odd_tensors(BLOCK + 188)
        for step in range(2):
            for each in state.values():
                if each.numel() and each.dtype is not torch.bool and 0 not in each.stride():
                    each.add_(1)
            wanted = {name: tensor.cpu() for name, tensor in state.items()}
            checkpointer.save(step, state).wait(timeout_s=WAIT_S)
            assert_same(stillframe.load(tmp_path, step), wanted)


@on_device
def test_a_large_average_takes_no_second_one_on_the_device(tmp_path: Path) -> None:
    """More than is captured there goes to host memory, in the order of compute all the same."""
    with training_on("own") as (stream, _), Checkpointer(tmp_path, arena="256MiB") as checkpointer:
        average, model = Average(10_000_000, 2), Weights(count=100_000)
        assert CAPTURE_BYTES < 80_000_000
        state = {"average": average, "model": model}
        checkpointer.save(0, state).wait(timeout_s=WAIT_S)
        stream.synchronize()
        queued.set_limit(queued.allocated() + (16 << 20))
        compute = queued.Gate(stream)
        average.fill(1)
        model.fill(1)
        save = checkpointer.save(1, state)
        average.fill(2)  # at once: it is not behind a fence
        checkpointer.fence()
        model.fill(2)
        assert save.phase == "captured"
        compute.open()
        save.wait(timeout_s=WAIT_S)
    loaded = stillframe.load(tmp_path, 1)
    found = [*loaded["average"]["parts"], *loaded["average"]["steps"], loaded["model"]["weights"]]
    assert {value for each in found for value in each.unique().tolist()} == {1.0}


@on_device
def test_what_waiting_saves_have_captured_on_the_device_is_bounded(tmp_path: Path) -> None:
    with training_on("own"), Checkpointer(tmp_path, arena="256MiB") as checkpointer:
        average = Average(5_000_000, 1)
        checkpointer.save(0, {"average": average}).wait(timeout_s=WAIT_S)
        before = queued.allocated()
        gates = [queued.Gate(each) for each in side_streams(checkpointer)]
        for step in range(1, 7):
            average.fill(step)
            checkpointer.save(step, {"average": average})
        assert before + 40_000_000 < queued.allocated() <= before + CAPTURE_BYTES
        for gate in gates:
            gate.open()
        checkpointer.wait(timeout_s=WAIT_S)
        until(lambda: queued.allocated() == before, "what was captured being freed")
    for step in range(1, 7):
        assert stillframe.load(tmp_path, step)["average"]["parts"][0].unique().tolist() == [float(step)]
