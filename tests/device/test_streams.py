"""Whose streams: those of the thread that trains, whichever thread requests the save, and whichever ones restore."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

import stillframe
from stillframe import Checkpointer, spi
from tests.device import queued
from tests.device.running import on_device
from tests.device.streams import On, training_on
from tests.device.test_order import Weights, both_streams, values
from tests.support import until

dcp: Any = checkpoint

COUNT = 500_000
LATE_S = 0.1
"""Long enough for whatever does not wait."""


def in_thread(work: Callable[[], object]) -> None:
    """Blocks; raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


# --- saves that another thread requests ------------------------------------------------------------


@both_streams
@pytest.mark.parametrize("device", ["queued:0", "queued:1"])
@on_device
def test_a_save_that_another_thread_requests_behind_a_hold(tmp_path: Path, device: str, on: On) -> None:
    with training_on(on) as streams, Checkpointer(tmp_path) as checkpointer:
        stream = streams[torch.device(device).index]
        gate = spi.UpdateGate(checkpointer.fence)
        model = Weights(device, COUNT)
        checkpointer.save(0, {"model": model}).wait()
        compute = queued.Gate(stream)
        model.fill(1)
        release = gate.hold("a test")

        def save() -> None:
            before = torch.accelerator.current_stream(device), torch.accelerator.current_device_index()
            checkpointer.save(1, {"model": model})
            assert (torch.accelerator.current_stream(device), torch.accelerator.current_device_index()) == before
            release()

        in_thread(save)
        gate.wait()
        checkpointer.fence()
        model.fill(2)
        time.sleep(LATE_S)
        assert queued.peek(model.weights).sum() == 0
        compute.open()
        checkpointer.wait()
        gate._hook.remove()
    assert values(tmp_path, 1) == ([1.0], [1.0])


@on_device
def test_two_holds_are_each_of_the_stream_that_they_were_made_on(tmp_path: Path) -> None:
    """Training moves from one stream to another between them."""
    one, other = torch.Stream("queued"), torch.Stream("queued")
    with Checkpointer(tmp_path) as checkpointer:
        gate = spi.UpdateGate(checkpointer.fence)
        first, second = Weights(count=COUNT), Weights(count=COUNT)
        torch.accelerator.synchronize()
        gates = [queued.Gate(one), queued.Gate(other)]
        releases = []
        for stream, model in ((one, first), (other, second)):
            with queued.on_stream(stream):
                model.fill(1)
                releases.append(gate.hold("a test"))
        for step, (model, release) in enumerate(zip((first, second), releases, strict=True)):
            in_thread(lambda step=step, model=model: checkpointer.save(step, {"model": model}))  # type: ignore[misc]
            release()
        time.sleep(LATE_S)
        for each in gates:
            each.open()
        checkpointer.wait()
        gate._hook.remove()
    assert values(tmp_path, 0) == values(tmp_path, 1) == ([1.0], [1.0])


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@both_streams
@on_device
def test_a_lazy_save_of_dcp(tmp_path: Path, on: On) -> None:
    """Its own thread requests it, while the host is ahead of the update before and of the one after."""
    from stillframe.integrations.dcp import Stager, Writer

    with training_on(on) as (stream, _), alone():
        model = torch.nn.Linear(512, 512, bias=False, device="queued")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(0)
        model.weight.grad = torch.full_like(model.weight, -1.0)
        writer = Writer(tmp_path)
        stager = Stager(writer)
        for step in range(2):
            with queued.Gate(stream):
                optimizer.step()  # still to come
                response = dcp.async_save({"model": model}, storage_writer=writer, async_stager=stager)
                optimizer.step()
                time.sleep(LATE_S)
            response.upload_completion.result(20)
            saved = stillframe.load(tmp_path, step)["model"]["weight"]
            assert saved.unique().tolist() == [2.0 * step + 1], step


# --- more than one stream -------------------------------------------------------------------------------


@on_device
def test_what_other_streams_write_is_the_users_to_order(tmp_path: Path) -> None:
    """``save`` and ``fence`` are calls on the current stream, as kernels are: another that writes the state waits."""
    one, other = torch.Stream("queued"), torch.Stream("queued")
    with Checkpointer(tmp_path) as checkpointer, queued.on_stream(one):
        model = Weights(count=COUNT)
        one.synchronize()
        compute = queued.Gate(other)
        with queued.on_stream(other):
            model.fill(1)
        one.wait_stream(other)
        checkpointer.save(1, {"model": model})
        checkpointer.fence()
        other.wait_stream(one)
        with queued.on_stream(other):
            model.fill(2)
        time.sleep(LATE_S)
        compute.open()
        checkpointer.wait()
        other.synchronize()
        assert queued.peek(model.weights).unique().tolist() == [2.0]
    assert values(tmp_path, 1) == ([1.0], [1.0])


# --- restore -------------------------------------------------------------------------------------------


@both_streams
@pytest.mark.parametrize("device", ["queued:0", "queued:1"])
@on_device
def test_a_restore_comes_behind_what_was_queued_and_before_what_is_queued_next(
    tmp_path: Path, device: str, on: On
) -> None:
    with training_on(on) as streams, Checkpointer(tmp_path) as checkpointer:
        stream = streams[torch.device(device).index]
        model, odd = Weights(device, COUNT), torch.zeros(8, 6, device=device).t()[::2]
        state = {"model": model, "odd": odd, "twice": torch.zeros(4, 1, device=device).expand(4, 3)}
        for each in (model.weights.data, model.buffer, odd):
            each.fill_(1)
        checkpointer.save(1, state).wait()
        compute = queued.Gate(stream)
        for each in (model.weights.data, model.buffer, odd):
            each.fill_(7)  # what the rollback is to undo
        opening = threading.Timer(LATE_S, compute.open)
        opening.start()
        checkpointer.restore(state)
        opening.join()
        found = [model.weights + 0, model.buffer + 0, odd + 0]
        stream.synchronize()
        assert [each.unique().item() for each in found] == [1.0] * 3
        torch.accelerator.synchronize(device)
        assert [each.unique().item() for each in (model.weights, model.buffer, odd)] == [1.0] * 3


@on_device
def test_a_restore_waits_for_the_copies_of_a_save(tmp_path: Path) -> None:
    with training_on("own"), Checkpointer(tmp_path) as checkpointer:
        model = Weights(count=COUNT)
        model.fill(1)
        checkpointer.save(1, {"model": model}).wait()
        checkpointer.fence()
        model.fill(2)
        queued.stop_copies(after=1_000_000)
        before = queued.copied()
        checkpointer.save(2, {"model": model})
        until(lambda: queued.copied() - before == 1_000_000, "the copy being under way")
        going = threading.Timer(LATE_S, queued.let_copies_go)
        going.start()
        checkpointer.restore({"model": model}, step=1)
        going.join()
        assert model.weights.unique().tolist() == [1.0]
    assert values(tmp_path, 2) == ([2.0], [2.0])
