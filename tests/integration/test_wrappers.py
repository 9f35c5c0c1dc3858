"""Tensors that wrap others, from save to restore: exactly, lazily, and into nothing but their own kind."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe import (
    Checkpointer,
    ConfigError,
    MismatchError,
    TornError,
    TrainState,
    UnsupportedStateError,
    register_leaf,
)
from stillframe.integrations.dcp import Writer
from stillframe.integrations.pickled import to_leaves
from stillframe.save.device import HostDevice
from tests.support import assert_same, bytes_of
from tests.wrapping import NEAREST, Closed, Layer, Momentum, Recipe, Rounding, Scaled, Shifted, apart

dcp: Any = importlib.import_module("torch.distributed.checkpoint")


def trained(seed: int, steps: int = 1) -> tuple[Layer, Momentum]:
    model = Layer(seed)
    optimizer = Momentum(model.parameters())
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: Layer, optimizer: Momentum) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 48)).square().mean().backward()
    optimizer.step()


def save(root: Path, state: Any, step: int = 1) -> Any:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(step, state)
    return apart(state)


# --- there and back -------------------------------------------------------------------------


def test_in_dicts_and_lists_they_are_filled_in_place(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        nested = Shifted(Scaled.of(torch.randn(30, 40)), torch.randn(7))
        return {"w": Scaled.of(torch.randn(20, 20)), "rows": [nested, Scaled.of(torch.randn(0, 5))], "n": seed}

    saved = save(tmp_path, state(1))
    live = state(2)
    objects = list(map(id, live_objects(live)))
    assert stillframe.restore(tmp_path, live).step == 1
    assert_same(apart(live), saved)
    assert list(map(id, live_objects(live))) == objects


def live_objects(state: dict[str, Any]) -> list[Any]:
    return [state["w"], state["w"].codes, state["rows"][0], state["rows"][0].base, state["rows"][0].base.codes]


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_weights_and_optimizer_state_come_back_and_train_on_alike(
    tmp_path: Path, is_fresh: bool, is_named: bool
) -> None:
    """Into an optimizer that has made steps, and into one that has made none and so has no wrappers yet."""

    def state(model: Layer, optimizer: Momentum) -> Any:
        return TrainState(model, optimizer) if is_named else {"model": model, "optimizer": optimizer}

    model, optimizer = trained(1, steps=2)
    saved = save(tmp_path, state(model, optimizer))
    assert saved is not None
    other, its_optimizer = trained(2, steps=0 if is_fresh else 1)
    weight = other.weight
    stillframe.restore(tmp_path, state(other, its_optimizer))
    assert other.weight is weight
    for _ in range(2):
        assert_same(apart(other), apart(model))
        assert_same(apart(its_optimizer), apart(optimizer))
        for each in (model, optimizer), (other, its_optimizer):
            torch.manual_seed(3)
            train(*each)


def test_tied_wrappers_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    one = Scaled.of(torch.randn(50, 50))
    other = Scaled(one.codes[10:20], one.scale)
    saved = save(tmp_path, {"a": one, "again": one, "part": other, "codes": one.codes})
    found = stillframe.load(tmp_path)
    codes = [found["a"]["tensors"]["codes"], found["again"]["tensors"]["codes"], found["part"]["tensors"]["codes"]]
    assert len({each.untyped_storage().data_ptr() for each in (*codes, found["codes"])}) == 1
    live = Scaled.of(torch.randn(50, 50))
    state = {"a": live, "again": live, "part": Scaled(live.codes[10:20], live.scale), "codes": live.codes}
    stillframe.restore(tmp_path, state)
    assert_same(apart(state), saved)
    apart_now = {
        "a": live,
        "again": Scaled.of(torch.randn(50, 50)),
        "part": other,
        "codes": torch.zeros_like(one.codes),
    }
    stillframe.restore(tmp_path, apart_now)
    assert_same(apart(apart_now), saved)


def test_only_what_is_chosen_is_touched(tmp_path: Path) -> None:
    saved = save(tmp_path, {"a": Scaled.of(torch.randn(9, 9)), "b": Scaled.of(torch.randn(9, 9))})
    live = {"a": Scaled.of(torch.randn(9, 9)), "b": Scaled.of(torch.randn(9, 9))}
    before = apart(live)
    stillframe.restore(tmp_path, live, only="a")
    assert_same(apart(live), {"a": saved["a"], "b": before["b"]})
    with pytest.raises(ConfigError, match="'b/codes' matches nothing"):  # a wrapper is restored as a whole
        stillframe.restore(tmp_path, live, only="b/codes")


def test_a_plan_is_made_anew_when_the_kind_changes(tmp_path: Path) -> None:
    codes, scale = torch.zeros(40, 40, dtype=torch.int8), torch.ones(())
    with Checkpointer(tmp_path) as checkpointer:
        for step, context in enumerate([1, 1, 2], 1):
            checkpointer.save(step, {"w": Scaled(codes, scale, context)})
            checkpointer.fence()
    assert [stillframe.load(tmp_path, step)["w"]["context"] for step in (1, 2, 3)] == [1, 1, 2]


# --- lazily ---------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies out of host memory wait until it is set."""
    opened = threading.Event()
    plain = HostDevice.copy

    def gated(self: HostDevice, sources: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        assert opened.wait(60)
        plain(self, sources, into)

    monkeypatch.setattr(HostDevice, "copy", gated)
    yield opened
    opened.set()


def test_inner_tensors_of_weights_wait_and_those_of_buffers_do_not(tmp_path: Path, gate: threading.Event) -> None:
    model, optimizer = trained(1)
    with Checkpointer(tmp_path) as checkpointer:
        before = apart({"model": model, "optimizer": optimizer})
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        buffer = 48 * 48
        assert buffer <= checkpointer.stats().captured_bytes < buffer + 500
        model(torch.randn(4, 48)).square().mean().backward()  # changes the buffer
        gate.set()
        optimizer.step()
    live = trained(2)
    stillframe.restore(tmp_path, {"model": live[0], "optimizer": live[1]})
    assert_same(apart({"model": live[0], "optimizer": live[1]}), before)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.mul_(2.0), lambda w: w.codes.add_(1), lambda w: w.scale.add_(1)],
    ids=["outer", "codes", "scale"],
)
def test_a_change_without_a_fence_fails_the_save(
    tmp_path: Path, gate: threading.Event, change: Callable[[Any], object]
) -> None:
    state = {"w": Scaled(torch.zeros(40, 40, dtype=torch.int8), torch.ones(40), NEAREST)}
    with Checkpointer(tmp_path, on_error="warn") as checkpointer:
        torn = checkpointer.save(1, state)
        with torch.no_grad():
            change(state["w"])
        gate.set()
        with pytest.raises(TornError, match=r"'w/(codes|scale)'"):
            torn.wait()


