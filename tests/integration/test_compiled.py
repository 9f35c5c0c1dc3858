"""Compiled updates wait at the fence, inside their graph or between two, and whenever they were compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import stillframe
from stillframe import Checkpointer
from stillframe.save import compiled
from stillframe.save.device import HostDevice

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
LATE_S = 0.2
"""Long enough for an update that does not wait."""


class Momentum(torch.optim.Optimizer):
    """A user's own: nothing in it breaks a graph."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter]["mean"]
                mean.mul_(0.9).add_(parameter.grad)
                parameter.sub_(mean * group["lr"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    import torch._dynamo.utils

    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def slow_copies() -> Iterator[Callable[[], None]]:
    """Called: the copies of the next save begin a while later."""
    gate, copy = threading.Event(), HostDevice.copy
    gate.set()

    def late(self: HostDevice, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        gate.wait(20)
        copy(self, sources, into)

    def hold() -> None:
        gate.clear()
        threading.Timer(LATE_S, gate.set).start()

    with mock.patch.object(HostDevice, "copy", late):
        yield hold


def gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.timeout(240)
def test_a_step_that_compiles_as_one_graph_has_the_fence_inside(
    tmp_path: Path, slow_copies: Callable[[], None]
) -> None:
    model = torch.nn.Linear(16, 16)
    optimizer = Momentum(model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    gradients(model)
    step()  # compiled before there is a fence
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path) as checkpointer:
        for number in range(3):
            wanted = model.weight.detach().clone(), optimizer.state[model.weight]["mean"].clone()
            slow_copies()
            save = checkpointer.save(number, state)
            step()
            save.wait()
            loaded = stillframe.load(tmp_path, number)
            assert torch.equal(loaded["model"]["weight"], wanted[0])
            assert torch.equal(loaded["optimizer"]["state"][0]["mean"], wanted[1])
        assert checkpointer._fence.updates == 3
        with mock.patch.object(compiled, "_run", []):  # what the operator is there for
            wanted = model.weight.detach().clone(), wanted[1]
            slow_copies()
            save = checkpointer.save(3, state)
            step()
            save.wait()
        assert not torch.equal(stillframe.load(tmp_path, 3)["model"]["weight"], wanted[0])


@pytest.mark.timeout(240)
def test_a_step_of_torchs_own_is_fenced_between_its_graphs(tmp_path: Path, slow_copies: Callable[[], None]) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    step = torch.compile(optimizer.step, backend="eager")
    with Checkpointer(tmp_path) as checkpointer:
        for number in range(2):
            gradients(model)
            wanted = model.weight.detach().clone()
            slow_copies()
            save = checkpointer.save(number, {"model": model, "optimizer": optimizer})
            step()
            save.wait()
            assert torch.equal(stillframe.load(tmp_path, number)["model"]["weight"], wanted)
        assert checkpointer._fence.updates == 2
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks
    assert not [why for why in breaks if "monotonic" in why], "the compiler looked into the fence"
