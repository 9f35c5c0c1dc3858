"""list, show and verify of a root in which training went back: what lies on the branch, and what beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stillframe import Catalog, Checkpointer
from tests.cli.roots import answer, stillframe


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 to 50; then from step 20 another 30 and 35."""
    root = tmp_path_factory.mktemp("branch") / "forked"
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step in (10, 20, 30, 40, 50):
            checkpointer.save(step, {"w": torch.full((3,), float(step))}, metadata={"loss": 1 / step, "name": "one"})
            checkpointer.wait()
        checkpointer.rewind(20)
        for step in (30, 35):
            checkpointer.save(step, {"w": torch.full((3,), step + 0.5)}, metadata={"loss": 2.0})
            checkpointer.wait()
    return root


def test_list_shows_the_branch(forked: Path) -> None:
    found = answer("list", forked)
    assert [each["step"] for each in found["steps"]] == [10, 20, 30, 35]
    assert (found["latest"], found["hidden"]) == (35, 3)
    lines = stillframe("list", forked).splitlines()
    assert lines[0].split() == ["step", "state", "when", "size", "ranks", "metadata"]
    assert "loss=0.05, name=one" in lines[2]
    assert lines[4].startswith("* 35")
    assert "3 saves not shown (off the branch" in lines[5]


def test_list_all_has_a_word_for_each(forked: Path) -> None:
    found = answer("list", forked, "--all")
    states = {(each["step"], each["save"]["epoch"]): each["state"] for each in found["steps"]}
    old, new = sorted({epoch for _, epoch in states})
    assert states == {
        (10, old): "committed", (20, old): "committed", (30, old): "superseded", (30, new): "committed",
        (35, new): "committed", (40, old): "abandoned", (50, old): "abandoned",
    }  # fmt: skip
    assert [each["is_on_branch"] for each in found["steps"]] == [True, True, False, True, True, False, False]
    text = stillframe("list", forked, "--all")
    assert text.splitlines()[0].split() == ["step", "start", "state", "when", "size", "ranks", "metadata"]
    assert "superseded" in text
    assert "see --all" not in text


def test_show_tells_where_a_checkpoint_comes_from(forked: Path) -> None:
    found = answer("show", forked, 35)
    assert found["save"]["step"] == 35
    assert found["parent"] == {"step": 20, "epoch": 1, "attempt": 1}
    assert found["metadata"] == {"loss": 2.0}
    text = stillframe("show", forked)
    start = found["save"]["epoch"]
    assert f"saved by start {start} of the run, which continued from step 20 of start 1" in text
    assert "metadata: loss=2" in text
    assert "which began without a checkpoint" in stillframe("show", forked, 10)


def test_a_step_off_the_branch_can_be_looked_at(forked: Path) -> None:
    assert answer("show", forked, 50)["save"] == {"step": 50, "epoch": 1, "attempt": 1}
    assert answer("show", forked, 30)["save"]["epoch"] > 1, "the branch's own comes first"


def test_verify_all_reads_what_lies_beside_the_branch(forked: Path) -> None:
    assert len(answer("verify", forked, "--all")["steps"]) == 7
    text = stillframe("verify", forked, "--all")
    assert "step 40 of start 1: whole" in text
    assert "\nstep 35: whole" in text


def test_doctor_is_content_with_a_fork(forked: Path) -> None:
    assert "3 checkpoints off the branch" in stillframe("doctor", forked)


def test_what_is_gone_from_the_branch_does_not_hide_what_was_superseded(forked: Path, tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(forked, tmp_path / "r"))
    catalog = Catalog(root)
    shutil.rmtree(catalog.dir(catalog.find(30)))
    states = {each["step"]: each["state"] for each in answer("list", root, "--all")["steps"]}
    assert states[30] == "abandoned", "the step is not a checkpoint of the branch any more"
    assert Catalog(root).steps() == [10, 20, 35]
