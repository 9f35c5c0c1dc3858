"""torch.distributed.checkpoint as a client, in one process: planners, bytes, laziness, bad input."""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import pickle
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import LoadPlan

import stillframe
from stillframe.integrations.dcp import Reader, Stager, Writer
from stillframe.spi import TensorBox
from tests import layout
from tests.support import assert_same, until

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters())
    update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()


def fails(work: Any, *parts: str) -> None:
    with pytest.raises((dcp.CheckpointException, stillframe.StillframeError)) as caught:
        work()
    for part in parts:
        assert part in str(caught.value)


def test_what_dcp_writes_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "names": ["a", "b"],
    }
    dcp.save(state, storage_writer=Writer(tmp_path))
    found = stillframe.load(tmp_path)
    assert (found["epoch"], found["names"]) == (3, ["a", "b"])
    assert torch.equal(found["model"]["0.weight"], state["model"]["0.weight"])
    assert torch.equal(found["optimizer"]["state"]["0"]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_a_live_model_and_optimizer_go_in_and_come_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, storage_writer=Writer("elsewhere"))
    other, its = trained()
    dcp.load({"model": other, "optimizer": its}, storage_reader=Reader(tmp_path))
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], its.state_dict()["state"][0]["exp_avg"])
    assert not Path("elsewhere").exists()


