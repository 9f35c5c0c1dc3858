"""Optimizers: the state of another kind does not fit; one that makes its own state dict is saved and restored by it."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import stillframe
from stillframe import Catalog, Checkpointer, ConfigError, MismatchError, TrainState
from stillframe.checkpoint.stored import Stored
from stillframe.restoring.match import Match
from stillframe.restoring.selection import Selection
from stillframe.state.walk import Walk
from tests.support import assert_same, make_model, train_step

KINDS = [
    torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.SGD,
]  # fmt: skip
ALIKE = {frozenset({torch.optim.Adam, torch.optim.AdamW})}
"""The same state and settings: one can go on from the other."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4))


def stepped(kind: Any, **settings: Any) -> torch.optim.Optimizer:
    held = parameter()
    optimizer: torch.optim.Optimizer = kind([held], lr=0.25, **settings)
    held.grad = torch.ones(4)
    optimizer.step()
    return optimizer


def test_each_optimizer_takes_its_own_state_and_no_other(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {kind.__name__: stepped(kind) for kind in KINDS})
    with Catalog(root).open(1) as checkpoint:
        stored = Stored(checkpoint, 0, is_merged=False)
        for saved in KINDS:
            for live in KINDS:
                state = {saved.__name__: live([parameter()], lr=0.5)}
                found = Match(stored, state, Selection(only=(saved.__name__,))).findings
                if saved is live or frozenset({saved, live}) in ALIKE:
                    assert not found.has_any
                else:
                    (told,) = found.mismatched
                    assert re.search(f"saved by {saved.__name__} with .*; this {live.__name__} has", told)


@pytest.mark.parametrize("form", ["optimizer", "state dict", "TrainState"])
def test_what_another_kind_saved_is_told_with_both_sides_before_anything_is_touched(root: Path, form: str) -> None:
    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return TrainState(model, optimizer) if form == "TrainState" else {"model": model, "optimizer": optimizer}

    model = make_model()
    adamw = torch.optim.AdamW(model.parameters())
    train_step(model, adamw)
    with Checkpointer(root) as checkpointer:
        if form == "state dict":
            checkpointer.save(1, {"model": model, "optimizer": adamw.state_dict()})
        else:
            checkpointer.save(1, state_of(model, adamw))
    other = make_model()
    sgd = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    weight, before = other[0].weight.detach().clone(), sgd.state_dict()  # type: ignore[index]
    by = "an optimizer" if form == "state dict" else "AdamW"
    told = f"optimizer: saved by {by} with amsgrad, betas, .*; this SGD has dampening, momentum, nesterov"
    with pytest.raises(MismatchError, match=told):
        stillframe.restore(root, state_of(other, sgd))
    assert_same(other[0].weight.detach(), weight)  # type: ignore[index]
    with pytest.warns(RuntimeWarning, match=r"1 different \(optimizer\)"):
        report = stillframe.restore(root, state_of(other, sgd), strict=False)
    assert report.mismatched[0].startswith("optimizer: saved by")
    assert_same(sgd.state_dict(), before)
    assert_same(other[0].weight.detach(), model[0].weight.detach())  # type: ignore[index]
    stillframe.restore(root, state_of(other, sgd), exclude="optimizer")


def test_another_version_of_the_same_optimizer_fits_and_keeps_what_the_checkpoint_lacks(root: Path) -> None:
    """Other versions of torch have other settings; schedulers and users put theirs into the groups."""
    old = stepped(torch.optim.AdamW)
    group = old.param_groups[0]
    del group["decoupled_weight_decay"], group["foreach"], group["amsgrad"]
    group["was_dropped_since"], group["initial_lr"] = True, 0.25
    plain = stepped(torch.optim.AdamW).state_dict()
    del plain["param_groups"][0]["decoupled_weight_decay"], plain["param_groups"][0]["amsgrad"]
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"optimizer": old})
        checkpointer.save(2, {"optimizer": plain})
    for step in (1, 2):
        fresh = torch.optim.AdamW([parameter()], lr=0.5, amsgrad=True)
        fresh.param_groups[0]["name"] = "all"
        stillframe.restore(root, {"optimizer": fresh}, step)
        found = fresh.param_groups[0]
        assert (found["lr"], found["amsgrad"], found["name"]) == (0.25, True, "all")
        assert found["decoupled_weight_decay"]
        assert_same(fresh.state_dict()["state"], old.state_dict()["state"])