def test_an_audit_names_the_inner_tensor(tmp_path: Path, gate: threading.Event) -> None:
    state = {"w": Scaled(torch.zeros(40, 40, dtype=torch.int8), torch.ones(()), NEAREST)}
    gate.set()
    with Checkpointer(tmp_path, on_error="warn", audit=True) as checkpointer:
        torn = checkpointer.save(1, state)
        state["w"].codes.data.add_(1)
        with pytest.raises(TornError, match="'w/codes'"):
            torn.wait()


# --- into nothing else ----------------------------------------------------------------------


def other_class() -> Any:
    class Scaled2(Scaled):
        pass

    return Scaled2.of(torch.ones(6, 6))


def three() -> Any:
    class Three(Scaled):
        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["codes", "scale", "more"], self.context

    Three.__module__, Three.__qualname__ = Scaled.__module__, Scaled.__qualname__
    found = Three.of(torch.ones(6, 6))
    found.more = torch.ones(2)
    return found


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "plain": (
        lambda: torch.ones(6, 6),
        r"w: a tests.wrapping.Scaled float32\[6, 6\] in the .*, float32\[6, 6\] in the",
    ),
    "class": (
        other_class,
        r"w: a tests.wrapping.Scaled .* in the checkpoint, a .*Scaled2 float32\[6, 6\] in the state",
    ),
    "context": (
        lambda: Scaled.of(torch.ones(6, 6), Recipe(Rounding("up", 8))),
        r"w: .* with the context .*nearest.*up",
    ),
    "shape": (lambda: Scaled.of(torch.ones(6, 7)), r"w: .*Scaled.*\[6, 6\] .*\[6, 7\]"),
    "names": (three, r"w: .* the inner tensors codes, scale in the checkpoint, with codes, scale, more in the state"),
    "inner": (
        lambda: Scaled(torch.ones(6, 6, dtype=torch.int8), torch.ones(6)),
        r"w/scale: float32\[\] in the checkpoint, float32\[6\] in the state",
    ),
    "value": (lambda: 3, r"w: a tests.wrapping.Scaled .*, a int in the state"),
    "closed": (lambda: Closed(torch.ones(6, 6)), r"w: .*, a tests.wrapping.Closed float32\[6, 6\] in the state"),
    "broken": (lambda: Scaled.of(torch.ones(6, 6), object()), r"w: .* whose flatten context holds an object"),
}


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ones")
    save(root, {"first": torch.arange(5), "w": Scaled.of(torch.ones(6, 6)), "plain": torch.ones(6, 6)})
    return root


