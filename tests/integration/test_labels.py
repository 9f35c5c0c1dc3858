"""Labels: aliases that appear with their checkpoints, follow the branch, and never cost a checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stillframe import Catalog, Checkpointer, ConfigError, ExistsError, KeepLast, StateError, spi
from stillframe.checkpoint import labels
from stillframe.checkpoint.epochs import next_epoch
from stillframe.checkpoint.removal import remove, set_aside
from stillframe.format import names
from stillframe.model import SaveId
from stillframe.spi import Label
from stillframe.store.posix import PosixStore
from tests import layout
from tests.support import pause, until

WHOLE = torch.arange(60.0).reshape(6, 10)


def tagged(root: Path, *steps: int, keep: KeepLast | None = None) -> None:
    """A run that saves these steps, each with a tag."""
    with Checkpointer(root, keep=keep) as checkpointer:
        for step in steps:
            spi.save(checkpointer, {"n": step}, step, label=tag(step))
            checkpointer.wait()


def tag(step: int) -> Label:
    return Label(f"tag{step}", ("a.pt", "b.pt"), b"look there", is_latest=True)


def alias(path: Path) -> SaveId:
    found = spi.read_alias(path.read_bytes())
    assert found is not None
    return found[0]


def latest(root: Path) -> str | None:
    return (root / "latest").read_text() if (root / "latest").exists() else None


def tags(root: Path) -> list[str]:
    return sorted(
        path.parent.name for path in root.glob(f"*/{layout.LABEL}") if not path.parent.name.startswith("step")
    )


def test_a_label_appears_with_the_checkpoint_and_says_whose_it_is(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        spi.save(
            checkpointer, {"w": WHOLE}, 5, label=Label("best", ("a.pt", "b.pt"), b"content", is_latest=True)
        ).wait()
        assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["a.pt", "b.pt", layout.LABEL]
        data = (tmp_path / "best" / "b.pt").read_bytes()
        assert data.startswith(b"content\n{")
        assert spi.read_alias(data) == (Catalog(tmp_path).find(5), 0)
        assert latest(tmp_path) == "best"
        spi.save(checkpointer, {"w": WHOLE}, 7, label=Label("other"))
        checkpointer.wait()
        assert latest(tmp_path) == "best"
    assert Catalog(tmp_path).steps() == [5, 7]
    assert not layout.unfinished_files(tmp_path)


@pytest.mark.parametrize("keep", [None, KeepLast(2)])
def test_a_later_save_takes_the_name_over_and_the_earlier_one_goes(tmp_path: Path, keep: KeepLast | None) -> None:
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        spi.save(checkpointer, {"n": 0}, 0, label=Label("other", ("x",))).wait()
        for step in (1, 2, 3):
            spi.save(checkpointer, {"n": step}, step, label=Label("best", ("x",), is_latest=step < 3)).wait()
            assert alias(tmp_path / "best" / "x").step == step
    assert Catalog(tmp_path).steps() == [0, 3], "what has lost its label does not count for the policy"
    assert not layout.unfinished_files(tmp_path)


def test_a_checkpoint_that_was_not_removed_when_it_lost_its_label_goes_later(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        spi.save(checkpointer, {"n": 1}, 1, label=Label("best", ("x",))).wait()
        Catalog(tmp_path).pin(1)
        spi.save(checkpointer, {"n": 2}, 2, label=Label("best", ("x",))).wait()
    assert Catalog(tmp_path).steps() == [1, 2]
    Catalog(tmp_path).unpin(1)
    tagged(tmp_path, 3)
    assert Catalog(tmp_path).steps() == [2, 3]


def test_a_checkpoint_goes_when_its_label_is_removed_by_hand(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 5):
            spi.save(checkpointer, {"n": step}, step, label=tag(step)).wait()
        checkpointer.save(5, {"n": 5}).wait()
        shutil.rmtree(tmp_path / "tag2")
        (tmp_path / "tag3").rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "tag1", tmp_path / "copied")
        shutil.rmtree(tmp_path / "tag1")
        spi.save(checkpointer, {"n": 6}, 6, label=tag(6)).wait()
    assert Catalog(tmp_path).steps() == [1, 3, 4, 5, 6]
    shutil.rmtree(tmp_path / "tag4")  # the next run has not seen it: this may be a copy of a part of the root
    tagged(tmp_path, 7)
    assert Catalog(tmp_path).steps() == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("how", ["hidden", "partial", "its files", "deeper"])
def test_what_may_be_the_label_in_another_form_keeps_its_checkpoint(tmp_path: Path, how: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        spi.save(checkpointer, {"n": 1}, 1, label=Label("tag1", ("x",))).wait()
        tag1 = tmp_path / "tag1"
        to = tmp_path / {"hidden": ".tag1", "partial": "tag1.partial", "its files": "best", "deeper": "kept/tag1"}[how]
        to.parent.mkdir(exist_ok=True)
        shutil.move(tag1, to)
        if how == "its files":
            (to / layout.LABEL).unlink()
        for step in (2, 3):
            spi.save(checkpointer, {"n": step}, step, label=tag(step)).wait()
    assert Catalog(tmp_path).steps() == [1, 2, 3]


def test_a_label_goes_with_its_checkpoint_and_not_the_other_way_round(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=KeepLast(2)) as checkpointer:
        for step in (1, 2):
            spi.save(checkpointer, {"w": WHOLE}, step, label=Label(f"tag{step}", ("x",)))
        checkpointer.wait()
        (tmp_path / "tag2").rename(tmp_path / "moved")
        (tmp_path / "tag2").mkdir()
        (tmp_path / "tag2" / "mine").write_text("not of stillframe")
        spi.save(checkpointer, {"w": WHOLE}, 3, label=Label("tag3"))
        checkpointer.wait()
        until(lambda: not (tmp_path / "tag1").exists(), "the first label is removed")
        assert Catalog(tmp_path).steps() == [2, 3]
        checkpointer.save(4, {"w": WHOLE})
        checkpointer.save(5, {"w": WHOLE})
    assert Catalog(tmp_path).steps() == [4, 5]
    assert (tmp_path / "tag2" / "mine").exists()
    assert not (tmp_path / "tag3").exists()


def test_a_label_of_a_run_that_died_right_after_its_commit_is_published_by_the_next(tmp_path: Path) -> None:
    tagged(tmp_path, 5)
    layout.unpublish_label(tmp_path, 5, "tag5")
    layout.unfinished_label(tmp_path, 9).mkdir()  # of a step that was never committed
    (layout.unfinished_label(tmp_path, 5) / "a.pt.0123abcd.partial").write_text("of a keeper that died")
    with Checkpointer(tmp_path) as checkpointer:
        spi.save(checkpointer, {"w": WHOLE}, 6, label=Label("next"))
    assert sorted(os.listdir(tmp_path / "tag5")) == ["a.pt", "b.pt", layout.LABEL]
    assert latest(tmp_path) == "tag5"
    assert Catalog(tmp_path).steps() == [5, 6]
    assert not layout.unfinished_files(tmp_path)


# --- latest ----------------------------------------------------------------------------------


def test_latest_does_not_go_back_when_a_run_starts(tmp_path: Path) -> None:
    tagged(tmp_path, 1, 2, 3, 4)
    (tmp_path / "tag2").rename(layout.unfinished_label(tmp_path, 2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, {"n": 5})
    assert tags(tmp_path) == ["tag1", "tag2", "tag3", "tag4"]
    assert latest(tmp_path) == "tag4"


def test_latest_is_written_after_the_directory_has_appeared(tmp_path: Path) -> None:
    class Recorded(PosixStore):
        def rename(self, source: str, target: str, durable: bool = True, *, into: PosixStore | None = None) -> None:
            super().rename(source, target, durable, into=into)
            order.append(target)

        def put(self, key: str, data: object, durable: bool = True) -> None:
            super().put(key, data, durable)  # type: ignore[arg-type]
            order.append(key)

    tagged(tmp_path, 1, 2)
    layout.unpublish_label(tmp_path, 2, "tag2")
    order: list[str] = []
    catalog = Catalog(Recorded(tmp_path))
    labels.publish(catalog, catalog.find(2))
    assert order == ["tag2", "latest"]


def test_latest_follows_the_branch(tmp_path: Path) -> None:
    tagged(tmp_path, 1, 2, 3, 4)
    old = alias(tmp_path / "tag3" / "a.pt")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.rewind(2)
        assert latest(tmp_path) == "tag2"
        spi.save(checkpointer, {"n": "again"}, 3, label=tag(3)).wait()
        assert latest(tmp_path) == "tag3"
        new = alias(tmp_path / "tag3" / "a.pt")
        assert new != old
        assert Catalog(tmp_path).find(3) == new
        checkpointer.rewind(1)
        assert latest(tmp_path) == "tag1"
    tagged(tmp_path / "none", 5)
    with Checkpointer(tmp_path / "none") as checkpointer:
        spi.save(checkpointer, {"n": 6}, 6, label=Label("later", is_latest=True)).wait()
        checkpointer.rewind(5)
    assert latest(tmp_path / "none") == "tag5"


@pytest.mark.parametrize("choice", ["tag1", "theirs", "../elsewhere"])
def test_what_somebody_chose_as_latest_stays(tmp_path: Path, choice: str) -> None:
    tagged(tmp_path, 1, 2)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "latest").write_text(choice)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"n": 3})
    assert latest(tmp_path) == choice
    tagged(tmp_path, 4)
    assert latest(tmp_path) == "tag4"


def test_latest_never_names_what_is_gone(tmp_path: Path) -> None:
    tagged(tmp_path, 1, 2)
    catalog = Catalog(tmp_path)
    for step, left in ((2, "tag1"), (1, None)):
        assert remove(catalog, catalog.find(step), "removed", next_epoch(catalog)) == ""
        assert latest(tmp_path) == left
        assert tags(tmp_path) == ([left] if left else [])


# --- what goes wrong -------------------------------------------------------------------------


def in_the_way(root: Path) -> Path:
    (root / "tag5").mkdir()
    (root / "tag5" / "mine").write_text("not of stillframe")
    return root / "tag5" / "mine"


def no_place_for_files(root: Path) -> Path:
    path = root / names.label_partial(SaveId(5, next_epoch(Catalog(root))))
    path.write_text("in the way")
    return path


def no_latest(root: Path) -> Path:
    (root / "latest").unlink()
    (root / "latest").mkdir()
    (root / "latest" / "mine").write_text("in the way")
    return root / "latest" / "mine"


@pytest.mark.parametrize("spoil", [in_the_way, no_place_for_files, no_latest])
def test_a_label_that_fails_costs_a_warning_and_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], Path]
) -> None:
    tagged(tmp_path, 4)
    mine = spoil(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        spi.save(checkpointer, {"n": 5}, 5, label=tag(5)).wait()
        checkpointer.save(6, {"n": 6}).wait()
    told = [each.message for each in caplog.records if "tag5" in each.message]
    assert len(told) == 1, caplog.text
    assert "step 5 is committed, but not as 'tag5'" in told[0]
    assert Catalog(tmp_path).steps() == [4, 5, 6]
    assert mine.exists()
    if spoil is not no_latest:
        assert latest(tmp_path) == "tag4"
        assert [path for path in layout.unfinished_files(tmp_path) if path != mine] == []


def test_a_label_that_lacks_files_of_some_rank_does_not_appear(tmp_path: Path) -> None:
    tagged(tmp_path, 4)
    catalog = Catalog(tmp_path)
    save = catalog.find(4)
    for ranks, is_whole in (((0, 2), False), ((0, 1, 2), True)):
        for rank in ranks:
            label = Label("three", (f"{rank}.pt",), is_latest=True, total=3)
            labels.write(catalog, save, label, rank, world_size=3, decides=rank == 0)
        if is_whole:
            labels.publish(catalog, save)
        else:
            with pytest.raises(StateError, match="2 files of 3"):
                labels.publish(catalog, save)
            assert not (tmp_path / "three").exists()
        assert not layout.unfinished_files(tmp_path)
    assert spi.read_alias((tmp_path / "three" / "2.pt").read_bytes()) == (save, 2)


def test_a_keeper_that_dies_while_it_writes_a_label_leaves_nothing_in_it(tmp_path: Path) -> None:
    many = tuple(f"{number}.pt" for number in range(3000))
    with Checkpointer(tmp_path, on_error="warn") as checkpointer:
        checkpointer.save(1, {"n": 1}).wait()
        save = spi.save(checkpointer, {"n": 2}, 2, label=Label("best", many, b"x" * 1000))
        until_s = time.monotonic() + 30
        while not any(tmp_path.glob("label-*.partial/*.pt")):
            assert time.monotonic() < until_s
        pid = spi.keeper_pid(checkpointer)
        assert pid is not None
        pause(pid)
        begun = next(tmp_path.glob("label-*.partial"))
        (begun / "0.pt.0123abcd.partial").write_bytes(b"half of it")  # the instant is too short to be hit by chance
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception, match="was killed by SIGKILL"):
            save.wait()
        spi.save(checkpointer, {"n": 2}, 2, label=Label("best", many[:3])).wait()
        assert sorted(os.listdir(tmp_path / "best")) == sorted([*many[:3], layout.LABEL])
    assert alias(tmp_path / "best" / "0.pt").attempt == 2
    assert not layout.unfinished_files(tmp_path)


def test_a_removal_that_was_interrupted_takes_the_label_when_it_goes_on(tmp_path: Path) -> None:
    tagged(tmp_path, 1, 2)
    catalog = Catalog(tmp_path)
    set_aside(catalog, catalog.find(2), "pruned", next_epoch(catalog))
    tagged(tmp_path, 3)
    assert Catalog(tmp_path).steps() == [1, 3]
    assert tags(tmp_path) == ["tag1", "tag3"]


@pytest.mark.parametrize("by", ["a save", "show_labels"])
@pytest.mark.parametrize("done", ["first rename", "both renames"])
def test_a_name_that_was_being_taken_over_goes_to_the_later_save(tmp_path: Path, done: str, by: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            spi.save(checkpointer, {"n": step}, step, label=Label("best", ("x",), is_latest=True)).wait()
            Catalog(tmp_path).pin(step)  # else the first would be gone by now
    first, second = (layout.unfinished_label(tmp_path, step) for step in (1, 2))
    kept = (layout.step_dir(tmp_path, 1) / layout.LABEL).read_bytes()
    first.mkdir()
    (first / layout.LABEL).write_bytes(kept)
    (first / "x").write_bytes(b'\n{"step":1,"epoch":1,"attempt":1,"rank":0}')
    if done == "first rename":
        (tmp_path / "best").rename(second)
    if by == "a save":
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(3, {"n": 3})
    else:
        spi.show_labels(tmp_path)
    assert alias(tmp_path / "best" / "x").step == 2
    assert latest(tmp_path) == "best"
    assert not layout.unfinished_files(tmp_path)


def test_a_stranger_is_told_from_a_label(tmp_path: Path) -> None:
    tagged(tmp_path, 1)
    in_the_way(tmp_path)
    with pytest.raises(ExistsError, match="is no label"):
        labels.check_free(Catalog(tmp_path), tag(5))
    labels.check_free(Catalog(tmp_path), tag(1))
    for data in (b"", b"\xff", b"{}", b'x\n{"step":1}', b'\n{"step":-1,"epoch":1,"attempt":1,"rank":0}'):
        assert spi.read_alias(data) is None


@pytest.mark.parametrize("name", ["best of 3", *layout.FREE_NAMES])
def test_most_names_can_be_labels(name: str) -> None:
    assert Label(name).name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", *layout.TAKEN_NAMES, 5])
def test_a_label_is_a_plain_name(name: object) -> None:
    with pytest.raises(ConfigError, match="cannot name a label"):
        Label(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b'{"of tomorrow":' + b"[" * 100_000, b"", b"[]"], ids=lambda text: repr(text[:8])
)
def test_a_damaged_note_of_a_label_costs_neither_saves_nor_retention(tmp_path: Path, text: bytes) -> None:
    """It killed the keeper after each commit."""
    tagged(tmp_path, 1, 2)
    for path in (layout.step_dir(tmp_path, 1), tmp_path / "tag1"):
        (path / layout.LABEL).write_bytes(text)
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        for step in (3, 4):
            spi.save(checkpointer, {"n": step}, step, label=Label(f"tag{step}")).wait(timeout_s=60)
    assert Catalog(tmp_path).steps() == [4]
    assert (tmp_path / "tag4").exists()
