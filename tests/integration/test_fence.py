"""The fence: nothing that a save covers changes before it is copied, and the saved bytes are those of save()."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import Checkpointer, spi
from stillframe.observe.history import histories
from stillframe.save.fence import OptimizerFence, hook
from tests.support import assert_same, make_model, pause, train_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW plain": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
}


def copy(state: dict[str, Any]) -> dict[str, Any]:
    """What the state is at this moment, as plain values and cloned tensors."""

    def clone(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node.detach().clone()
        if isinstance(node, dict):
            return {key: clone(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(clone(item) for item in node)
        return node

    return {name: clone(part.state_dict() if hasattr(part, "state_dict") else part) for name, part in state.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_save_holds_exactly_what_the_state_was_at_save(tmp_path: Path, name: str) -> None:
    width = 1500  # 9 MB a weight: staging takes longer than reaching the next update
    torch.manual_seed(0)
    model = make_model(width)
    optimizer = OPTIMIZERS[name](model.parameters())
    state = {"model": model, "optimizer": optimizer}
    expected = {}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            train_step(model, optimizer, width)
            expected[step] = copy(state)
            checkpointer.save(step, state)
    for step, saved in expected.items():
        assert_same(stillframe.load(tmp_path, step), saved)


def test_the_update_waits_for_a_save_that_staging_has_not_begun(tmp_path: Path) -> None:
    """Two saves, the arena full and the keeper stopped: the second has not been looked at when the update comes."""
    weights = torch.nn.Parameter(torch.zeros(9_000_000))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    with Checkpointer(tmp_path, arena="48MiB") as checkpointer:
        checkpointer.save(0, {"weights": weights}).wait()
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        pause(keeper)
        first = checkpointer.save(1, {"weights": weights})
        second = checkpointer.save(2, {"weights": weights})
        first.wait("staged")
        assert second.phase == "captured"
        continued = []

        def go_on(*_: object) -> None:
            continued.append(second.phase)
            os.kill(keeper, signal.SIGCONT)

        signal.signal(signal.SIGALRM, go_on)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        weights.grad = torch.ones_like(weights)
        optimizer.step()  # must not return before the second save is copied
        assert continued == ["captured"]
        second.wait("staged", 10)  # it is copied; that the keeper is told comes right after
        assert checkpointer.stats().blocked_fence_s > 0.2
        assert checkpointer.stats().arena_wait_s > 0.2
    for step in (1, 2):
        assert stillframe.load(tmp_path, step)["weights"].count_nonzero() == 0


def test_a_closure_runs_before_the_update_waits(tmp_path: Path) -> None:
    """The save is copied only because the closure, which is forward and backward, lets the keeper go on."""
    weights = torch.nn.Parameter(torch.zeros(9_000_000))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    with Checkpointer(tmp_path, arena="48MiB") as checkpointer:
        checkpointer.save(0, {"weights": weights}).wait()
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        pause(keeper)
        checkpointer.save(1, {"weights": weights}).wait("staged")
        second = checkpointer.save(2, {"weights": weights})
        seen = []

        def closure() -> float:
            seen.append(second.phase)
            os.kill(keeper, signal.SIGCONT)
            weights.grad = torch.ones_like(weights)
            return 0.0

        optimizer.step(closure)
        assert seen == ["captured"]
    assert stillframe.load(tmp_path, 2)["weights"].count_nonzero() == 0


def tensors(node: Any) -> list[Any]:
    if isinstance(node, dict | list | tuple):
        return [each for part in (node.values() if isinstance(node, dict) else node) for each in tensors(part)]
    return [node] if isinstance(node, torch.Tensor) else []


def _of_torch() -> list[type[torch.optim.Optimizer]]:
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    return [each for each in kinds if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer]


@pytest.mark.parametrize("kind", _of_torch(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_named", [True, False])
def test_no_optimizer_of_torch_changes_anything_before_its_closure(kind: Any, is_named: bool) -> None:
    weights = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = kind([weights])
    called, seen = list[str](), list[Any]()
    now = {"weights": weights, "optimizer": optimizer}

    def look(_begins: bool) -> None:
        called.append("fence")
        seen.append(copy(now))

    def closure() -> torch.Tensor:
        called.append("closure")
        optimizer.zero_grad()
        loss = weights.pow(4).sum()
        loss.backward()
        if kind is torch.optim.SparseAdam:
            weights.grad = torch.ones(4, 4).to_sparse()
        return loss

    fence = OptimizerFence(look)
    try:
        for _ in range(2):  # the second time its state is there
            before = copy(now)
            optimizer.step(closure=closure) if is_named else optimizer.step(closure)
            assert called[:2] == ["closure", "fence"]
            assert called.count("fence") == 1
            assert not torch.equal(weights, before["weights"])
            assert_same(tensors(seen.pop()), tensors(before))  # numbers are kept by save() itself
            called.clear()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert called == []  # nothing was changed
    finally:
        fence.remove()


def test_an_optimizer_of_another_kind_waits_before_its_closure() -> None:
    class Perturbing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            called.append("change")
            return super().step(closure)

    called: list[str] = []
    weights = torch.nn.Parameter(torch.ones(4))
    fence = OptimizerFence(lambda _begins: called.append("fence"))
    try:
        Perturbing([weights], lr=0.1).step(lambda: called.append("closure"))
    finally:
        fence.remove()
    assert called[:2] == ["fence", "change"]
    assert called[-1] == "closure"


def test_several_optimizers_and_gradient_accumulation(tmp_path: Path) -> None:
    torch.manual_seed(1)
    left, right = torch.nn.Linear(1500, 1500), torch.nn.Linear(1500, 1500)
    optimizers = [torch.optim.AdamW(left.parameters()), torch.optim.SGD(right.parameters(), lr=0.1)]
    state = {"left": left, "right": right, "first": optimizers[0], "second": optimizers[1]}
    expected = {}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            for _ in range(2):
                (left(torch.randn(4, 1500)) + right(torch.randn(4, 1500))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            expected[step] = copy(state)
            checkpointer.save(step, state)
    for step, saved in expected.items():
        assert_same(stillframe.load(tmp_path, step), saved)


def test_what_changes_in_forward_is_captured_by_save_itself(tmp_path: Path) -> None:
    """Buffers, random state, a data loader's tensors and plain values all move before the fence."""

    class Loader:
        def __init__(self) -> None:
            self.order = torch.arange(500_000)

        def state_dict(self) -> dict[str, Any]:
            return {"order": self.order}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.order = state["order"]

    norm = torch.nn.BatchNorm1d(200_000)
    loader, values = Loader(), {"position": 1, "seen": [1, 2]}
    state = {"norm": norm, "loader": loader, "values": values, "rng": stillframe.RNG()}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(0, 10, 2):
            mean, order, seed = norm.running_mean, loader.order, torch.get_rng_state()
            assert isinstance(mean, torch.Tensor)
            before = mean.clone(), order.clone(), dict(values), seed
            checkpointer.save(step, state)
            mean.add_(1.0)
            order.add_(1)
            values["position"] = step + 10
            torch.rand(100)
            checkpointer.fence()
            saved = checkpointer.save(step + 1, state)  # and again, with the other values
            saved.wait()
            loaded = stillframe.load(tmp_path, step)
            assert torch.equal(loaded["norm"]["running_mean"], before[0])
            assert torch.equal(loaded["loader"]["order"], before[1])
            assert loaded["values"] == before[2]
            assert torch.equal(loaded["rng"]["torch"], before[3])