def test_a_planner_that_renames_and_one_that_writes_bytes_of_its_own(tmp_path: Path) -> None:
    class Renaming(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(
                {f"my_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator
            )

        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object if isinstance(object, torch.Tensor) else io.BytesIO(f"<{object}>".encode())

    class Reading(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = value.read().decode()

    dcp.save({"w": torch.arange(5), "n": 7}, storage_writer=Writer(tmp_path), planner=Renaming())
    state: dict[str, Any] = {"my_w": torch.zeros(5, dtype=torch.long), "my_n": ""}
    fails(  # it could hand them on to the default one, as planners do that treat some names in another way
        lambda: dcp.load(dict(state), storage_reader=Reader(tmp_path), planner=Reading()), "my_n", "allow_pickle=True"
    )
    dcp.load(state, storage_reader=Reader(tmp_path, allow_pickle=True), planner=Reading())
    assert state["my_n"] == "<7>"
    assert torch.equal(state["my_w"], torch.arange(5))
    fails(lambda: dcp.load(dict(state), storage_reader=Reader(tmp_path)), "my_n", "planner of its own")


@pytest.mark.parametrize("path", [("model",), ("model", "a"), ("model", "a", "b"), ()])
def test_a_planner_that_puts_values_in_one_place_is_told_so(tmp_path: Path, path: tuple[str, ...]) -> None:
    class Confused(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            paths = {**plan.planner_data, "model.b": path}  # where the other is, above it, or below it
            return dataclasses.replace(plan, planner_data=paths)

    state = {"model": {"a": torch.zeros(2), "b": torch.ones(2)}}
    fails(lambda: dcp.save(state, storage_writer=Writer(tmp_path), planner=Confused()), "have one place in the state")
    assert stillframe.Catalog(tmp_path).latest() is None


def test_a_tensor_is_cast_as_dcp_casts(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(5.0)}, storage_writer=Writer(tmp_path))
    state = {"w": torch.zeros(5, dtype=torch.float64)}
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert torch.equal(state["w"], torch.arange(5.0, dtype=torch.float64))


def test_steps_are_numbered_or_named(tmp_path: Path) -> None:
    for step in (None, None, 40, None):
        dcp.save({"n": step}, storage_writer=Writer(tmp_path, step=step))
    assert stillframe.Catalog(tmp_path).steps() == [0, 1, 40, 41]
    state = {"n": 0}
    dcp.load(state, storage_reader=Reader(tmp_path, step=40))
    assert state["n"] == 40
    fails(lambda: dcp.save({"n": 1}, storage_writer=Writer(tmp_path, step=40)), "step 40 has been saved")


def test_retention(tmp_path: Path) -> None:
    for n in range(4):
        dcp.save({"n": n}, storage_writer=Writer(tmp_path, keep=stillframe.KeepLast(2)))
    until(lambda: stillframe.Catalog(tmp_path).steps() == [2, 3], "the first two are removed")


def test_a_lazy_save_returns_at_once_and_holds_back_the_update_only(tmp_path: Path) -> None:
    model, optimizer = trained()
    writer = Writer(tmp_path)
    stager = Stager(writer)
    for step in range(4):
        expected = {name: each.clone() for name, each in model.state_dict().items()}
        values = [step]
        response = dcp.async_save({"model": model, "values": values}, storage_writer=writer, async_stager=stager)
        values.append(9)
        update(model, optimizer)
        assert response.staging_completion.result(20) is None
        response.upload_completion.result(20)
        found = stillframe.load(tmp_path, step)
        assert found["values"] == [step]
        for name, each in expected.items():
            assert torch.equal(found["model"][name], each), (step, name)


def test_lazy_saves_that_overtake_one_another_are_all_made(tmp_path: Path) -> None:
    model, optimizer = trained()
    writer = Writer(tmp_path)
    responses, expected = [], []
    for _ in range(5):
        expected.append(model.state_dict()["0.weight"].clone())
        responses.append(dcp.async_save({"model": model}, storage_writer=writer, async_stager=Stager(writer)))
        update(model, optimizer)
    for step, response in enumerate(responses):
        response.upload_completion.result(20)
        assert torch.equal(stillframe.load(tmp_path, step)["model"]["0.weight"], expected[step])


def test_a_lazy_save_that_cannot_be_planned_says_so_and_training_goes_on(tmp_path: Path) -> None:
    class Broken(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            time.sleep(0.2)
            raise RuntimeError("no plan")

    model, optimizer = trained()
    writer = Writer(tmp_path)
    stager = Stager(writer)
    response = dcp.async_save({"model": model}, storage_writer=writer, async_stager=stager, planner=Broken())
    update(model, optimizer)  # waits for the plan that never comes, and no longer
    assert "upload_completion says why" in str(response.staging_completion.exception(20))
    assert "no plan" in str(response.upload_completion.exception(20))
    dcp.save({"model": model}, storage_writer=writer)
    response = dcp.async_save({"model": model}, storage_writer=writer, async_stager=stager)
    response.upload_completion.result(20)
    assert len(stillframe.Catalog(tmp_path).steps()) == 2


def test_a_lazy_save_that_was_refused_stops_nobody_while_its_error_is_kept(tmp_path: Path) -> None:
    """Its traceback refers to everything that the save consisted of."""
    model, optimizer = trained()
    writer = Writer(tmp_path)
    stager = Stager(writer)
    kept = []
    for state, step, words in (({"model": model}, 4, "has been saved"), ({"odd": Odd()}, None, "only pickle can hold")):
        dcp.save({"model": model}, storage_writer=Writer(tmp_path, step=4 if step else None))
        writer.step = step
        kept.append(dcp.async_save(state, storage_writer=writer, async_stager=stager))
        update(model, optimizer)
        assert words in str(kept[-1].upload_completion.exception(20))
        assert kept[-1].staging_completion.exception(20) is not None
    dcp.async_save({"model": model}, storage_writer=writer, async_stager=stager).upload_completion.result(20)
    update(model, optimizer)
    assert stillframe.Catalog(tmp_path).steps() == [4, 5, 7]


def test_a_lazy_save_to_another_place_than_its_stager_knew_is_as_safe(tmp_path: Path) -> None:
    model, optimizer = trained()
    writer = Writer(tmp_path / "a")
    for step in range(3):
        expected = model.state_dict()["0.weight"].clone()
        response = dcp.async_save(
            {"model": model},
            checkpoint_id=tmp_path / "b",
            storage_writer=writer,
            async_stager=Stager(Writer(tmp_path / "a")),
        )
        update(model, optimizer)
        response.staging_completion.result(20)
        response.upload_completion.result(20)
        assert torch.equal(stillframe.load(tmp_path / "b", step)["model"]["0.weight"], expected)


def test_ordinary_saves_at_once_in_several_threads_are_all_made(tmp_path: Path) -> None:
    saving = [dcp.async_save({"n": n, "w": torch.full((1000,), n)}, storage_writer=Writer(tmp_path)) for n in range(4)]
    for each in saving:
        each.result(20)
    found = sorted(stillframe.load(tmp_path, step)["n"] for step in stillframe.Catalog(tmp_path).steps())
    assert found == [0, 1, 2, 3]


def test_a_reader_holds_nothing_open_when_a_load_fails(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path))
    reader = Reader(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        fails(lambda: dcp.load({"v": torch.zeros(3)}, storage_reader=reader), "v")
    assert len(os.listdir("/proc/self/fd")) <= before + 5


def test_ranks_that_see_two_saves_of_one_step_are_told(tmp_path: Path) -> None:
    """One looks before a run goes back and saves the step again, the other after it."""
    state = {"w": torch.zeros(8)}
    plans = []
    with stillframe.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).wait()
        for _ in range(2):
            reader = Reader(tmp_path, step=2)
            reader.read_metadata()
            plans.append(reader.prepare_local_plan(LoadPlan([])))
            checkpointer.rewind(1)
            checkpointer.save(2, state).wait()
    assert reader.prepare_global_plan([plans[0]] * 2) == [plans[0]] * 2
    with pytest.raises(
        stillframe.StateError, match=r"different checkpoints in .*, step 2 of start 1 and step 2 of start 2: load again"
    ):
        reader.prepare_global_plan(plans)


def test_a_lazy_save_of_what_cannot_be_stored_says_so_in_both_futures(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    stager = Stager(writer)
    response = dcp.async_save({"odd": {"x": Odd()}}, storage_writer=writer, async_stager=stager)
    for future in (response.staging_completion, response.upload_completion):
        assert "odd/x" in str(future.exception(20))


class Odd:
    def __init__(self, value: int = 0) -> None:
        self.value = value


def test_tensors_in_tuples_come_back_with_their_data(tmp_path: Path) -> None:
    one, two = torch.arange(3.0), torch.arange(4000).view(40, 100)
    state = {"hidden": (one, two), "deep": [{"a": (two[3:], 5, {"b": [one]})}], "w": one * 2}
    dcp.save(state, storage_writer=Writer(tmp_path))
    empty = torch.zeros
    into: dict[str, Any] = {"hidden": (empty(3), 0), "deep": [{"a": None}], "w": empty(3)}
    dcp.load(into, storage_reader=Reader(tmp_path))
    assert_same(into, state)
    segment = layout.segment(tmp_path, 0)
    os.truncate(segment, segment.stat().st_size - 100)
    fails(lambda: dcp.load({"hidden": (empty(3), 0)}, storage_reader=Reader(tmp_path)), "bytes instead of")


def test_a_state_that_a_planner_does_not_flatten(tmp_path: Path) -> None:
    options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    state = {"w": torch.ones(2), "cfg": {"lr": 0.1, 7: [torch.arange(3), "x"]}, "cfg.lr": {"other": 3}}
    dcp.save(state, storage_writer=Writer(tmp_path), planner=dcp.DefaultSavePlanner(**options))
    into: dict[str, Any] = {"w": torch.zeros(2), "cfg": None, "cfg.lr": None}
    dcp.load(into, storage_reader=Reader(tmp_path), planner=dcp.DefaultLoadPlanner(**options))
    assert_same(into, state)
    flat = {"w": torch.zeros(2), "cfg": {"lr": 0.0}}  # what a planner that flattens finds there, as before
    dcp.load(flat, storage_reader=Reader(tmp_path))
    assert_same(flat, {"w": torch.ones(2), "cfg": {"lr": 0.1}})
    missing = {"model": None}
    fails(
        lambda: dcp.load(missing, storage_reader=Reader(tmp_path), planner=dcp.DefaultLoadPlanner(**options)), "model"
    )


def test_the_metadata_tells_what_dcp_says_it_does(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    ids = set()
    for _ in range(2):
        returned = dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        read = reader.read_metadata()
        for found in (returned, read):
            assert found.storage_meta is not None
            assert found.version == CURRENT_DCP_VERSION
            assert (found.storage_meta.checkpoint_id, found.storage_meta.save_id) == (writer.path, writer.save_id)
        assert read.storage_meta is not None
        assert read.storage_meta.load_id == reader.load_id is not None
        ids.add(writer.save_id)
    assert len(ids) == 2
    assert list(pickle.loads(pickle.dumps(read)).state_dict_metadata) == ["w"]


def test_plans_from_the_cache_after_a_change_of_storage(tmp_path: Path) -> None:
    class Cached(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)

    kinds = [(dcp.FileSystemWriter, dcp.FileSystemReader), (Writer, Reader)]
    for first, second in (kinds, kinds[::-1]):
        for attribute in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan", "_cached_final_save_plan"):
            getattr(dcp.SavePlanner, attribute).clear()
        for number, (writer, reader) in enumerate((first, second, first, second)):
            place = tmp_path / f"{first[0].__name__}-{number}"
            dcp.save({"w": torch.full((2,), number)}, storage_writer=writer(place), planner=Cached())
            into = {"w": torch.full((2,), -1)}
            dcp.load(into, storage_reader=reader(place))
            assert into["w"].tolist() == [number, number]


def test_what_only_pickle_holds_is_stored_when_it_is_allowed(tmp_path: Path) -> None:
    state: dict[str, Any] = {"file": io.BytesIO(b"bytes"), "odd": {"x": Odd(3)}, "pair": (Odd(4), torch.ones(2))}
    fails(lambda: dcp.save(state, storage_writer=Writer(tmp_path)), "only pickle can hold", "Writer(…, allow_pickle")
    dcp.save(state, storage_writer=Writer(tmp_path, allow_pickle=True))
    lazy = Writer(tmp_path, allow_pickle=True)
    dcp.async_save(state, storage_writer=lazy, async_stager=Stager(lazy)).upload_completion.result(20)
    for step in stillframe.Catalog(tmp_path).steps():
        into: dict[str, Any] = {"file": None, "odd": {"x": None}, "pair": None}
        fails(lambda: dcp.load(into, storage_reader=Reader(tmp_path, step=step)), "Reader(…, allow_pickle")  # noqa: B023
        dcp.load(into, storage_reader=Reader(tmp_path, step=step, allow_pickle=True))
        assert (into["file"].getvalue(), into["odd"]["x"].value, into["pair"][0].value) == (b"bytes", 3, 4)
        assert torch.equal(into["pair"][1], torch.ones(2))
    fails(lambda: dcp.save({"q": quantized()}, storage_writer=Writer(tmp_path)), "'q'", "dequantize()")


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def test_a_root_is_not_written_to_twice_if_that_is_not_wanted(tmp_path: Path) -> None:
    for number in range(2):
        dcp.save({"n": number}, storage_writer=Writer(tmp_path))
    fails(lambda: dcp.save({"n": 2}, storage_writer=Writer(tmp_path, overwrite=False)), "overwrite=False", "step 1")
    dcp.save({"n": 3}, storage_writer=Writer(tmp_path / "new", overwrite=False))
    assert stillframe.load(tmp_path)["n"] == 1
    assert stillframe.load(tmp_path / "new")["n"] == 3


def test_saves_to_several_roots_at_once_are_all_made(tmp_path: Path) -> None:
    asked = threading.Event()

    class Slow(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            assert asked.wait(60)
            return super().lookup_object(index)

    names = ("model", "ema", "more")
    slow = dcp.async_save({"w": torch.ones(9), "n": 0}, storage_writer=Writer(tmp_path / "model"), planner=Slow())
    for number in (1, 2):
        saving = [
            dcp.async_save({"w": torch.ones(9), "n": number}, storage_writer=Writer(tmp_path / name))
            for name in (names if number == 1 else reversed(names))
        ]
        for each in saving:
            each.result(60)
    asked.set()
    slow.result(60)
    for name in names:
        found = [stillframe.load(tmp_path / name, each)["n"] for each in stillframe.Catalog(tmp_path / name).steps()]
        assert sorted(found) == ([0, 1, 2] if name == "model" else [1, 2]), name


def test_live_memory_does_not_go_to_another_process(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    staged = Stager(writer).stage({"w": torch.ones(3)})
    with pytest.raises(stillframe.ConfigError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(staged.result())
    staged.ended()  # type: ignore[attr-defined]


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    writer = Writer(tmp_path, step=5)
    dcp.save({"n": 1}, storage_writer=writer)
    other = pickle.loads(pickle.dumps(writer))
    assert (other.path, other.step) == (writer.path, 5)


@pytest.mark.parametrize("what", ["nothing", "dcp", "truncated", "other step"])
def test_what_cannot_be_read_says_what_it_is(tmp_path: Path, what: str) -> None:
    state = {"w": torch.arange(3000.0)}
    expected: tuple[str, ...]
    if what == "dcp":
        dcp.save(state, checkpoint_id=tmp_path)
        expected = "DCP itself wrote", "stillframe import"
    elif what == "nothing":
        expected = ("there is no checkpoint",)
    else:
        dcp.save(state, storage_writer=Writer(tmp_path))
        expected = ("step 7 is not a checkpoint", "nearest is step 0")
    if what == "truncated":
        segment = layout.segment(tmp_path, 0)
        os.truncate(segment, segment.stat().st_size - 100)
        expected = ("bytes instead of",)
    reader = Reader(tmp_path, step=7 if what == "other step" else None)
    fails(lambda: dcp.load({"w": torch.zeros(3000)}, storage_reader=reader), *expected)


def test_a_directory_that_dcp_wrote_is_not_written_to(tmp_path: Path) -> None:
    """Both would be there, and neither reader could tell which is meant."""
    dcp.save({"n": 1}, checkpoint_id=tmp_path)
    before = sorted(tmp_path.iterdir())
    fails(lambda: dcp.save({"n": 2}, storage_writer=Writer(tmp_path)), "DCP itself wrote", "another directory")
    assert sorted(tmp_path.iterdir()) == before


def test_a_tensor_of_which_a_part_is_missing_is_not_loaded(tmp_path: Path) -> None:
    """DCP plans to read what there is of it, and says nothing of the rest."""
    one, two = (
        TensorBox(torch.ones(2, 3), (4, 3), (at, 0)) for at in (0, 1)
    )  # as many items as the whole, with a hole
    for step, boxes in enumerate((one, TensorBox.joined([one, two]))):
        with stillframe.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(step, {"w": boxes, "x": torch.ones(2)})
        fails(lambda: dcp.load({"w": torch.zeros(4, 3)}, storage_reader=Reader(tmp_path)), "'w' overlap, or are in no")


def test_ranks_save_together_or_not_at_all(tmp_path: Path) -> None:
    fails(lambda: dcp.save({"n": 1}, storage_writer=Writer(tmp_path), use_collectives=False), "use_collectives=False")


def test_a_lazy_save_that_never_begins_does_not_stop_training(tmp_path: Path) -> None:
    model, optimizer = trained()
    staged = Stager(Writer(tmp_path)).stage({"model": model.state_dict()})
    del staged  # as when Ctrl-C comes before DCP's thread
    update(model, optimizer)
    dcp.save({"model": model}, storage_writer=Writer(tmp_path))


def test_two_saves_of_one_writer_do_not_take_one_another_for_theirs(tmp_path: Path) -> None:
    class Slow(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            time.sleep(0.5)
            return super().create_local_plan()

    model, optimizer = trained()
    expected = model.state_dict()["0.weight"].clone()
    writer = Writer(tmp_path)
    response = dcp.async_save({"model": model}, storage_writer=writer, async_stager=Stager(writer), planner=Slow())
    dcp.save({"model": model}, storage_writer=writer)
    update(model, optimizer)
    response.upload_completion.result(20)
    for step in stillframe.Catalog(tmp_path).steps():
        assert torch.equal(stillframe.load(tmp_path, step)["model"]["0.weight"], expected), step


def test_a_change_by_hand_fails_a_lazy_save_also_before_dcp_has_planned_it(tmp_path: Path) -> None:
    planning = threading.Event()

    class Waiting(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            assert planning.wait(20)
            return super().create_local_plan()

    model, _ = trained()
    writer = Writer(tmp_path)
    state = {"model": model.state_dict()}
    response = dcp.async_save(state, storage_writer=writer, async_stager=Stager(writer), planner=Waiting())
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
    planning.set()
    fails(lambda: response.upload_completion.result(20), "'model/0.weight' changed in place")
    assert stillframe.Catalog(tmp_path).steps() == []


def test_a_writer_lets_go_of_its_root(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    dcp.save({"n": 1}, storage_writer=writer)
    writer.close()
    writer.close()
    with stillframe.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"n": 2})
    dcp.save({"n": 3}, storage_writer=writer)
    assert stillframe.Catalog(tmp_path).steps() == [0, 5, 6]
