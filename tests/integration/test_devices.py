"""The order between compute, copy and update, proved on an emulated accelerator whose queues really run late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.link import messages
from stillframe.save.keeper_process import KeeperProcess
from stillframe.testing.emulated import EmulatedDevice
from tests.support import until

COUNT = 6_000_000


def test_a_copy_sees_the_compute_before_save_and_not_the_update_behind_the_fence(tmp_path: Path) -> None:
    """The host runs ahead: when save() and the fence return, neither compute nor copy has begun."""
    gate = threading.Event()
    with EmulatedDevice(copy_bytes_s=200e6) as device, Checkpointer(tmp_path) as checkpointer:
        weights = device.place(torch.zeros(COUNT))
        checkpointer.save(0, {"weights": weights}).wait()
        device.compute(lambda: (gate.wait(), weights.fill_(1.0)), weights)  # still to come when save() is called
        save = checkpointer.save(1, {"weights": weights})
        checkpointer.fence()  # returns: the wait is on the device, not on the host
        assert save.phase == "captured"
        device.compute(lambda: weights.fill_(2.0), weights)  # the update
        assert weights.sum() == 0  # the host is ahead of everything
        gate.set()
        save.wait()
        device.synchronize()
        assert weights.sum() == 2 * COUNT
    assert torch.equal(stillframe.load(tmp_path, 1)["weights"], torch.ones(COUNT))


def test_many_saves_in_a_row_each_hold_their_own_step(tmp_path: Path) -> None:
    with EmulatedDevice(copy_bytes_s=1e9) as device, Checkpointer(tmp_path, arena="48MiB") as checkpointer:
        weights, counter = device.place(torch.zeros(COUNT)), device.place(torch.zeros(4))
        for step in range(1, 6):
            checkpointer.fence()
            device.compute(lambda: (weights.add_(1.0), counter.add_(1.0)), weights, counter)
            checkpointer.save(step, {"weights": weights, "counter": counter})
        checkpointer.wait()
    for step in range(1, 6):
        loaded = stillframe.load(tmp_path, step)
        assert torch.equal(loaded["weights"], torch.full((COUNT,), float(step)))
        assert torch.equal(loaded["counter"], torch.full((4,), float(step)))


def test_without_the_fence_the_update_really_tears_the_copy(tmp_path: Path) -> None:
    """The emulation can fail: the same as above without the fence holds bytes of the update.  Nobody notices one that
    torch does not count."""
    with EmulatedDevice(copy_bytes_s=100e6) as device, Checkpointer(tmp_path) as checkpointer:
        weights = device.place(torch.zeros(COUNT))
        checkpointer.save(1, {"weights": weights})
        device.compute(lambda: weights.fill_(2.0))
        checkpointer.wait()
    assert stillframe.load(tmp_path, 1)["weights"].sum() > 0


def test_an_update_that_is_queued_without_a_fence_fails_the_save_until_the_copy_is_done(tmp_path: Path) -> None:
    """Before the copies are queued, and after it; whether a fence comes before they are done, or none."""
    with EmulatedDevice() as device, Checkpointer(tmp_path, on_error="warn") as checkpointer:
        weights = device.place(torch.zeros(COUNT))
        start = threading.Event()
        device.compute(start.wait)
        early = checkpointer.save(1, {"weights": weights})
        device.compute(lambda: weights.fill_(2.0), weights)
        start.set()
        with pytest.raises(stillframe.TornError, match="'weights'"):
            early.wait()
        for step, has_fence in ((2, False), (3, True)):
            gate = threading.Event()
            device.compute(gate.wait)  # the copies come after it
            late = checkpointer.save(step, {"weights": weights})
            assert late.job.issued.wait(10)
            device.compute(lambda: weights.fill_(3.0), weights)
            if has_fence:
                checkpointer.fence()
            gate.set()
            with pytest.raises(stillframe.TornError, match="'weights'"):
                late.wait()
        checkpointer.save(4, {"weights": weights}).wait()
    assert stillframe.Catalog(tmp_path).steps() == [4]


def test_without_the_mark_the_copy_really_sees_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation can fail: a copy that does not wait for the compute before it is too early."""
    monkeypatch.setattr(EmulatedDevice, "begin", lambda self, mark: None)
    gate = threading.Event()
    with EmulatedDevice() as device, Checkpointer(tmp_path) as checkpointer:
        weights = device.place(torch.zeros(COUNT))
        device.compute(lambda: (gate.wait(), weights.fill_(1.0)), weights)
        checkpointer.save(1, {"weights": weights}).wait("staged")
        gate.set()
    assert stillframe.load(tmp_path, 1)["weights"].sum() == 0


def test_state_on_two_devices_and_the_host_is_one_save(tmp_path: Path) -> None:
    """Parameters on accelerators, offloaded optimizer state in host memory."""
    with (
        EmulatedDevice(copy_bytes_s=500e6) as one,
        EmulatedDevice(copy_bytes_s=300e6) as two,
        Checkpointer(tmp_path) as checkpointer,
    ):
        state = {
            "one": one.place(torch.zeros(COUNT)),
            "two": two.place(torch.zeros(COUNT)),
            "host": torch.zeros(COUNT),
            "small": one.place(torch.zeros(3)),
        }
        for step in range(1, 4):
            checkpointer.fence()
            one.compute(lambda: (state["one"].add_(1), state["small"].add_(1)), state["one"], state["small"])
            two.compute(lambda: state["two"].add_(2), state["two"])
            state["host"].add_(3)
            checkpointer.save(step, state)
        checkpointer.wait()
    for step in range(1, 4):
        loaded = stillframe.load(tmp_path, step)
        for name, by in (("one", 1), ("two", 2), ("host", 3), ("small", 1)):
            assert torch.equal(loaded[name], torch.full_like(loaded[name], float(step * by))), (step, name)


def test_an_audit_on_a_device_finds_a_missing_fence(tmp_path: Path) -> None:
    with EmulatedDevice(copy_bytes_s=1e9) as device, Checkpointer(tmp_path, audit=True) as checkpointer:
        weights = device.place(torch.zeros(COUNT))
        checkpointer.save(1, {"weights": weights}).wait()
        torn = checkpointer.save(2, {"weights": weights})
        device.compute(lambda: weights.fill_(2.0))
        with pytest.raises(stillframe.TornError, match="'weights'"):
            torn.wait()
    assert stillframe.Catalog(tmp_path).steps() == [1]


def test_a_span_is_the_keepers_before_the_keeper_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper may give it back at once, and the thread that stages take it, while the sending one is held up."""
    send = KeeperProcess.send
    is_held: list[bool] = []

    def watched(self: KeeperProcess, message: Any, fd: int | None = None) -> None:
        if isinstance(message, messages.Chunk):
            arena = checkpointer._stager.arena
            assert arena is not None
            is_held.append(arena._holders.get(message.span) is self)
        send(self, message, fd)

    monkeypatch.setattr(KeeperProcess, "send", watched)
    with EmulatedDevice() as device, Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"weights": device.place(torch.ones(9_000_000))}).wait()
        arena = checkpointer._stager.arena
        assert arena is not None
        until(lambda: arena.free_spans == arena.spans, "all spans come back")
    assert len(is_held) == 6
    assert all(is_held)
