"""Saving: what the caller sees, what is refused at once, and what it costs in memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, spi
from stillframe.link import memory
from stillframe.save import capture, plan
from stillframe.save.device import HostDevice
from tests import layout
from tests.layout import leftovers
from tests.support import assert_same, make_model, pause, train_step, until

MIB = 2**20


def test_a_save_passes_through_the_phases(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(3, {"weights": torch.ones(6_000_000)})
        save.wait("captured")
        save.wait("staged")
        save.wait("sealed")
        save.wait()
        assert (save.step, save.phase, save.error) == (3, "committed", None)
        assert save.progress == stillframe.Progress(24_000_000, 24_000_000, 24_000_000)
        assert save.progress.fraction == 1.0
        times = save.times
        assert times.returned_s and times.stage_begin_s and times.staged_s and times.sealed_s and times.committed_s  # noqa: PT018
        assert times.requested_s <= times.returned_s
        assert times.stage_begin_s <= times.staged_s <= times.sealed_s <= times.committed_s
        stats = checkpointer.stats()
        assert (stats.saves, stats.committed, stats.failed, stats.in_flight) == (1, 1, 0, 0)
        assert (stats.staged_bytes, stats.flushed_bytes) == (24_000_000, 24_000_000)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, 10**12])
def test_a_step_that_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(stillframe.ConfigError, match="step"):
        checkpointer.save(step, {})


@pytest.mark.parametrize(
    "arguments",
    [
        {"when_busy": "never"}, {"on_error": "ignore"}, {"arena": "lots"}, {"arena": "20MiB"}, {"arena": -5},
        {"arena": "900TiB"}, {"keep": 3}, {"arena": None},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_once(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(stillframe.ConfigError, match=next(iter(arguments))):
        Checkpointer(tmp_path, **arguments)


def test_a_root_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(stillframe.ConfigError, match="is a file"):
        Checkpointer(tmp_path / "root")


def test_a_step_is_saved_only_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": 1})
        with pytest.raises(stillframe.ExistsError, match="step 1"):
            checkpointer.save(1, {"a": 2})
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(stillframe.ExistsError, match="step 1"):
        checkpointer.save(1, {"a": 3})
    assert stillframe.load(tmp_path, 1) == {"a": 1}


def test_a_checkpoint_that_somebody_has_moved_in_is_never_overwritten(tmp_path: Path) -> None:
    """Of an epoch that this root knows nothing of: the next run has a later one."""
    with Checkpointer(tmp_path / "a") as other:
        other.save(1, {"whose": "theirs"}).wait()
    (tmp_path / "b").mkdir()
    moved = layout.move_step(tmp_path / "a", 1, tmp_path / "b")
    before = {path.name: path.read_bytes() for path in moved.iterdir()}
    with Checkpointer(tmp_path / "b") as checkpointer:
        with pytest.raises(stillframe.ExistsError):
            checkpointer.save(1, {"whose": "ours"})
        checkpointer.save(2, {"whose": "ours"}).wait()
    assert {path.name: path.read_bytes() for path in moved.iterdir()} == before
    assert stillframe.load(tmp_path / "b", 1) == {"whose": "theirs"}
    assert Catalog(tmp_path / "b").steps() == [1, 2]
    assert leftovers(tmp_path / "b") == []


def test_what_cannot_be_stored_is_refused_with_its_path_before_anything_is_written(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(stillframe.UnsupportedStateError, match=r"'model/head/callback'.*register_leaf"):
            checkpointer.save(1, {"model": {"head": {"callback": lambda: None}}})
        with pytest.raises(stillframe.UnsupportedStateError, match=r"'weights'.*complex128"):
            checkpointer.save(1, {"weights": torch.zeros(2, dtype=torch.complex128)})
        assert layout.steps_there(tmp_path) == []
        checkpointer.save(1, {"fine": 1}).wait()


def test_after_close_nothing_can_be_saved(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    with pytest.raises(stillframe.ConfigError, match="closed"):
        checkpointer.save(1, {})
    with pytest.raises(stillframe.ConfigError, match="closed"):
        checkpointer.restore({})


def test_a_state_larger_than_the_arena_is_saved_all_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"one": torch.randn(30_000_000), "two": torch.randn(1000)}  # 120 MB through 32 MiB
    with Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        checkpointer.save(1, state).wait()
        assert checkpointer.stats().arena_bytes == 32 * MIB
    assert_same(stillframe.load(tmp_path), state)


def test_the_auto_arena_takes_the_first_state_and_a_little_more(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.stats().arena_bytes == 0
        checkpointer.save(1, {"weights": torch.ones(25 * MIB)}).wait()
        assert 100 * MIB < checkpointer.stats().arena_bytes <= 160 * MIB


def test_the_auto_arena_respects_the_memory_available_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "shared_room", lambda: memory.Room(100 * MIB, "the machine's memory"))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"weights": torch.ones(25 * MIB)}).wait()
        assert checkpointer.stats().arena_bytes == 48 * MIB
    assert "half of what is left of the machine's memory" in caplog.text


def test_skip_drops_a_save_that_would_have_to_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"weights": torch.zeros(6_000_000)}
    with Checkpointer(tmp_path, when_busy="skip", arena="32MiB") as checkpointer:
        checkpointer.save(1, state).wait()
        keeper = spi.keeper_pid(checkpointer)
        assert keeper is not None
        pause(keeper)
        state["weights"].add_(1.0)
        second = checkpointer.save(2, state)
        second.wait("staged")
        third = checkpointer.save(3, state)
        assert third.phase == "skipped"
        assert checkpointer.stats().skipped == 1
        assert "step 3 is skipped" in caplog.text
        with pytest.raises(stillframe.BusyError, match="skipped"):
            third.wait()
        os.kill(keeper, signal.SIGCONT)
        checkpointer.wait()
        checkpointer.save(3, state).wait()
    assert Catalog(tmp_path).steps() == [1, 2, 3]


def test_saving_the_wrong_object_is_noticed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The commonest silent bug: a copy of the model is saved, and the copy is never trained."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = copy.deepcopy(model)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            train_step(model, optimizer)
            checkpointer.save(step, {"model": saved, "step": step, "counter": torch.tensor(step)})
        checkpointer.wait()
        assert checkpointer.stats().unchanged == 3
    assert caplog.text.count("exactly the same bytes") == 1


def test_an_empty_state_dict_of_an_optimizer_that_is_saved_for_ever_is_noticed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Made once, before the loop: AdamW has no state yet, and the dict never gets any."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer.state_dict()}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            train_step(model, optimizer)
            checkpointer.save(step, state)
            assert caplog.text.count("Put the optimizer itself into the state") == (step > 0)
    assert stillframe.load(tmp_path)["optimizer"]["state"] == {}


@pytest.mark.parametrize("why", ["itself", "made anew", "no update in between", "made after an update"])
def test_states_of_optimizers_that_are_as_they_should_be_give_no_such_warning(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # it has no state, before updates and after
    if why == "made after an update":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        train_step(model, optimizer)
    once = optimizer.state_dict()
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            if why != "no update in between":
                train_step(model, optimizer)
            given = {"itself": optimizer, "made anew": optimizer.state_dict()}.get(why, once)
            checkpointer.save(step, {"model": model, "optimizer": given})
            checkpointer.wait()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_what_only_looks_like_a_state_dict_of_an_optimizer_is_saved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"state": torch.arange(3), "param_groups": None}).wait()
    assert stillframe.load(tmp_path)["state"].tolist() == [0, 1, 2]


def test_no_tensor_of_an_empty_state_dict_is_kept_after_the_save(tmp_path: Path) -> None:
    """An optimizer of one's own may have more in its groups than numbers."""
    scales = torch.ones(MIB)
    optimizer = torch.optim.AdamW([{"params": make_model().parameters(), "scales": scales}])
    kept = weakref.ref(scales)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer.state_dict()}).wait()
        del optimizer, scales
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("why", ["no update in between", "frozen", "an update that changes nothing"])
def test_saves_that_may_repeat_give_no_such_warning(why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last save after that of the last step, one by a signal handler; gradients that were not finite."""
    model, frozen = make_model(), make_model().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if why == "an update that changes nothing" else 1e-3)
    with Checkpointer(tmp_path) as checkpointer:
        train_step(model, optimizer)
        for step in range(4):
            checkpointer.save(step, {"model": frozen if why == "frozen" else model})
            checkpointer.wait()
            if why in ("frozen", "an update that changes nothing"):
                train_step(model, optimizer)
        assert checkpointer.stats().unchanged == 3
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_trained_state_gives_no_such_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(4):
            train_step(model, optimizer)
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def test_memory_stays_bounded_over_hundreds_of_saves(tmp_path: Path) -> None:
    state = {"weights": [torch.zeros(500_000) for _ in range(10)], "many": [torch.zeros(100) for _ in range(300)]}
    with Checkpointer(tmp_path, arena="64MiB", keep=stillframe.KeepLast(1)) as checkpointer:

        def used(saves: int, start: int) -> int:
            for step in range(start, start + saves):
                checkpointer.fence()
                state["weights"][0].add_(1.0)
                checkpointer.save(step, state)
            checkpointer.wait()
            gc.collect()
            return resident_bytes(os.getpid()) + resident_bytes(spi.keeper_pid(checkpointer) or 0)

        first = used(60, 0)
        last = used(240, 60)
    assert last - first < 24 * MIB, f"grew by {(last - first) / MIB:.1f} MiB over 240 saves"


def test_ten_thousand_small_tensors_in_one_state(tmp_path: Path) -> None:
    state = {f"tensor/{index}": torch.full((index % 7, 3), float(index)) for index in range(10_000)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait()
        live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert checkpointer.restore(live).step == 1
    assert_same(live, state)


def test_a_changed_structure_makes_a_new_plan(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.zeros(1000)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.fence()
        state["a"].add_(1)
        state["b"] = torch.ones(3, dtype=torch.int64)
        checkpointer.save(2, state)
        checkpointer.fence()
        state["a"] = torch.full((10, 10), 5.0)
        checkpointer.save(3, state)
    assert_same(stillframe.load(tmp_path, 1), {"a": torch.zeros(1000)})
    assert_same(stillframe.load(tmp_path, 2), {"a": torch.ones(1000), "b": torch.ones(3, dtype=torch.int64)})
    assert_same(stillframe.load(tmp_path, 3), {"a": torch.full((10, 10), 5.0), "b": torch.ones(3, dtype=torch.int64)})


def test_gradients_are_not_part_of_a_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    model(torch.randn(2, 100)).sum().backward()
    with Checkpointer(tmp_path) as checkpointer:
        save = checkpointer.save(1, {"model": model})
        save.wait()
    assert save.progress.total_bytes == (100 * 100 + 100) * 4


def test_the_segment_opens_without_stillframe(tmp_path: Path) -> None:
    from safetensors import safe_open

    model = make_model()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}).wait()
    (segment,) = layout.segments(tmp_path, 1)
    with safe_open(str(segment), "pt") as file:
        assert torch.equal(file.get_tensor("model/0.weight"), model.state_dict()["0.weight"])


def test_retention_keeps_the_last_and_every_kth(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=stillframe.KeepLast(2) | stillframe.KeepEvery(4)) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, {"step": step})
    assert Catalog(tmp_path).steps() == [4, 8, 10, 11]
    assert leftovers(tmp_path) == []


def test_retention_passes_over_a_checkpoint_that_is_being_read(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=stillframe.KeepLast(1)) as checkpointer:
        checkpointer.save(1, {"weights": torch.ones(1000)}).wait()
        with Catalog(tmp_path).open(1):
            checkpointer.save(2, {"weights": torch.ones(1000)}).wait()
            checkpointer.save(3, {"weights": torch.ones(1000)}).wait()
            until(lambda: 2 not in Catalog(tmp_path).steps(), "step 2 goes")
            assert Catalog(tmp_path).steps() == [1, 3]
        checkpointer.save(4, {"weights": torch.ones(1000)}).wait()
    assert Catalog(tmp_path).steps() == [4]


def test_retention_leaves_foreign_files_alone(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=stillframe.KeepLast(1)) as checkpointer:
        checkpointer.save(1, {"a": 1}).wait()
        notes = layout.step_dir(tmp_path, 1) / "notes.txt"
        notes.write_text("mine")
        checkpointer.save(2, {"a": 1}).wait()
    assert Catalog(tmp_path).steps() == [2]
    assert notes.read_text() == "mine"


class Sampler:
    """Of a data loader: everything in its state is a new object each time."""

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.Generator().get_state(), "order": torch.randperm(1000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("made", "plans"),
    [
        (lambda: {"rng": stillframe.RNG()}, 1),
        (lambda: {"data": Sampler()}, 1),
        (lambda: {"rng": {"torch": torch.get_rng_state(), "all": [torch.get_rng_state()]}}, 2),
    ],
    ids=["RNG", "an object's state", "tensors by themselves"],
)
def test_fresh_tensors_of_the_same_form_need_no_plan_of_their_own(
    made: Callable[[], dict[str, Any]], plans: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_plans = []

    def make_plan(*args: Any) -> Any:
        made_plans.append(plan.make_plan(*args))
        return made_plans[-1]

    monkeypatch.setattr(capture, "make_plan", make_plan)
    model = make_model()
    kept = []
    with Checkpointer(tmp_path, arena="64MiB") as checkpointer:
        for step in range(5):
            torch.manual_seed(step)
            kept.append(made())  # so that no tensor gets the memory of the one before
            checkpointer.save(step, {"model": model, **kept[-1]})
    assert len(made_plans) == plans
    for step, state in enumerate(kept):
        if isinstance(state.get("rng"), dict):
            assert torch.equal(stillframe.load(tmp_path, step)["rng"]["torch"], state["rng"]["torch"])
            assert torch.equal(stillframe.load(tmp_path, step)["rng"]["all"][0], state["rng"]["all"][0])


@pytest.mark.parametrize("how", ["staged", "audited", "torn"])
def test_a_save_that_has_ended_keeps_nothing_of_its_state_alive(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until the garbage collector comes: states that are made anew for each save would fill the memory."""

    def state() -> tuple[dict[str, Any], weakref.ref[Any]]:
        memory = np.zeros(MIB)
        model = torch.nn.Linear(40, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"x": torch.from_numpy(memory), "model": model, "optimizer": optimizer}, weakref.ref(memory)

    may_copy, copy_now = threading.Event(), HostDevice.copy
    may_copy.set()

    def copy_late(device: HostDevice, *given: Any) -> None:
        may_copy.wait(30)
        copy_now(device, *given)

    monkeypatch.setattr(HostDevice, "copy", copy_late)
    gc.collect()
    gc.disable()
    try:
        with Checkpointer(tmp_path, audit=how == "audited", on_error="warn") as checkpointer:
            saves, kept = [], []
            for step in range(5):
                live, reference = state()
                is_torn = how == "torn" and step < 4
                if is_torn:
                    may_copy.clear()
                saves.append(checkpointer.save(step, live))
                if is_torn:
                    live["x"].add_(1)
                may_copy.set()
                live["model"](torch.ones(1, 40)).sum().backward()
                live["optimizer"].step()
                with contextlib.suppress(stillframe.TornError):
                    saves[-1].wait("staged")
                del live
                kept.append(reference)
            assert [save.error is not None for save in saves] == [how == "torn"] * 4 + [False]
            # Of the first, what torch imports meanwhile may keep frames; the last is in the plan.
            assert [reference() is None for reference in kept[1:]] == [True, True, True, False]
    finally:
        gc.enable()
