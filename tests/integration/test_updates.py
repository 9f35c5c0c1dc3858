"""A tensor that changes between save() and the fence: copied in time, or the save fails and names it.

Copies from host memory are held back by a gate, so that every change comes before them.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import stillframe
from stillframe import Checkpointer, Save, TornError
from stillframe.save.device import HostDevice
from tests.support import assert_same

WIDTH = 24


class Bench:
    """One checkpointer for many states, and the gate."""

    def __init__(self, root: Path, checkpointer: Checkpointer) -> None:
        self.root = root
        self.checkpointer = checkpointer
        self.gate = threading.Event()
        self.gate.set()
        self.captured_bytes = 0
        self._steps = itertools.count(1)

    def save(self, state: Any) -> Save:
        """Nothing of it is copied before the gate is opened."""
        self.gate.clear()
        before = self.checkpointer.stats().captured_bytes
        save = self.checkpointer.save(next(self._steps), state)
        self.captured_bytes = self.checkpointer.stats().captured_bytes - before
        return save

    def load(self, save: Save) -> Any:
        self.gate.set()
        save.wait()
        return stillframe.load(self.root, save.step)

    def fails(self, save: Save, match: str) -> None:
        self.gate.set()
        with pytest.raises(TornError, match=match):
            save.wait()
        assert save.step not in stillframe.Catalog(self.root).steps()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("updates")
    with Checkpointer(root, on_error="warn") as checkpointer:
        yield Bench(root, checkpointer)


@pytest.fixture
def bench(opened: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    plain = HostDevice.copy

    def gated(self: HostDevice, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        assert opened.gate.wait(60)
        plain(self, sources, into)

    monkeypatch.setattr(HostDevice, "copy", gated)
    yield opened
    opened.gate.set()
    opened.checkpointer.fence()


def values_of(node: Any) -> Any:
    """A copy of what the state is now, as load() gives it."""
    if isinstance(node, torch.Tensor):
        return node.detach().clone()
    if isinstance(node, dict):
        return {key: values_of(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(values_of, node))
    return values_of(dict(node.state_dict())) if hasattr(node, "state_dict") else copy.deepcopy(node)


# --- what its own module changes in forward ----------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Embedding | torch.nn.EmbeddingBag]) -> None:
        super().__init__()
        self.embedding = kind(64, WIDTH, max_norm=1.0)
        self.head = torch.nn.Linear(WIDTH, 64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embedding(tokens.view(1, -1)))
        return found


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_a_weight_that_its_forward_scales_down_is_saved_as_it_was(bench: Bench, kind: type[Any]) -> None:
    """Wherever it stands in the state; its optimizer state is still copied lazily."""
    model = Tied(kind)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "head": model.head, "rows": model.embedding.weight.detach()[:32]}
    for tokens in (torch.arange(32), torch.arange(32, 64)):  # the second save reuses the plan
        before = values_of(state)
        save = bench.save(state)
        model(tokens).sum().backward()
        assert not torch.equal(model.head.weight, before["model"]["head.weight"])
        assert bench.captured_bytes < (2 + 1) * model.head.weight.nbytes
        assert_same(bench.load(save), before)
        optimizer.step()


def test_running_statistics_in_a_plain_state_dict_are_saved_as_they_were(bench: Bench) -> None:
    """torch changes them in forward and does not count it."""
    norm = torch.nn.BatchNorm1d(100)
    for _ in range(2):
        state = {"model": norm.state_dict()}
        before = {"model": {key: value.clone() for key, value in norm.state_dict().items()}}
        save = bench.save(state)
        norm(torch.randn(4, 100))
        assert not torch.equal(state["model"]["running_mean"], before["model"]["running_mean"])
        assert_same(dict(bench.load(save)["model"]), before["model"])


# --- changes by hand ---------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """A module of a user's own that does what max_norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.table, max_norm=0.1)