class Container(torch.optim.Optimizer):
    """As that of torchtitan: several optimizers as one, whose state dict is flat, by the names of parameters."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self.models = models
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.125) for model in models]
        self.average = torch.zeros(3)
        super().__init__([each for model in models for each in model.parameters()], {"lr": 0.125})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        get = functools.partial(get_optimizer_state_dict, options=StateDictOptions(flatten_optimizer_state_dict=True))
        found = {key: value for each in map(get, self.models, self.optimizers) for key, value in each.items()}
        return {**found, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state.pop("average")
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            set_optimizer_state_dict(
                model, optimizer, state, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )


def contained() -> Container:
    models: list[torch.nn.Module] = [torch.nn.ModuleDict({name: torch.nn.Linear(64, 64)}) for name in "ab"]
    return Container(models)


def advance(container: Container) -> None:
    for model in container.models:
        for each in model.parameters():
            each.grad = torch.randn_like(each)
    container.step()


def test_an_optimizer_with_a_layout_of_its_own_is_saved_and_restored_by_its_own_state_dict(root: Path) -> None:
    first = contained()
    advance(first)
    first.average.fill_(3.0)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"optimizers": first})
        checkpointer.save(2, {"optimizers": stepped(torch.optim.AdamW)})
        expected = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in first.state_dict().items()
        }
        first.average.fill_(9.0)
        advance(first)  # waits until what is saved is copied
    assert_same(dict(sorted(stillframe.load(root, 1)["optimizers"].items())), dict(sorted(expected.items())))
    for live in (contained(), first):
        stillframe.restore(root, {"optimizers": live}, 1)
        assert_same(live.state_dict(), expected)
        assert live.optimizers[1].param_groups[0]["lr"] == 0.125
        assert live.optimizers[1].state_dict()["state"][0]["exp_avg"].abs().sum() > 0
    with pytest.raises(MismatchError, match="this Container has a layout of its own"):
        stillframe.restore(root, {"optimizers": first}, 2)
    with pytest.raises(MismatchError, match="no state of an optimizer"):
        stillframe.restore(root, {"optimizers": stepped(torch.optim.AdamW)}, 1)


def test_its_state_keeps_its_dtype(root: Path) -> None:
    """``Optimizer.load_state_dict`` casts it to that of the parameter."""
    first, live = contained(), contained()
    for container, value in ((first, 3.0), (live, 0.0)):
        advance(container)
        for optimizer in container.optimizers:
            for state in optimizer.state.values():
                state["exp_avg"] = torch.full_like(state["exp_avg"], value, dtype=torch.bfloat16)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"optimizers": first})
    stillframe.restore(root, {"optimizers": live})
    kept = [state["exp_avg"] for optimizer in live.optimizers for state in optimizer.state.values()]
    assert {each.dtype for each in kept} == {torch.bfloat16}
    assert all(each.eq(3.0).all() for each in kept)


class Shell(torch.optim.Optimizer):
    """As some wrappers: of torch's optimizer it has the class, and neither state nor groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def test_a_wrapper_that_has_no_state_of_its_own_is_staged_as_what_it_wraps() -> None:
    inner = stepped(torch.optim.AdamW)
    walk = Walk({"optimizer": Shell(inner)})
    assert len(walk.tensors) > 1
    assert not any(walk.is_volatile)


def test_its_state_is_staged_lazily_and_what_else_it_holds_is_captured() -> None:
    container = contained()
    advance(container)
    walk = Walk({"optimizers": container})
    volatile = [tensor for tensor, is_volatile in zip(walk.tensors, walk.is_volatile, strict=True) if is_volatile]
    assert len(walk.tensors) == 3 * 4 + 1
    assert [each is container.average for each in volatile] == [True]
    assert set(map(id, container.optimizers)) < set(map(id, walk.owners))


def test_a_train_state_cannot_name_what_has_a_layout_of_its_own(root: Path) -> None:
    container = contained()
    with Checkpointer(root) as checkpointer, pytest.raises(ConfigError, match=r"TrainState\(model, container=…\)"):
        checkpointer.save(1, TrainState(container.models[0], container))


def wide(kind: Any, *shapes: tuple[int, ...]) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer: torch.optim.Optimizer = kind(parameters, lr=0.25)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.5)])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_state_of_another_shape_than_the_parameters_is_a_mismatch(root: Path, kind: Any, is_fresh: bool) -> None:
    """A wider model, or the parameters in another order: torch itself takes it, and the next update fails."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"optimizer": wide(kind, (4, 4), (3,), ())}).wait()
        live = wide(kind, (4, 4), (5,), ())
        if is_fresh:
            live.state.clear()
        before = {key: dict(value) for key, value in live.state.items()}
        with pytest.raises(MismatchError, match=r"optimizer/state/1/.*\[3\] in the checkpoint.*\[5\] in the state"):
            checkpointer.restore({"optimizer": live})
        assert {key: dict(value) for key, value in live.state.items()} == before
        with pytest.warns(RuntimeWarning, match="optimizer/state/1/"):
            report = checkpointer.restore({"optimizer": live}, strict=False)
        assert report.mismatched
        first, second, third = live.param_groups[0]["params"]
        assert all(value.shape in ((), (4, 4)) for value in live.state[first].values())
        assert live.state[first]
        assert live.state[third]
        assert live.state.get(second, {}).keys() == (set() if is_fresh else before[second].keys())
        assert all(value.shape in ((), (5,)) for value in live.state.get(second, {}).values())
        live.step()


def test_state_that_is_not_shaped_like_its_parameter_is_taken_where_that_is_the_rule(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        saved = wide(torch.optim.Adafactor, (4, 6))
        checkpointer.save(1, {"optimizer": saved}).wait()
        live = wide(torch.optim.Adafactor, (4, 6))
        live.state.clear()
        checkpointer.restore({"optimizer": live})
    assert_same(list(saved.state_dict()["state"].values()), list(live.state_dict()["state"].values()))
