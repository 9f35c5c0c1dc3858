"""The order between compute, copy and update, on torch's own streams; and what is saved where a part of it is missing.

The host runs ahead of everything: streams are held and copies are stopped, so that what could come first does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.save.device import AcceleratorDevice
from tests.device import queued
from tests.device.running import on_device
from tests.device.streams import On, side_streams, training_on
from tests.support import assert_same, until

COUNT = 6_000_000
STOP = 5_000_000
"""Bytes: in the midst of the first chunk of two."""

both_streams = pytest.mark.parametrize("on", ["default", "own"])


class Weights(torch.nn.Module):
    """One tensor that is copied lazily, and one that is captured."""

    buffer: torch.Tensor

    def __init__(self, device: str = "queued", count: int = COUNT) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(count, device=device), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(4, device=device))

    def fill(self, value: float, *, is_counted: bool = True) -> None:
        for each in (self.weights, self.buffer):
            (each if is_counted else each.data).fill_(value)


def values(root: Path, step: int) -> tuple[list[float], list[float]]:
    """Which values the weights and the buffer have in a checkpoint."""
    loaded = stillframe.load(root, step)["model"]
    return loaded["weights"].unique().tolist(), loaded["buffer"].unique().tolist()


@both_streams
@on_device
def test_a_save_holds_what_was_queued_before_it_and_nothing_from_behind_the_fence(tmp_path: Path, on: On) -> None:
    with training_on(on) as (stream, _), Checkpointer(tmp_path) as checkpointer:
        model = Weights()
        checkpointer.save(0, {"model": model}).wait()
        compute = queued.Gate(stream)
        model.fill(1)  # still to come when save() is called
        queued.stop_copies(after=STOP)
        before = queued.copied()
        save = checkpointer.save(1, {"model": model})
        checkpointer.fence()  # returns: neither waits on the host
        assert save.phase == "captured"
        model.fill(2)  # the update
        assert queued.peek(model.weights).sum() == 0  # nothing of it has happened
        assert queued.copied() == before
        compute.open()
        until(lambda: queued.copied() - before == STOP, "the first bytes being copied")
        assert queued.peek(model.weights).sum() == COUNT  # the update waits for the rest
        assert not queued.is_idle(stream)
        queued.let_copies_go()
        save.wait()
        stream.synchronize()
        assert queued.peek(model.weights).sum() == 2 * COUNT
    assert values(tmp_path, 1) == ([1.0], [1.0])


@both_streams
@on_device
def test_without_the_fence_the_next_value_is_saved(tmp_path: Path, on: On) -> None:
    """Nobody notices, as torch does not count it; what it counts fails the save."""
    with training_on(on) as (stream, _), Checkpointer(tmp_path, on_error="warn") as checkpointer:
        model = Weights()
        for step, is_counted in ((1, False), (2, True)):
            model.fill(1)
            stream.synchronize()
            queued.stop_copies()
            save = checkpointer.save(step, {"model": model})
            assert save.job.issued.wait(10)
            model.fill(2, is_counted=is_counted)
            stream.synchronize()
            queued.let_copies_go()
            with pytest.raises(stillframe.TornError) if is_counted else contextlib.nullcontext():
                save.wait()
    assert values(tmp_path, 1) == ([2.0], [1.0])  # what was captured is safe
    assert stillframe.Catalog(tmp_path).steps() == [1]


@both_streams
@on_device
def test_without_the_mark_two_values_are_mixed(tmp_path: Path, on: On) -> None:
    def begin(self: AcceleratorDevice, mark: Any) -> None:
        torch.accelerator.set_stream(self._side)

    with training_on(on) as (stream, _), Checkpointer(tmp_path) as checkpointer:
        model = Weights()
        checkpointer.save(0, {"model": model}).wait()
        compute = queued.Gate(stream)
        model.fill(1)
        queued.stop_copies(after=STOP)
        before = queued.copied()
        with mock.patch.object(AcceleratorDevice, "begin", begin):
            save = checkpointer.save(1, {"model": model})
            until(lambda: queued.copied() - before == STOP, "bytes being copied before they are made")
        compute.open()
        stream.synchronize()
        queued.let_copies_go()
        save.wait()
    weights, buffer = values(tmp_path, 1)
    assert weights == [0.0, 1.0]
    assert buffer != [1.0]


@both_streams
@on_device
def test_without_the_hold_the_next_value_is_saved_behind_a_fence(tmp_path: Path, on: On) -> None:
    with training_on(on) as (stream, _), Checkpointer(tmp_path) as checkpointer:
        model = Weights()
        model.fill(1)
        stream.synchronize()
        queued.stop_copies(after=STOP)
        with mock.patch.object(AcceleratorDevice, "order_after"):
            save = checkpointer.save(1, {"model": model})
            checkpointer.fence()
            model.fill(2)
            stream.synchronize()
        queued.let_copies_go()
        save.wait()
    assert values(tmp_path, 1)[0] == [1.0, 2.0]


@pytest.mark.parametrize(("on", "arena", "count"), [("default", "128MiB", COUNT), ("own", "32MiB", 10_000_000)])
@on_device
def test_saves_in_a_row_each_hold_their_own_step(tmp_path: Path, on: On, arena: str, count: int) -> None:
    """In an arena that holds several of them, and in one that is smaller than the state."""
    queued.set_rate(1e9)
    with training_on(on), Checkpointer(tmp_path, arena=arena) as checkpointer:
        model = Weights(count=count)
        for step in range(1, 4):
            checkpointer.fence()
            model.fill(step)
            checkpointer.save(step, {"model": model})
    for step in range(1, 4):
        assert values(tmp_path, step) == ([float(step)], [float(step)]), step


@both_streams
@on_device
def test_two_devices_and_the_host_are_one_save(tmp_path: Path, on: On) -> None:
    """Each device's order is its own: one is held before its compute, the other in its copy."""
    with training_on(on) as streams, Checkpointer(tmp_path) as checkpointer:
        models = [Weights(f"queued:{each}", 2_500_000) for each in range(2)]
        host = torch.zeros(2_500_000)
        state = {"models": models, "host": host}
        checkpointer.save(0, state).wait()
        for step, slow in ((1, 0), (2, 1)):
            checkpointer.fence()
            compute = queued.Gate(streams[slow])
            queued.stop_copies(after=STOP, device=1 - slow)
            before = queued.copied(1 - slow)
            for model in models:
                model.fill(step)
            host.fill_(step)
            checkpointer.save(step, state)
            checkpointer.fence()
            for model in models:
                model.fill(100)
            host.fill_(100)
            until(lambda: queued.copied(1 - slow) - before == STOP, "the other device's copy")  # noqa: B023
            assert queued.peek(models[slow].weights).unique().tolist() == [0.0 if step == 1 else 100.0]
            assert queued.peek(models[1 - slow].weights).unique().tolist() == [float(step)]
            compute.open()
            queued.let_copies_go()
            checkpointer.wait()
    for step in (1, 2):
        loaded = stillframe.load(tmp_path, step)
        for name, tensor in [("host", loaded["host"]), *enumerate(each["weights"] for each in loaded["models"])]:
            assert tensor.unique().tolist() == [float(step)], (step, name)