def hand_tensor() -> tuple[Any, Callable[[], object]]:
    tensors = [torch.zeros(100) for _ in range(40)]
    return {"good": torch.zeros(100), "torn": tensors}, lambda: tensors[7].add_(1)


def hand_average() -> tuple[Any, Callable[[], object]]:
    model = torch.nn.Linear(WIDTH, WIDTH)
    average = {name: each.detach().clone() for name, each in model.named_parameters()}
    return {"model": model, "torn": average}, lambda: torch._foreach_lerp_(
        list(average.values()), list(model.parameters()), 0.5
    )


def hand_buffer() -> tuple[Any, Callable[[], object]]:
    model = torch.nn.Linear(WIDTH, WIDTH)
    model.register_buffer("torn", torch.zeros(100))
    return dict(model.state_dict()), lambda: model.get_buffer("torn").add_(1)


def hand_load() -> tuple[Any, Callable[[], object]]:
    model = torch.nn.Linear(WIDTH, WIDTH)
    return {"torn": model}, lambda: model.load_state_dict({name: each * 2 for name, each in model.state_dict().items()})


def hand_forward() -> tuple[Any, Callable[[], object]]:
    model = Scaled()
    return {"torn": model}, lambda: model(torch.arange(8))


def hand_base() -> tuple[Any, Callable[[], object]]:
    flat = torch.zeros(200)
    return {"torn": flat[50:]}, lambda: flat[100:].add_(1)


def hand_average_too_late() -> tuple[Any, Callable[[], object]]:
    """Saved between the update and the average."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    return {"model": model, "torn": average}, lambda: average.update_parameters(model)


HANDS = [hand_tensor, hand_average, hand_buffer, hand_load, hand_forward, hand_base, hand_average_too_late]


@pytest.mark.parametrize("hand", HANDS, ids=lambda hand: hand.__name__)
@pytest.mark.parametrize("has_fence", [False, True])
def test_a_change_by_hand_without_a_fence_fails_the_save_and_names_the_tensor(
    bench: Bench, hand: Callable[[], tuple[Any, Callable[[], object]]], has_fence: bool
) -> None:
    """Whether the next fence comes before the end of staging, or none; with a fence around it, it is well."""
    state, change = hand()
    save = bench.save(state)
    change()
    if has_fence:
        bench.gate.set()
        bench.checkpointer.fence()
    bench.fails(save, r"'torn(/.*)?' .*changed in place.*fence\(\)")
    before = values_of(state)
    save = bench.save(state)
    bench.gate.set()
    bench.checkpointer.fence()
    change()
    assert_same(bench.load(save), before)


def test_an_average_after_a_step_that_the_scaler_skipped_fails_the_save(bench: Bench) -> None:
    """No hook of the optimizer runs then, so nothing waits; after a step that is made, the average needs no fence."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = {"model": model, "average": dict(average.state_dict())}
    for factor, is_skipped in ((1.0, False), (float("inf"), True)):
        before = values_of(state)
        save = bench.save(state)
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(2, WIDTH)).sum() * factor).backward()
        if not is_skipped:
            bench.gate.set()
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.5)
        if is_skipped:
            bench.fails(save, "'average/weight'")
        else:
            assert_same(bench.load(save), before)


@pytest.mark.parametrize("shape", [(3, 300_000), (900,)], ids=["large", "small"])
@pytest.mark.parametrize("left", [0, 400])
def test_memory_that_is_given_back_before_the_copy_fails_the_save_and_not_the_process(
    bench: Bench, shape: tuple[int, ...], left: int
) -> None:
    """As loops do that move a model away: ``resize_`` moves no version.  Small tensors are copied several at a time."""
    tensors = [torch.ones(shape), torch.ones(shape)]
    save = bench.save({f"{left} of {shape}": tensors})  # another state each time: what is new at each save is captured
    tensors[0].untyped_storage().resize_(left)
    bench.gate.set()
    with pytest.raises(stillframe.StateError, match=r"storage was resized .* call checkpointer.fence\(\) first"):
        save.wait()
    sound = bench.save([torch.ones(shape)])
    assert_same(bench.load(sound), [torch.ones(shape)])


