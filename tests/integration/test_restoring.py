"""Restoring: in place, all or nothing where it does not fit, and exactly as saved."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, MismatchError, RestoreReport, StateError, spi
from stillframe.model import SaveId
from stillframe.restoring.place import Placement
from tests import layout
from tests.support import assert_same, make_model, train_step


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(root: Path, state: Any, step: int = 1) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(step, state)


def restore(root: Path, state: Any, **options: Any) -> RestoreReport:
    with Checkpointer(root) as checkpointer:
        return checkpointer.restore(state, **options)


def test_an_empty_root_restores_nothing(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        report = checkpointer.restore({"anything": 1})
    assert (report.step, report.next_step, bool(report)) == (None, 0, False)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(root: Path) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(3)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": stillframe.RNG(), "log": []}

    def advance(state: dict[str, Any]) -> None:
        train_step(state["model"], state["optimizer"])
        state["scheduler"].step()
        state["log"].append(float(numpy.random.rand()))

    numpy.random.seed(5)
    alone = make()
    for _ in range(8):
        advance(alone)
    numpy.random.seed(5)
    first = make()
    with Checkpointer(root) as checkpointer:
        for step in range(1, 6):
            advance(first)
            checkpointer.save(step, first)
    second = make()
    with Checkpointer(root) as checkpointer:
        report = checkpointer.restore(second)
        assert report.step == 5
        for step in range(report.next_step, 9):
            advance(second)
            checkpointer.save(step, second)
    for part in ("model", "optimizer", "scheduler", "rng"):
        assert_same(second[part].state_dict(), alone[part].state_dict(), part)
    assert second["log"] == alone["log"]


def test_tensors_keep_their_memory_and_values_go_back_into_their_holders(root: Path) -> None:
    inner: dict[str, Any] = {"position": 7}
    save(root, {"weights": torch.ones(5), "inner": {"position": 8, "extra": (1, 2)}, "log": [1, 2, 3]})
    weights, log = torch.zeros(5), [9]
    state = {"weights": weights, "inner": inner, "log": log}
    restore(root, state)
    assert state["weights"] is weights
    assert state["inner"] is inner
    assert state["log"] is log
    assert torch.equal(weights, torch.ones(5))
    assert inner == {"position": 8, "extra": (1, 2)}
    assert log == [1, 2, 3]


def test_an_optimizer_before_its_first_step_gets_its_state(root: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    save(root, {"optimizer": optimizer})
    fresh = torch.optim.AdamW(make_model().parameters())
    restore(root, {"optimizer": fresh})
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_an_optimizer_with_state_keeps_its_tensors(root: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    save(root, {"optimizer": optimizer})
    expected = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    train_step(model, optimizer)
    memory = optimizer.state_dict()["state"][0]["exp_avg"].data_ptr()
    restore(root, {"optimizer": optimizer})
    assert optimizer.state_dict()["state"][0]["exp_avg"].data_ptr() == memory
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], expected)


def test_everything_that_does_not_fit_is_listed_at_once_and_nothing_is_touched(root: Path) -> None:
    save(root, {"same": torch.ones(3), "shape": torch.ones(3), "dtype": torch.ones(3), "gone": torch.ones(3), "n": 1})
    state = {
        "same": torch.zeros(3), "shape": torch.zeros(4), "dtype": torch.zeros(3, dtype=torch.float64),
        "new": torch.zeros(3), "n": 0,
    }  # fmt: skip
    with pytest.raises(MismatchError) as caught:
        restore(root, state)
    text = str(caught.value)
    for part in ("shape: float32[3] in the checkpoint, float32[4]", "dtype: float32[3]", "gone", "new", "strict=False"):
        assert part in text
    assert_same(state["same"], torch.zeros(3))
    assert state["n"] == 0


def test_a_module_that_does_not_fit_touches_nothing(root: Path) -> None:
    save(root, {"model": torch.nn.Linear(3, 3), "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])})
    model = torch.nn.Linear(4, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(MismatchError, match=r"(?s)model/bias.*model/weight.*optimizer: parameter groups"):
        restore(root, {"model": model, "optimizer": optimizer})
    assert torch.equal(model.weight, before)


def test_not_strict_restores_what_matches_and_says_what_did_not(root: Path) -> None:
    save(root, {"same": torch.ones(3), "shape": torch.ones(3), "gone": torch.ones(3), "model": torch.nn.Linear(2, 2)})
    state = {"same": torch.zeros(3), "shape": torch.zeros(4), "new": torch.zeros(3), "model": torch.nn.Linear(2, 2)}
    with pytest.warns(RuntimeWarning, match="step 1 was restored in part") as caught:
        report = restore(root, state, strict=False)
    (warning,) = caught
    assert warning.filename == __file__
    for part in ("1 in the state but not in the checkpoint (new)", "not in the state (gone)", "1 different (shape)"):
        assert part in str(warning.message)
    assert report.step == 1
    assert (report.missing, report.unexpected) == (("new",), ("gone",))
    assert len(report.mismatched) == 1
    assert torch.equal(state["same"], torch.ones(3))  # type: ignore[arg-type]
    assert torch.equal(state["shape"], torch.zeros(4))  # type: ignore[arg-type]
    assert report.bytes == 3 * 4 + (4 + 2) * 4


def test_step_0_is_a_step(root: Path) -> None:
    save(root, {"n": 1}, step=0)
    report = restore(root, {"n": 0})
    assert (report.step, report.next_step, bool(report)) == (0, 1, True)


def test_an_object_that_refuses_its_state_is_named(root: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("m")

    save(root, {"loaders": [Refusing()]})
    with pytest.raises(StateError, match=r"loaders/0: load_state_dict of Refusing.*overwritten") as told:
        restore(root, {"loaders": [Refusing()]})
    assert isinstance(told.value.__cause__, StateError)
    assert isinstance(told.value.__cause__.__cause__, KeyError)


def test_an_older_step_can_be_asked_for(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"n": step})
    state = {"n": 0}
    restore(root, state, step=2)
    assert state == {"n": 2}
    with pytest.raises(stillframe.NotFoundError, match="nearest is step 3"):
        restore(root, state, step=9)


def test_tied_weights_are_written_once_and_tied_again(root: Path) -> None:
    model = make_model(300)
    save(root, {"model": model, "again": model.state_dict()["2.weight"]})
    (segment,) = layout.segments(root, 1)
    assert segment.stat().st_size < 4096 + 3 * 300 * 300 * 4
    loaded = stillframe.load(root)
    assert loaded["model"]["2.weight"].data_ptr() == loaded["model"]["4.weight"].data_ptr()
    fresh = make_model(300)
    restore(root, {"model": fresh, "again": torch.zeros(300, 300)})
    assert fresh[2].weight is fresh[4].weight  # type: ignore[index]
    assert_same(fresh.state_dict(), model.state_dict())


def test_non_contiguous_live_tensors_are_filled_in_place(root: Path) -> None:
    source = torch.arange(6_000_000, dtype=torch.float32).reshape(2000, 3000)
    save(root, {"weights": source, "row": torch.arange(4.0), "scalar": torch.tensor(3.0)})
    base = torch.zeros(3000, 2000)
    expanded = torch.zeros(1).expand(4)
    save(root, {"weights": source, "row": torch.full((4,), 2.0), "scalar": torch.tensor(3.0)}, step=2)
    restore(root, {"weights": base.t(), "row": expanded, "scalar": torch.zeros(())})
    assert torch.equal(base.t(), source)
    assert torch.equal(expanded, torch.full((4,), 2.0))


def test_an_object_may_be_restored_from_its_dict_and_the_other_way_round(root: Path) -> None:
    model = make_model()
    save(root, {"model": model.state_dict()})
    fresh = make_model()
    restore(root, {"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    save(root, {"model": model}, step=2)
    plain = make_model().state_dict()
    restore(root, {"model": plain})
    assert_same(dict(plain), dict(model.state_dict()))


def test_extra_state_and_load_hooks_of_a_module_run(root: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))
            self.extra = 0
            self.loads = 0
            self.register_load_state_dict_post_hook(self.loaded)  # type: ignore[no-untyped-call]

        def loaded(self, *_: Any) -> None:
            self.loads += 1

        def get_extra_state(self) -> dict[str, int]:
            return {"extra": self.extra}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.extra = state["extra"]

    model = Odd()
    model.extra = 5
    save(root, {"model": model})
    fresh = Odd()
    restore(root, {"model": fresh})
    assert (fresh.extra, fresh.loads) == (5, 1)


def test_numpy_arrays_come_back_in_place_or_as_they_were(root: Path) -> None:
    save(root, {"same": numpy.arange(5), "other": numpy.arange(6.0), "flag": numpy.float32(2.5)})
    same = numpy.zeros(5, dtype=numpy.int64)
    state: dict[str, Any] = {"same": same, "other": numpy.zeros(2), "flag": numpy.float32(0)}
    restore(root, state)
    assert state["same"] is same
    assert_same(state, {"same": numpy.arange(5), "other": numpy.arange(6.0), "flag": numpy.float32(2.5)})


def test_keys_of_any_type_come_back_as_they_were(root: Path) -> None:
    state = {1: torch.ones(2), "1": torch.zeros(2), (2, "x"): [True, None], "a/b~c": torch.ones(1), 2.5: b"bytes"}
    save(root, {"state": state, "ordered": OrderedDict(b=1, a=2)})
    assert_same(stillframe.load(root), {"state": state, "ordered": OrderedDict(b=1, a=2)})


def test_only_reads_what_is_asked_for(root: Path) -> None:
    save(
        root,
        {"model": {"a.weight": torch.ones(3), "a.bias": torch.zeros(3)}, "other": {"x": 1}, "rows": [1, torch.ones(1)]},
    )
    assert_same(stillframe.load(root, only="model"), {"model": {"a.weight": torch.ones(3), "a.bias": torch.zeros(3)}})
    assert_same(
        stillframe.load(root, only=["model/*.bias", "other"]), {"model": {"a.bias": torch.zeros(3)}, "other": {"x": 1}}
    )
    with pytest.raises(stillframe.NotFoundError, match=r"matches nothing.*model/a\.weight"):
        stillframe.load(root, only="nothing")


def test_exactly_one_save_as_a_rank_sees_it_and_what_is_not_wanted(root: Path) -> None:
    state = {"model": {"a": torch.ones(3)}, "more": {"x": 1}}
    save(root, state)
    found = Catalog(root).find(1)
    assert_same(spi.load_save(root, found, 5), state)  # a rank that it has not
    assert_same(spi.load_rank(root, found, 0, exclude=["model"]), {"more": {"x": 1}})
    assert spi.load_rank(root, found, 0, exclude=["model", "more"]) == {}
    with pytest.raises(stillframe.NotFoundError):
        spi.load_save(root, SaveId(2), 0)


def test_a_leaf_type_of_ones_own(root: Path) -> None:
    class Window:
        def __init__(self, values: torch.Tensor, size: int) -> None:
            self.values, self.size = values, size

    stillframe.register_leaf(
        Window,
        "test.window",
        lambda window: {"values": window.values, "size": window.size},
        lambda data: Window(**data),
    )
    save(root, {"window": Window(torch.ones(3), 7)})
    state = {"window": Window(torch.zeros(3), 0)}
    restore(root, state)
    assert (state["window"].size, state["window"].values.tolist()) == (7, [1, 1, 1])
    with pytest.raises(stillframe.ConfigError, match="registered already"):
        stillframe.register_leaf(dict, "test.window", dict, dict)


def test_a_leaf_that_cannot_be_made_again_is_named(root: Path) -> None:
    """Its class has changed, or somebody has made the file."""

    class Config:
        def __init__(self) -> None:
            self.rate = 0.5

    stillframe.register_leaf(Config, "test.config", lambda config: [config.rate], lambda data: data["rate"])
    save(root, {"config": Config(), "x": torch.ones(3)})
    message = r"'config' was saved as a leaf named 'test.config', of which no .*Config could be made"
    with pytest.raises(stillframe.UnsupportedStateError, match=f"{message}: TypeError") as told:
        stillframe.load(root)
    assert isinstance(told.value.__cause__, TypeError)
    with pytest.raises(stillframe.StateError, match=f"{message}.*partly overwritten"):
        restore(root, {"config": None, "x": torch.zeros(3)})
    assert_same(stillframe.load(root, only="x"), {"x": torch.ones(3)})


def test_a_leaf_is_loaded_whole_or_not_at_all(root: Path) -> None:
    class Pair:
        def __init__(self, data: dict[str, Any]) -> None:
            self.data = data

    stillframe.register_leaf(Pair, "test.pair", lambda pair: pair.data, Pair)
    save(root, {"pair": Pair({"a": torch.ones(3), "b": 2})})
    assert_same(stillframe.load(root, only="pair")["pair"].data, {"a": torch.ones(3), "b": 2})
    assert_same(spi.load_rank(root, 1, 0, exclude=["pair/a"])["pair"].data, {"a": torch.ones(3), "b": 2})
    with pytest.raises(stillframe.NotFoundError, match="holds pair"):
        stillframe.load(root, only="pair/a")


def test_an_interrupt_in_the_middle_of_a_restore_ends_it_and_the_next_one_works(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.arange(16_000_000, dtype=torch.float32)  # four chunks
    save(root, {"weights": source})
    live = {"weights": torch.zeros_like(source)}
    real, placed = Placement._place, itertools.count()

    def place(self: Placement, *where: Any) -> None:
        if next(placed) == 1:
            raise KeyboardInterrupt
        real(self, *where)

    with Checkpointer(root) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(Placement, "_place", place)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.restore(live)
        readers = [each for each in threading.enumerate() if each.name.startswith("stillframe-read")]
        for each in readers:  # they have answered, and may be in their last line
            each.join(1.0)
        assert not any(each.is_alive() for each in readers)
        assert checkpointer.restore(live).step == 1
        assert torch.equal(live["weights"], source)
        checkpointer.save(2, live).wait()
    assert stillframe.Catalog(root).steps() == [1, 2]


def test_restore_after_saves_of_its_own_waits_for_them(root: Path) -> None:
    weights = torch.ones(6_000_000)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"weights": weights})
        checkpointer.fence()
        weights.zero_()
        assert checkpointer.restore({"weights": weights}).step == 1
    assert weights.sum() == 6_000_000
