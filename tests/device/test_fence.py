"""What the fence promises: which stream waits, when the host does, and that it waits for nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from tests.device import queued
from tests.device.running import on_device
from tests.device.streams import training_on
from tests.device.test_order import STOP, Weights, both_streams, values
from tests.device.test_streams import LATE_S
from tests.support import until

WAIT_S = 20.0


@pytest.mark.parametrize("waits", [False, True])
@on_device
def test_an_update_on_another_stream_needs_a_fence_that_waits(tmp_path: Path, waits: bool) -> None:
    """Without ``wait=True`` only the current stream waits: the update overtakes the copy, and nobody notices."""
    one, other = torch.Stream("queued"), torch.Stream("queued")
    with Checkpointer(tmp_path) as checkpointer, queued.on_stream(one):
        model = Weights()
        model.fill(1)
        one.synchronize()
        queued.stop_copies(after=STOP)
        before = queued.copied()
        save = checkpointer.save(1, {"model": model})
        until(lambda: queued.copied() - before == STOP, "the copy being under way")
        going = threading.Timer(LATE_S, queued.let_copies_go)
        if waits:
            going.start()
        checkpointer.fence(wait=waits)
        assert (queued.copied() - before == STOP) is not waits
        with queued.on_stream(other):
            model.fill(2)
        other.synchronize()
        queued.let_copies_go()
        going.cancel()
        save.wait(timeout_s=WAIT_S)
    assert values(tmp_path, 1)[0] == ([1.0] if waits else [1.0, 2.0])


@both_streams
@on_device
def test_a_fence_waits_for_the_arrival_of_no_save(tmp_path: Path, on: str) -> None:
    """Two are pending: the first stands in the midst of its copy, the second is requested behind an update."""
    with training_on(on) as (stream, _), Checkpointer(tmp_path, arena="128MiB") as checkpointer:  # type: ignore[arg-type]
        model = Weights()
        checkpointer.save(0, {"model": model}).wait()
        queued.stop_copies(after=STOP)
        for step in (1, 2):
            checkpointer.fence()
            model.fill(step)
            checkpointer.save(step, {"model": model})
        checkpointer.fence()  # returns, although not a single save has arrived
        assert checkpointer.stats().in_flight == 2
        model.fill(3)
        queued.let_copies_go()
        checkpointer.wait(timeout_s=WAIT_S)
        stream.synchronize()
        assert queued.peek(model.weights).unique().tolist() == [3.0]
    assert [values(tmp_path, step)[0] for step in (1, 2)] == [[1.0], [2.0]]


@on_device
def test_all_chunks_that_the_arena_has_room_for_are_issued(tmp_path: Path) -> None:
    """Six of them, and not a byte arrives: the fence returns all the same; in a smaller arena it has to wait."""
    count = 6 * (16 << 20) // 4
    with training_on("own"), Checkpointer(tmp_path, arena="112MiB") as checkpointer:
        model = Weights(count=count)
        checkpointer.save(0, {"model": model}).wait()
        queued.stop_copies()
        save = checkpointer.save(1, {"model": model})
        checkpointer.fence()
        assert save.progress.staged_bytes == 0
        model.fill(2)
        queued.let_copies_go()
        save.wait(timeout_s=WAIT_S)
    assert values(tmp_path, 1)[0] == [0.0]
    with training_on("own"), Checkpointer(tmp_path / "small", arena="48MiB") as checkpointer:
        queued.stop_copies()
        save = checkpointer.save(1, {"model": model})
        going = threading.Timer(LATE_S, queued.let_copies_go)
        going.start()
        checkpointer.fence()
        assert save.progress.staged_bytes > 0
        model.fill(3)
        going.join()
    assert values(tmp_path / "small", 1)[0] == [2.0]


@on_device
def test_a_limit_spreads_copies_out_and_the_fence_ends(tmp_path: Path) -> None:
    """Also those that wait for compute: it is the copies that are limited, not when they are queued."""
    with training_on("own") as (stream, _), Checkpointer(tmp_path, stage_limit="40MB/s") as checkpointer:
        model = Weights(count=12_500_000)  # 50 MB, in 3 chunks: the third is issued 33.5 MB after the first
        checkpointer.save(0, {"model": model}).wait(timeout_s=WAIT_S)
        compute = queued.Gate(stream)
        model.fill(1)
        save = checkpointer.save(1, {"model": model})
        time.sleep(LATE_S)
        before = queued.copied()
        began = time.monotonic()
        compute.open()
        checkpointer.fence()
        model.fill(2)
        assert time.monotonic() - began > 0.8
        until(lambda: queued.copied() - before >= 50_000_000, "the last byte")
        save.wait(timeout_s=WAIT_S)
        pace = checkpointer._stager._pace
        assert pace is not None
        due_s = pace._due_s
        checkpointer.save(2, {"host": torch.zeros(5_000_000)}).wait(timeout_s=WAIT_S)
        assert pace._due_s == due_s  # only what comes from an accelerator is limited
    assert values(tmp_path, 1)[0] == [1.0]


@on_device
def test_a_limit_does_not_keep_a_save_from_being_given_up(tmp_path: Path) -> None:
    with training_on("own"):
        checkpointer = Checkpointer(tmp_path, stage_limit="1MB/s", on_error="warn")
        checkpointer.save(1, {"model": Weights(count=25_000_000)})  # 100 s
        began = time.monotonic()
        with pytest.raises(stillframe.DeadlineError, match="given up: 1"):
            checkpointer.close(timeout_s=1.0)
        assert time.monotonic() - began < WAIT_S


@on_device
def test_a_fence_that_waits_ends_when_the_device_fails(tmp_path: Path) -> None:
    with training_on("own"), Checkpointer(tmp_path, on_error="warn") as checkpointer:
        model = Weights()
        checkpointer.save(0, {"model": model}).wait()
        queued.stop_copies(after=STOP)
        save = checkpointer.save(1, {"model": model})
        assert save.job.issued.wait(WAIT_S)
        queued.fail("synchronize")
        failing = threading.Timer(LATE_S, queued.let_copies_go)
        failing.start()
        began = time.monotonic()
        checkpointer.fence(wait=True)
        assert time.monotonic() - began < WAIT_S
        failing.join()
        queued.fail("synchronize", 0)
        model.fill(2)
        checkpointer.save(2, {"model": model}).wait(timeout_s=WAIT_S)
    assert values(tmp_path, 2)[0] == [2.0]