def odd(number: int, before: torch.Tensor) -> torch.Tensor:
    """Transposed, strided, of no dimension, of no item, of many types; an alias of the one before."""
    size = number % 37 + 1
    base = torch.arange(size * 6, device=f"queued:{number // 8 % 2}").add_(number)
    kinds: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: base.float().view(size, 6).t(),
        lambda: before.t(),
        lambda: base.to(torch.bfloat16).view(6, size)[::2],
        lambda: base.float().sum(),
        lambda: base.to(torch.int8)[:0],
        lambda: base.double().view(2, size, 3)[:, :, 1],
        lambda: base % 2 == 0,
        lambda: base.float().view(size, 6).expand(2, size, 6),
    )
    return kinds[number % len(kinds)]()


def odd_tensors(count: int) -> dict[str, torch.Tensor]:
    made = [torch.empty(0)]
    for number in range(count):
        made.append(odd(number, made[-1]))
    return {f"t{number}": tensor for number, tensor in enumerate(made[1:])}


@on_device
def test_three_thousand_odd_tensors(tmp_path: Path) -> None:
    """While others come and go on the device, and the host is ahead."""
    with training_on("own") as (stream, other), Checkpointer(tmp_path) as checkpointer:
        state = odd_tensors(3000)
        wanted = {name: tensor.cpu() for name, tensor in state.items()}
        checkpointer.save(0, state).wait()
        with contextlib.ExitStack() as held:
            for each in side_streams(checkpointer):
                held.enter_context(queued.Gate(each))
            checkpointer.save(1, state)
            for number in range(200):
                torch.full((number * 10 + 1,), 3.0, device="queued").sum()
            checkpointer.fence()
            for tensor in {each.untyped_storage().data_ptr(): each for each in state.values()}.values():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                whole.fill_(1)
        checkpointer.wait()
        stream.synchronize()
        other.synchronize()
        assert_same(stillframe.load(tmp_path, 1), wanted)
        assert checkpointer.restore(state, step=1).step == 1
        assert_same({name: tensor.cpu() for name, tensor in state.items()}, wanted)


@on_device
def test_memory_that_is_freed_while_its_copy_is_queued_is_not_used_again_before(tmp_path: Path) -> None:
    """The state is dropped, and the checkpointer with its plan, while the copies stand still."""
    with training_on("own") as (stream, _):
        checkpointer = Checkpointer(tmp_path)
        model = Weights()
        checkpointer.save(0, {"model": model}).wait()
        model.fill(1)
        queued.stop_copies()
        checkpointer.save(1, {"model": model})
        checkpointer.save(2, {"other": torch.full((COUNT,), 2.0, device="queued")})
        del model
        for _ in range(2):
            torch.full((COUNT,), 9.0, device="queued")
        stream.synchronize()
        queued.let_copies_go()
        checkpointer.close()
    assert values(tmp_path, 1) == ([1.0], [1.0])
    assert stillframe.load(tmp_path, 2)["other"].unique().tolist() == [2.0]
