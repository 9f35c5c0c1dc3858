"""A device that fails in the midst of a save: that save fails, with what the device said, and nothing hangs.

Each call that is made of a device fails once, for want of memory, and for ever.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer, Save
from stillframe.save import device as devices
from stillframe.save.device import AcceleratorDevice
from tests.device import queued
from tests.device.running import REPOSITORY, environment, need_device, on_device
from tests.device.streams import training_on
from tests.device.test_order import STOP, Weights, values
from tests.support import until

WAIT_S = 20.0
CALLS: dict[str, tuple[Any, str, queued.Call]] = {
    "mark": (AcceleratorDevice, "mark", "record"),
    "gather": (AcceleratorDevice, "gather", "launch"),
    "begin": (AcceleratorDevice, "begin", "wait"),
    "copy": (AcceleratorDevice, "copy", "copy"),
    "cat": (AcceleratorDevice, "copy", "launch"),
    "ticket": (AcceleratorDevice, "ticket", "record"),
    "ticket.wait": (devices._EventTicket, "wait", "synchronize"),
    "order_after": (AcceleratorDevice, "order_after", "wait"),
}


EVERY: tuple[queued.Call, ...] = ("record", "wait", "synchronize", "launch", "stream", "allocate", "copy")


def settled(checkpointer: Checkpointer) -> int:
    """How many spans of the arena are used no more, once what failed is tidied up."""
    arena = checkpointer._stager.arena
    assert arena is not None
    until(lambda: arena.free_spans + arena._retired == arena.spans, "every span that is in use coming back")
    return arena._retired


@contextmanager
def failing(name: str, times: int, *, out_of_memory: bool = False) -> Iterator[None]:
    """What the device is asked for in this method fails, from its next call on; afterwards nothing does."""
    owner, method, call = CALLS[name]
    real = getattr(owner, method)

    def fails(*arguments: Any) -> Any:
        if not ordered:
            ordered.append(call)
            queued.fail(call, times, out_of_memory=out_of_memory)
        return real(*arguments)

    ordered: list[str] = []
    with mock.patch.object(owner, method, fails):
        yield
    assert ordered, "it was never called"
    queued.fail(call, 0)


def fails_or_not(name: str, save: Save, match: str) -> None:
    """A fence that the device cannot make is made by the host: that costs no save."""
    if name == "order_after":
        save.wait(timeout_s=WAIT_S)
        return
    with pytest.raises(stillframe.StillframeError, match=match) as failed:
        save.wait(timeout_s=WAIT_S)
    assert f"step {save.step} failed" in str(failed.value)


@pytest.mark.parametrize("name", CALLS)
@on_device
def test_a_call_that_fails_costs_one_save(tmp_path: Path, name: str) -> None:
    """Nothing is raised in the loop; the next save works, in the same arena, and holds what it should."""
    told: list[stillframe.StillframeError] = []
    with (
        training_on("own") as (stream, _),
        Checkpointer(tmp_path, arena="112MiB", on_error=told.append) as checkpointer,
    ):
        model = Weights(count=5_000_000)
        small = [torch.ones(100, device="queued") for _ in range(20)]
        state = {"model": model, "small": small}
        checkpointer.save(0, state).wait(timeout_s=WAIT_S)
        for step, (times, out_of_memory) in enumerate([(1, False), (1, True), (-1, False)], 1):
            model.fill(step)
            stream.synchronize()
            with failing(name, times, out_of_memory=out_of_memory):
                save = checkpointer.save(2 * step, state)
                checkpointer.fence()
                fails_or_not(name, save, "out of memory" if out_of_memory else "device error")
                if times < 0:
                    while_it_is_dead(checkpointer, state)
                retired = settled(checkpointer)
            assert (retired > 0) == (times < 0 and name in ("ticket", "ticket.wait"))  # else the device could tell
            checkpointer.fence(wait=True)
            model.fill(step + 0.5)
            checkpointer.save(2 * step + 1, state).wait(timeout_s=WAIT_S)
    for step in (1, 2, 3):
        assert values(tmp_path, 2 * step + 1) == ([step + 0.5], [step + 0.5])
    assert len(told) == (1 if name == "order_after" else 4)
    assert [step for step in (2, 4, 6) if step in stillframe.Catalog(tmp_path).steps()] == (
        [2, 4, 6] if name == "order_after" else []
    )


def while_it_is_dead(checkpointer: Checkpointer, state: Any) -> None:
    """Every call returns, and what is saved meanwhile fails with what the device says."""
    dead = checkpointer.save(100, state)
    checkpointer.fence()
    checkpointer.fence(wait=True)
    with pytest.raises(stillframe.StillframeError, match=r"ordered, in|device error"):
        dead.wait(timeout_s=WAIT_S)
    checkpointer.wait(timeout_s=WAIT_S)
    assert checkpointer.stats().in_flight == 0


@on_device
def test_a_dead_device_lets_the_checkpointer_be_closed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, on_error="warn")
    model = Weights()
    checkpointer.save(0, {"model": model}).wait(timeout_s=WAIT_S)
    for call in EVERY:
        queued.fail(call)
    checkpointer.save(1, {"model": model})
    checkpointer.fence()
    checkpointer.close(timeout_s=WAIT_S)
    for call in EVERY:
        queued.fail(call, 0)
    assert stillframe.Catalog(tmp_path).steps() == [0]


@on_device
def test_a_span_that_a_copy_may_still_write_to_is_not_used_again(tmp_path: Path) -> None:
    """The copy of a save that failed stands still in the midst of a span, and goes on under the next save."""
    with training_on("own"), Checkpointer(tmp_path, arena="64MiB", on_error="warn") as checkpointer:
        model, other = Weights(), Weights("queued:1")
        model.fill(1)
        other.fill(2)
        checkpointer.save(0, {"model": model, "other": other}).wait(timeout_s=WAIT_S)
        queued.stop_copies(after=STOP, device=0)
        with failing("ticket.wait", -1):
            with pytest.raises(stillframe.StateError, match="device error"):
                checkpointer.save(1, {"model": model}).wait(timeout_s=WAIT_S)
            assert settled(checkpointer) == 2
        save = checkpointer.save(2, {"model": other})  # of the other device, in the two spans that are left
        assert save.job.arrived.wait(WAIT_S)
        queued.let_copies_go()
        save.wait(timeout_s=WAIT_S)
    assert values(tmp_path, 2) == ([2.0], [2.0])


@on_device
def test_no_memory_for_what_is_captured_is_told_as_on_error_says(tmp_path: Path) -> None:
    for on_error in ("raise", "warn"):
        checkpointer = Checkpointer(tmp_path / on_error, on_error=on_error)
        model = Weights(count=1000)
        checkpointer.save(0, {"model": model}).wait(timeout_s=WAIT_S)
        with failing("gather", 1, out_of_memory=True):
            save = checkpointer.save(1, {"model": model})  # raises nothing
        assert save.phase == "failed"
        assert isinstance(save.error, stillframe.StateError)
        assert isinstance(save.error.__cause__, torch.OutOfMemoryError)
        if on_error == "raise":
            with pytest.raises(stillframe.StateError, match="saving step 1 failed: capturing step 1 failed: OutOfMem"):
                checkpointer.save(2, {"model": model})
        else:
            checkpointer.save(2, {"model": model})
        checkpointer.save(3, {"model": model})
        checkpointer.close(timeout_s=WAIT_S)
        assert stillframe.Catalog(tmp_path / on_error).steps() == [0, 2, 3]


@pytest.mark.parametrize("name", ["mark", "begin", "copy", "ticket.wait"])
@on_device
def test_what_fails_in_an_audit_fails_the_save_and_not_the_update(tmp_path: Path, name: str) -> None:
    with training_on("own"), Checkpointer(tmp_path, audit=True, on_error="warn") as checkpointer:
        model = Weights(count=100_000)
        save = checkpointer.save(1, {"model": model})
        assert save.job.dealt_with.wait(WAIT_S)
        with failing(name, 1):
            checkpointer.fence()
        with pytest.raises(stillframe.StateError, match="device error"):
            save.wait(timeout_s=WAIT_S)
        model.fill(2)
        checkpointer.save(2, {"model": model}).wait(timeout_s=WAIT_S)
    assert values(tmp_path, 2) == ([2.0], [2.0])


def test_a_process_whose_device_is_dead_ends(tmp_path: Path) -> None:
    """Without close(), with its own code."""
    need_device()
    script = (
        "import sys, torch, stillframe\n"
        "from tests.device import queued\n"
        "queued.load()\n"
        "weights = torch.ones(6_000_000, device='queued')\n"
        "checkpointer = stillframe.Checkpointer(sys.argv[1])\n"
        "checkpointer.save(1, {'weights': weights}).wait()\n"
        "queued.stop_copies(after=1_000_000)\n"
        "checkpointer.save(2, {'weights': weights})\n"
        "checkpointer.fence()\n"
        "for call in ('record', 'wait', 'synchronize', 'launch', 'copy'): queued.fail(call)\n"
        "queued.let_copies_go()\n"
        "sys.exit(7)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment(), cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert run.returncode == 7, run.stderr.decode()
    assert stillframe.Catalog(tmp_path).steps()[0] == 1
