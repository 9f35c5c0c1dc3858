"""Updates captured in a graph: the device's capture stands for CUDA's (``torch.cuda.graph``, in its mode "global")."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.save.pinning import CudaRuntime
from tests.device import queued
from tests.device.running import on_device
from tests.device.streams import On, training_on
from tests.device.test_order import both_streams
from tests.device.test_pinning import messages

COUNT = 5_000_000


class Loop:
    """One weight, which every update lowers by one."""

    def __init__(self) -> None:
        self.weights = torch.nn.Parameter(torch.full((COUNT,), 100.0, device="queued"))
        self.weights.grad = torch.ones_like(self.weights)
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)
        self.state = {"weights": self.weights}
        torch.accelerator.synchronize()


def saved(root: Path, step: int) -> list[float]:
    found: list[float] = stillframe.load(root, step)["weights"].unique().tolist()
    return found


@both_streams
@on_device
def test_a_capture_while_a_save_is_copied_is_refused_before_it_breaks(tmp_path: Path, on: On) -> None:
    with training_on(on) as (stream, _), Checkpointer(tmp_path) as checkpointer:
        loop = Loop()
        checkpointer.quiesce()  # nothing was saved yet
        queued.stop_copies()
        checkpointer.save(1, loop.state)
        with queued.Graph(stream) as graph:
            with pytest.raises(stillframe.ConfigError, match=r"step 1 is still copied.*quiesce"):
                loop.optimizer.step()
            with pytest.raises(stillframe.ConfigError, match="within the capture"):
                checkpointer.save(2, loop.state)
        assert graph.broken in (
            "",
            "synchronize",
        )  # the stager waits for its copy: in mode "global" that breaks it, too
        with pytest.raises(stillframe.DeadlineError):
            checkpointer.quiesce(timeout_s=0.1)
        queued.let_copies_go()
        checkpointer.quiesce()
        with messages() as said, queued.Graph(stream) as graph:
            loop.optimizer.step()
            loop.optimizer.step()
        assert graph.broken == ""
        assert [each for each in said if "before each of them" in each] == said[:1] == said
        assert queued.peek(loop.weights.data).unique().tolist() == [100.0]
    assert saved(tmp_path, 1) == [100.0]


@on_device
def test_replays_behind_a_fence_are_ordered(tmp_path: Path) -> None:
    with training_on("own") as (stream, _), Checkpointer(tmp_path) as checkpointer:
        loop = Loop()
        with queued.Graph(stream) as graph:
            loop.optimizer.step()
        for step in range(3):
            queued.stop_copies(after=1_000_000)
            save = checkpointer.save(step, loop.state)
            checkpointer.fence()
            graph.replay()
            assert save.phase == "captured"
            queued.let_copies_go()
            save.wait()
        assert loop.weights.detach().cpu().unique().tolist() == [97.0]
    assert [saved(tmp_path, step) for step in range(3)] == [[100.0], [99.0], [98.0]]


@pytest.mark.parametrize("audit", [False, True])
@on_device
def test_a_replay_without_a_fence_is_found_by_the_audit_only(tmp_path: Path, audit: bool) -> None:
    with training_on("own") as (stream, _), Checkpointer(tmp_path, audit=audit, on_error="warn") as checkpointer:
        loop = Loop()
        with queued.Graph(stream) as graph:
            loop.optimizer.step()
        if not audit:
            queued.stop_copies()
        save = checkpointer.save(1, loop.state)
        assert save.job.issued.wait(20)
        graph.replay()
        stream.synchronize()
        queued.let_copies_go()
        if audit:
            with pytest.raises(stillframe.TornError):
                save.wait()
        else:
            save.wait()
    assert stillframe.Catalog(tmp_path).steps() == ([] if audit else [1])
    if not audit:
        assert saved(tmp_path, 1) == [99.0]  # what the documents warn of


@pytest.mark.parametrize("quiesces", [True, False])
@on_device
def test_the_arena_is_not_pinned_while_a_graph_is_captured_behind_quiesce(tmp_path: Path, quiesces: bool) -> None:
    """In mode "global" a registration on another thread breaks the capture."""
    register, may_register, has_registered = CudaRuntime.register, threading.Event(), threading.Event()

    def late(self: CudaRuntime, address: int, nbytes: int) -> int:
        may_register.wait(20)
        code = register(self, address, nbytes)
        has_registered.set()
        return code

    with (
        mock.patch.object(CudaRuntime, "register", late),
        training_on("own") as (stream, _),
        Checkpointer(tmp_path, arena="64MiB") as checkpointer,
    ):
        loop = Loop()
        checkpointer.save(1, loop.state).wait()
        if quiesces:
            threading.Timer(0.1, may_register.set).start()
            checkpointer.quiesce()
            assert len(queued.registered()) == 4
        with queued.Graph(stream) as graph:
            if not quiesces:
                may_register.set()
                assert has_registered.wait(20)
            loop.optimizer.step()
        assert graph.broken == ("" if quiesces else "register")