def test_closing_removes_the_hook(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    others = hook.fences  # of DCP's lazy saves in this process, which share the hook
    before = len(_global_optimizer_pre_hooks)
    checkpointer = Checkpointer(tmp_path)
    assert len(hook.fences) == len(others) + 1
    assert len(_global_optimizer_pre_hooks) == before + (not others)
    checkpointer.close()
    checkpointer.close()
    assert hook.fences == others
    assert len(_global_optimizer_pre_hooks) == before


def test_the_fence_is_called_before_an_update_by_hand(tmp_path: Path) -> None:
    weights = torch.zeros(12_000_000)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"weights": weights})
            checkpointer.fence()
            weights.add_(1.0)
    for step in range(4):
        assert torch.equal(stillframe.load(tmp_path, step)["weights"], torch.full((12_000_000,), float(step)))


def test_an_audit_names_the_tensor_that_moved_and_never_commits_it(tmp_path: Path) -> None:
    weights = {"good": torch.zeros(6_000_000), "bad": torch.zeros(6_000_000)}
    with Checkpointer(tmp_path, audit=True) as checkpointer:
        checkpointer.save(1, weights).wait()
        torn = checkpointer.save(2, weights)
        weights["bad"].add_(1.0)  # no fence
        with pytest.raises(stillframe.TornError, match="'bad'"):
            torn.wait()
        clean = checkpointer.save(3, weights)
        checkpointer.fence()
        weights["bad"].add_(1.0)
        clean.wait()
    assert stillframe.Catalog(tmp_path).steps() == [1, 3]