def test_what_has_no_version_is_not_looked_at(bench: Bench) -> None:
    with torch.inference_mode():
        inference = torch.ones(100)
    state = {"inference": inference, "torn": torch.ones(100)}
    before = values_of(state)
    assert_same(bench.load(bench.save(state)), before)
    save = bench.save(state)
    state["torn"].add_(1)
    bench.fails(save, "'torn'")


# --- sound loops -------------------------------------------------------------------------------


class Loop:
    """A model, its optimizers, and how an iteration goes; ``before_update`` comes after all that no fence waits for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.more: dict[str, Any] = {}

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.randn(4, WIDTH)).square().mean()
        return found

    def iterate(self, before_update: Callable[[], object]) -> None:
        self.loss().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Foreach(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True, amsgrad=True)


class Fused(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)


class Accumulated(Loop):
    """Autocast, several backwards, clipping, gradients that stay, evaluation in between, a learning rate that is a
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.1), foreach=False)
        self.scheduler = self.more["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def iterate(self, before_update: Callable[[], object]) -> None:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.loss()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.model.eval()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                self.loss()
        self.model.train()
        before_update()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=False)


class ScaledSteps(Loop):
    """Every other step is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = self.more["scaler"] = torch.amp.GradScaler("cpu")
        self.factors = itertools.cycle([1.0, float("inf")])

    def iterate(self, before_update: Callable[[], object]) -> None:
        self.scaler.scale(self.loss() * next(self.factors)).backward()
        self.scaler.unscale_(self.optimizer)
        before_update()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Averaged(Loop):
    """Averages after the step: one of torch, one by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.average = self.more["average"] = AveragedModel(self.model)
        self.more["by hand"] = {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def iterate(self, before_update: Callable[[], object]) -> None:
        super().iterate(before_update)
        self.average.update_parameters(self.model)
        for name, each in self.model.named_parameters():
            self.more["by hand"][name].lerp_(each.detach(), 0.1)


class Searched(Loop):
    """LBFGS changes the parameters, and goes through forward and backward, several times in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def iterate(self, before_update: Callable[[], object]) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.loss().backward()
        before_update()
        self.optimizer.step(closure)  # type: ignore[arg-type]


class InBackward(Loop):
    """Each parameter is updated as soon as it has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before_update: Callable[[], object] = lambda: None
        for number, each in enumerate(self.model.parameters()):
            optimizer = self.more[f"optimizer {number}"] = torch.optim.Adam([each])

            def update(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                self.before_update()
                optimizer.step()
                optimizer.zero_grad()

            each.register_post_accumulate_grad_hook(update)

    def iterate(self, before_update: Callable[[], object]) -> None:
        self.before_update = before_update
        self.loss().backward()


class Wrapped(Loop):
    """A compiled layer, parametrizations with buffers of their own, recomputed activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = torch.nn.Linear(WIDTH, WIDTH)
        self.first.compile(backend="aot_eager")
        self.second = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.third = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.model = torch.nn.Sequential(self.first, self.second, self.third)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self) -> torch.Tensor:
        hidden: Any = checkpoint(self.second, self.first(torch.randn(4, WIDTH)), use_reentrant=False)
        found: torch.Tensor = self.third(hidden).square().mean()
        return found


LOOPS = [Loop, Foreach, Fused, Accumulated, ScaledSteps, Averaged, Searched, InBackward, Wrapped]


@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_a_sound_loop_is_never_refused(bench: Bench, kind: type[Loop]) -> None:
    """Everything up to the update happens before the copy begins."""
    loop = kind()
    state = {"model": loop.model, "optimizer": loop.optimizer, **loop.more}
    for _ in range(4):
        before = values_of(state)
        save = bench.save(state)
        loop.iterate(bench.gate.set)
        assert_same(bench.load(save), before)
