"""One identity per save, seen from outside: retries, take-overs, going back, and readers beside a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stillframe
from stillframe import (
    BusyError,
    Catalog,
    Checkpointer,
    ExistsError,
    KeepBest,
    KeepLast,
    NotFoundError,
    StorageError,
    spi,
)
from stillframe.checkpoint import epochs
from stillframe.model import SaveId
from tests import layout
from tests.support import pause


def saves_of(root: Path) -> list[SaveId]:
    return list(Catalog(root).look().saves)


def value_of(root: Path, step: int | None = None) -> float:
    return float(stillframe.load(root, step)["x"])


def test_a_run_that_was_taken_over_reports_nothing_as_committed(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    with Checkpointer(tmp_path, on_error="warn") as checkpointer:
        checkpointer.save(1, state).wait()
        epochs.claim(Catalog(tmp_path), "another", 0)
        taken_over = checkpointer.save(2, state)
        with pytest.raises(BusyError, match="taken over"):
            taken_over.wait()
        begun_later = checkpointer.save(3, state)
        with pytest.raises(BusyError, match="taken over"):
            begun_later.wait()
        assert not [save for save in saves_of(tmp_path) if save.step == 3], "it was begun all the same"
        assert checkpointer.restore(state).step in (1, 2)  # a new epoch: the root is ours again
        checkpointer.save(4, state).wait()
    assert Catalog(tmp_path).latest() == 4


def test_a_late_commit_of_the_epoch_before_never_wins(tmp_path: Path) -> None:
    old = {"x": torch.tensor(1.0)}
    with Checkpointer(tmp_path, on_error="warn") as zombie:
        zombie.save(1, old).wait()
        zombie.save(2, old).wait()
        # The successor chooses step 2, as a run whose locks lie to it would, and saves.
        catalog = Catalog(tmp_path)
        number = epochs.claim(catalog, "successor", 0)
        epochs.begin(catalog, number, "successor", 0, catalog.newest(), is_shared=True)
        with pytest.raises(BusyError):
            zombie.save(7, old).wait()
    found = [save for save in saves_of(tmp_path) if save.step == 7]
    assert all(Catalog(tmp_path).is_committed(save) for save in found), "it is a checkpoint, and off the branch"
    assert Catalog(tmp_path).latest() == 2
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(old).step == 2
        checkpointer.save(7, {"x": torch.tensor(2.0)}).wait()
    assert value_of(tmp_path, 7) == 2.0


def test_a_rewound_run_is_not_overtaken_by_the_branch_it_left(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 6):
            state["x"].fill_(step)
            checkpointer.save(step, state).wait()
        checkpointer.rewind(2)
    with Checkpointer(tmp_path) as checkpointer:  # it crashed before it saved anything
        assert checkpointer.restore(state).step == 2
        assert float(state["x"]) == 2
        state["x"].fill_(30)
        checkpointer.save(3, state).wait()
    catalog = Catalog(tmp_path)
    assert catalog.steps() == [1, 2, 3]
    assert value_of(tmp_path) == 30
    assert value_of(tmp_path, 5) == 5, "what was left is still there to be looked at"
    with Checkpointer(tmp_path, keep=KeepLast(2)) as checkpointer:
        checkpointer.restore(state)
        for step in (4, 5, 6):
            checkpointer.save(step, state).wait()
    assert catalog.steps() == [5, 6]
    assert {save.step for save in saves_of(tmp_path)} == {5, 6}, "the branch has passed what was left"


def test_rewinding_to_what_is_not_there_changes_nothing(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait()
        with pytest.raises(NotFoundError, match="nearest is step 1"):
            checkpointer.rewind(7)
        checkpointer.save(2, state).wait()
    assert Catalog(tmp_path).steps() == [1, 2]


def test_restoring_an_older_step_only_to_look_leaves_no_trace(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).wait()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state, step=1).step == 1
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state).step == 3


def test_a_step_that_is_not_after_the_newest_is_refused(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(10, state).wait()
    with Checkpointer(tmp_path) as checkpointer:
        for step, what in ((10, "already a checkpoint"), (9, "comes before step 10")):
            with pytest.raises(ExistsError, match=what):
                checkpointer.save(step, state)
        checkpointer.save(11, state).wait()


@contextlib.contextmanager
def paused_keeper(checkpointer: Checkpointer) -> Iterator[None]:
    """Behind a commit it still writes, and would make a root that has gone."""
    pid = spi.keeper_pid(checkpointer)
    assert pid is not None
    pause(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_failed_step_is_saved_again_as_another_attempt(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    with Checkpointer(tmp_path, on_error="warn") as checkpointer:
        checkpointer.save(1, state).wait()
        with paused_keeper(checkpointer):
            root = tmp_path.rename(tmp_path.parent / f"{tmp_path.name}-away")
            tmp_path.write_text("in the way")
        with pytest.raises(StorageError):
            checkpointer.save(2, state).wait()
        with paused_keeper(checkpointer):
            tmp_path.unlink()
            root.rename(tmp_path)
        again = checkpointer.save(2, state)
        again.wait()
        assert again.attempt == 2
    assert Catalog(tmp_path).find(2).attempt == 2
    assert Catalog(tmp_path).steps() == [1, 2]


def test_metadata_is_stored_and_the_best_are_kept(tmp_path: Path) -> None:
    state = {"x": torch.zeros(())}
    losses = {1: 5.0, 2: 1.0, 3: 3.0, 4: 2.0, 5: 4.0}
    with Checkpointer(tmp_path, keep=KeepBest("loss", 2)) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, state, metadata={"loss": torch.tensor(loss), "note": "x"}).wait()
    catalog = Catalog(tmp_path)
    assert catalog.steps() == [2, 4, 5]
    assert catalog.manifest(catalog.find(4)).metadata == {"loss": 2.0, "note": "x"}


@pytest.mark.parametrize("wrong", [{"a": [1]}, {1: 2}, "loss", {"a": "x" * 100_000}])
def test_metadata_that_is_not_small_and_plain_is_refused(tmp_path: Path, wrong: object) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(stillframe.ConfigError, match="metadata"):
            checkpointer.save(1, {"x": torch.zeros(())}, metadata=wrong)  # type: ignore[arg-type]
        checkpointer.save(1, {"x": torch.zeros(())}).wait()


@pytest.mark.parametrize("is_restore", [True, False])
def test_a_commit_and_a_removal_in_the_middle_of_a_look_are_not_taken_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restore: bool
) -> None:
    """A reader asks about the newest save, which is no checkpoint yet; then about the one before it, gone by then."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": torch.full((10,), float(step))}).wait()
    asked, real = list[int](), Catalog.is_committed

    def is_committed(catalog: Catalog, save: SaveId) -> bool:
        asked.append(save.step)
        if asked == [2]:
            shutil.rmtree(layout.step_dir(tmp_path, 1))
            return False
        return real(catalog, save)

    monkeypatch.setattr(Catalog, "is_committed", is_committed)
    if is_restore:
        state = {"x": torch.zeros(10)}
        assert stillframe.restore(tmp_path, state).step == 2
        assert bool((state["x"] == 2).all())
    else:
        assert Catalog(tmp_path).latest() == 2
    assert asked[:2] == [2, 1]


def test_a_reader_beside_a_run_writes_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1 << 18)}
    seen = {"x": torch.zeros(1 << 18)}
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        for step in range(1, 30):
            state["x"].fill_(step)
            save = checkpointer.save(step, state)
            if step > 1:
                found = stillframe.restore(tmp_path, seen).step
                assert found is not None
                assert found >= step - 1
                assert (seen["x"] == found).all()
            save.wait()
            checkpointer.fence()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert stillframe.restore(tmp_path, seen).step == 29
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert stillframe.restore(tmp_path / "nothing", seen).step is None