def test_an_audit_with_an_optimizer_passes_a_sound_loop(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Checkpointer(tmp_path, audit=True) as checkpointer:
        for step in range(4):
            train_step(model, optimizer)
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    assert stillframe.Catalog(tmp_path).steps() == [0, 1, 2, 3]


def test_an_iteration_is_a_step_of_one_optimizer_whatever_else_passes_the_fence(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in weights]
    average = torch.ones(4)
    with Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        for step in range(12):
            for weight in weights:
                weight.grad = torch.ones(4)
            time.sleep(0.01)
            for optimizer in optimizers:
                optimizer.step()
            checkpointer.fence()  # an average, by hand
            average.lerp_(weights[0].detach(), 0.1)
            if step % 3 == 0:
                checkpointer.save(step, {"weights": weights, "average": average})
    (history,) = histories(tmp_path)
    assert len(history.updates) > 30  # all that passed the fence
    iterations = history.iterations()
    assert 8 <= len(iterations) <= 11  # one that a busy machine makes very long is not counted
    assert all(end_s - begin_s > 0.009 for begin_s, end_s in iterations)


def test_without_an_optimizer_an_iteration_is_from_fence_to_fence(tmp_path: Path) -> None:
    weights = torch.ones(4)
    with Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        for step in range(5):
            checkpointer.fence()
            weights += 1
            checkpointer.save(step, {"weights": weights})
            time.sleep(0.02)
    (history,) = histories(tmp_path)
    assert 2 <= len(history.iterations()) <= 4  # one that a busy machine makes very long is not counted


def test_the_optimizer_that_has_stepped_most_counts_and_another_takes_its_place_when_it_is_gone() -> None:
    begun: list[bool] = []
    fence = OptimizerFence(begun.append)
    try:
        first, second = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
        for optimizer in (first, second, first, second, first):
            optimizer.step()
        assert begun == [True, False, True, False, True]
        assert fence.updates == 3
        del first, optimizer
        assert fence.updates == 2
        second.step()
        assert (begun[-1], fence.updates) == (True, 3)
    finally:
        fence.remove()


def test_an_optimizer_for_each_parameter_costs_no_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fence = OptimizerFence(lambda _begins: None)
    try:
        optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(5)]
        for optimizer in optimizers:
            optimizer.step()

        def walked(_self: object) -> Any:
            raise AssertionError("every optimizer is looked at, at every step of each")

        for name in ("__iter__", "keys", "values", "items"):
            monkeypatch.setattr(type(fence._made), name, walked)
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
        assert fence.updates == 4
    finally:
        monkeypatch.undo()
        fence.remove()
