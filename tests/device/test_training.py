"""A transformer is trained, the host ahead and the copies late: each save is, bit for bit, what the state was.

The truth is a second training of the same bits that waits for the device at each of these points.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.save.device import AcceleratorDevice
from tests.device import queued
from tests.device.models import Kind, Recipe, on_cpu, states, train
from tests.device.running import on_device
from tests.device.streams import On, side_streams, training_on
from tests.support import assert_same

STEPS = 3
LATE_S = 0.02


def train_and_save(root: Path, recipe: Recipe, *, is_held: bool = True, audit: bool = False) -> Any:
    """Save once in each step, before the first part of the batch, the second, and so on.  Copies are held back until
    all of the step is queued, or, if ``is_held`` is False, has run.  Gives the state at the end."""
    gates: list[queued.Gate] = []

    def save(state: dict[str, Any], number: int, part: int) -> None:
        if part != number % recipe.accumulate:
            return
        if number and not gates and not audit:  # an audit waits for the device
            gates.extend(queued.Gate(each) for each in side_streams(checkpointer))
        checkpointer.save(number, state)

    def after() -> None:
        if is_held:
            time.sleep(LATE_S)
        else:
            for device in range(2):
                torch.accelerator.current_stream(torch.device("queued", device)).synchronize()
        while gates:
            gates.pop().open()

    with Checkpointer(root, audit=audit) as checkpointer:
        return train(recipe, STEPS, save, after)


def wrong(root: Path, recipe: Recipe) -> list[str]:
    """What is not as it was."""
    found = []
    truths = states(recipe, STEPS)
    for number in range(STEPS):
        part = number % recipe.accumulate
        saved, truth = stillframe.load(root, number), truths[number, part]
        for name in truth:
            try:
                assert_same(on_cpu(saved[name]), truth[name])
            except AssertionError as error:
                found.append(f"step {number}, part {part}, {name}: {error}")
    return found


@pytest.mark.parametrize(
    ("kind", "on"),
    [("plain", "own"), ("foreach", "own"), ("fused", "own"), ("in_backward", "own"), ("offloaded", "own"),
     ("fused", "default"), ("in_backward", "default")],
)  # fmt: skip
@on_device
def test_each_save_is_what_the_state_was(tmp_path: Path, kind: Kind, on: On) -> None:
    recipe = Recipe(kind, dropout=0.1)
    with training_on(on):
        end = train_and_save(tmp_path, recipe)
        assert wrong(tmp_path, recipe) == []
        assert_same(end, train(recipe, STEPS))


@pytest.mark.parametrize("kind", ["foreach", "in_backward"])
@on_device
def test_the_halves_of_a_model_on_two_devices(tmp_path: Path, kind: Kind) -> None:
    recipe = Recipe(kind, devices=("queued:0", "queued:1"), dropout=0.1)
    with training_on("own"):
        train_and_save(tmp_path, recipe)
        assert wrong(tmp_path, recipe) == []


@on_device
def test_gradients_that_are_gathered_over_parts_of_a_batch(tmp_path: Path) -> None:
    """Saved between the parts: there the parameters stand still, the buffers of the norm do not."""
    recipe = Recipe(accumulate=3, dropout=0.1)
    with training_on("own"):
        train_and_save(tmp_path, recipe)
        assert wrong(tmp_path, recipe) == []


@pytest.mark.parametrize("kind", ["fused", "in_backward"])
@on_device
def test_an_audit_agrees(tmp_path: Path, kind: Kind) -> None:
    recipe = Recipe(kind)
    with training_on("own"):
        train_and_save(tmp_path, recipe, audit=True)
        assert wrong(tmp_path, recipe) == []


@on_device
def test_without_the_hold_every_parameter_is_of_the_next_step(tmp_path: Path) -> None:
    recipe = Recipe("fused")
    with training_on("own"), mock.patch.object(AcceleratorDevice, "order_after"):
        train_and_save(tmp_path, recipe, is_held=False)
        truth = states(recipe, STEPS)
    for number in range(1, STEPS - 1):
        saved = stillframe.load(tmp_path, number)["model"]
        for name, tensor in saved.items():
            is_parameter = "running" not in name and "tracked" not in name
            assert torch.equal(tensor, truth[number + is_parameter, 0]["model"][name]), (number, name)
