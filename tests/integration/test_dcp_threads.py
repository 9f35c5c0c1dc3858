"""torch.distributed.checkpoint as a client: saves that overlap in one process, on threads of their own."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import stillframe
from stillframe.integrations.dcp import Stager, Writer
from stillframe.integrations.dcp import round as rounds
from stillframe.integrations.deepspeed.engine import CheckpointEngine

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::FutureWarning", "ignore:.*multi-threaded, use of fork"
)


class Slow(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Waits in its plan until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_planning, self.may_go_on = threading.Event(), threading.Event()

    def create_local_plan(self) -> Any:
        self.is_planning.set()
        assert self.may_go_on.wait(20)
        return super().create_local_plan()


@pytest.mark.parametrize("is_lazy", [False, True])
def test_one_writer_saves_to_two_places_at_once(tmp_path: Path, is_lazy: bool) -> None:
    writer, slow = Writer(tmp_path / "a"), Slow()
    options = {"async_stager": Stager(writer)} if is_lazy else {}
    first = dcp.async_save(
        {"x": torch.ones(3)}, checkpoint_id=tmp_path / "a", storage_writer=writer, planner=slow, **options
    )
    assert slow.is_planning.wait(20)
    dcp.save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "b", storage_writer=writer)
    slow.may_go_on.set()
    about = (first.upload_completion if is_lazy else first).result(20).storage_meta
    assert about.checkpoint_id == str(tmp_path / "a")
    assert [stillframe.load(tmp_path / name)["x"].tolist() for name in "ab"] == [[1, 1, 1], [0, 0, 0]]


def test_a_process_that_is_forked_in_a_save_takes_it_for_its_parents(tmp_path: Path) -> None:
    """There all threads but one are gone, and what they held; the save goes on where it is made."""
    writer, slow = Writer(tmp_path), Slow()
    saved = dcp.async_save({"x": torch.ones(3)}, storage_writer=writer, planner=slow, async_stager=Stager(writer))
    trainer, told = os.getpid(), tmp_path / "told"
    saved.staging_completion.add_done_callback(lambda _: None if os.getpid() == trainer else told.touch())
    assert slow.is_planning.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    slow.may_go_on.set()
    saved.upload_completion.result(20)
    assert not told.exists()


def test_a_planner_that_ends_its_thread_ends_both_futures(tmp_path: Path) -> None:
    class Leaving(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def resolve_data(self, write_item: Any) -> Any:
            raise SystemExit("enough")

    writer = Writer(tmp_path)
    saved = dcp.async_save({"x": torch.ones(3)}, storage_writer=writer, planner=Leaving(), async_stager=Stager(writer))
    assert saved.upload_completion.exception(20) is not None
    assert "enough" in str(saved.staging_completion.exception(20))


def test_who_looks_for_saves_that_were_left_takes_none_that_runs_for_one(tmp_path: Path) -> None:
    """Whoever saves looks; here another thread does nothing else, and they take turns as often as they can."""
    is_over, often = threading.Event(), sys.getswitchinterval()

    def look() -> None:
        while not is_over.is_set():
            rounds.end_left_rounds()

    looking = threading.Thread(target=look)
    sys.setswitchinterval(1e-6)
    try:
        looking.start()
        ends = time.monotonic() + 3
        while time.monotonic() < ends:
            dcp.save({"x": {str(number): torch.ones(2) for number in range(50)}}, storage_writer=Writer(tmp_path))
    finally:
        sys.setswitchinterval(often)
        is_over.set()
        looking.join()


def test_a_save_that_ended_holds_nothing_of_its_state(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=Writer(tmp_path))
    assert not rounds._rounds


def test_a_writer_that_is_a_stager_too(tmp_path: Path) -> None:
    """As DCP's own writers are."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    class Both(Writer, BlockingAsyncStager):
        pass

    dcp.async_save({"x": torch.ones(3)}, storage_writer=Both(tmp_path)).result(20)
    assert stillframe.load(tmp_path)["x"].tolist() == [1, 1, 1]


def test_deepspeed_in_another_directory_than_its_tag_began_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by the directory that it is in when it hands a file over, and so do we."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = CheckpointEngine(types.SimpleNamespace(datastates_config=types.SimpleNamespace(config={})), 0)
    engine.create(types.SimpleNamespace(save_dir="run", tag="one", save_latest=True))
    monkeypatch.chdir(tmp_path / "other")
    engine.save({"x": torch.ones(3)}, "run/one/states.pt")
    engine.finish()
    engine.cleanup()
    assert list(stillframe.load("run")["files"]) == ["states.pt"]