@pytest.mark.parametrize("case", UNFIT)
def test_another_kind_is_a_mismatch_and_nothing_is_touched(ones: Path, case: str) -> None:
    make, match = UNFIT[case]
    live = {"first": torch.zeros(5, dtype=torch.int64), "w": make()}
    before = [bytes_of(each) for each in (live["w"].codes, live["w"].scale)] if isinstance(live["w"], Scaled) else None
    with pytest.raises(MismatchError, match=match):
        stillframe.restore(ones, live, exclude="plain")
    assert not live["first"].any()
    with pytest.warns(RuntimeWarning, match="restored in part"):
        report = stillframe.restore(ones, live, exclude="plain", strict=False)
    assert len(report.mismatched) == 1
    assert_same(live["first"], torch.arange(5))
    if isinstance(live["w"], Scaled):  # not even the inner tensors that would fit
        assert [bytes_of(each) for each in (live["w"].codes, live["w"].scale)] == before


@pytest.mark.parametrize("make", [lambda: Scaled.of(torch.ones(6, 6)), lambda: Closed(torch.ones(6, 6))])
def test_a_plain_tensor_does_not_go_into_a_wrapper(ones: Path, make: Callable[[], Any]) -> None:
    with pytest.raises(
        MismatchError, match=r"plain: float32\[6, 6\] in the checkpoint, a tests.wrapping.* in the state"
    ):
        stillframe.restore(ones, {"plain": make()}, only="plain")


def test_state_that_nobody_can_make_is_a_mismatch_even_if_not_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper whose context is more than plain values is restored only into a live one."""
    model, optimizer = trained(1)
    with torch.no_grad():
        optimizer.state[model.weight]["momentum"].context = NEAREST
    save(tmp_path, {"optimizer": optimizer})
    other, fresh = trained(2, steps=0)
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"optimizer/state/0/momentum: .*one step before restore\(\)"):
            stillframe.restore(tmp_path, {"optimizer": fresh}, strict=strict)
    assert not fresh.state
    assert other is not None


def test_within_a_registered_leaf_they_are_refused(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, w: Any) -> None:
            self.w = w

    register_leaf(Holder, "test.wrapper-holder", lambda each: {"w": each.w}, lambda data: Holder(data["w"]))
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(
            UnsupportedStateError, match=r"state\['h/w'\] is a tests.wrapping.Scaled within a registered leaf"
        ),
    ):
        checkpointer.save(1, {"h": Holder(Scaled.of(torch.ones(3)))})


# --- without a live one ---------------------------------------------------------------------


def test_load_gives_a_dict_of_what_is_stored(tmp_path: Path) -> None:
    one = Scaled.of(torch.randn(8, 4), {"bits": 8, "sizes": (1, 2)})
    save(tmp_path, {"w": Shifted(one, torch.ones(3)), "n": 1})
    found = stillframe.load(tmp_path)["w"]
    inner = found["tensors"].pop("base")
    assert_same(
        found,
        {"wrapper": "tests.wrapping.Shifted", "dtype": "float32", "shape": (8, 4), "context": None,
         "tensors": {"shift": torch.ones(3)}},
    )  # fmt: skip
    assert (inner["wrapper"], inner["shape"]) == ("tests.wrapping.Scaled", (8, 4))
    assert inner["context"]["items"][0] == ["bits", 8]
    assert_same(inner["tensors"], {"codes": one.codes, "scale": one.scale})
    assert list(stillframe.load(tmp_path, only="w/shift")["w"]["tensors"]) == ["shift"]


# --- inside other loops, which could not read them back --------------------------------------


def test_dcp_is_refused_one(tmp_path: Path) -> None:
    state = {"model": {"w": Scaled.of(torch.ones(4, 4)), "b": torch.ones(3)}}
    writer = Writer(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")
        with pytest.raises(
            dcp.CheckpointException, match=r"'model.w' is a Scaled, a tensor that wraps others: DCP could not read it"
        ):
            dcp.save(state, storage_writer=writer, no_dist=True)
    writer.close()
    assert stillframe.Catalog(tmp_path).steps() == []


def test_a_state_dict_of_deepspeed_needs_pickle_for_one() -> None:
    assert_same(to_leaves({"b": torch.ones(3)}, ""), {"b": torch.ones(3)})
    with pytest.raises(UnsupportedStateError, match=r"m/w is a tests.wrapping.Scaled, which only pickle can hold"):
        to_leaves({"m": {"w": Scaled.of(torch.ones(4, 4))}}, "allow it")


class Computed(Scaled):
    """Gives a copy of its codes whenever it is asked."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["fresh", "scale"], self.context

    @property
    def fresh(self) -> torch.Tensor:
        return self.codes.clone()


def test_a_wrapper_that_makes_its_tensors_anew_is_not_said_to_be_restored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": Computed.of(torch.ones(4, 4))}).wait()
        with pytest.raises(MismatchError, match="anew"):
            checkpointer.restore({"w": Computed.of(torch.zeros(4, 4))})
