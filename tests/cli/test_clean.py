"""prune and doctor."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stillframe.checkpoint.catalog import Catalog
from tests import layout
from tests.cli.roots import COMMAND, answer, environment, stillframe


def test_a_dry_run_says_what_prune_then_does(copy: Path) -> None:
    wanted = answer("prune", copy, "--keep-last", 1, "--dry-run")
    assert wanted["dry_run"] is True
    assert Catalog(copy).steps() == [10, 20, 30]
    done = answer("prune", copy, "--keep-last", 1)
    assert [each["step"] for each in done["removed"]] == [each["step"] for each in wanted["removed"]] == [10, 20]
    assert (done["bytes"], done["kept"]) == (wanted["bytes"], [30])
    assert Catalog(copy).steps() == [30]
    assert not layout.has_step(copy, 10)
    stillframe("verify", copy)


def test_what_either_rule_keeps_stays(copy: Path) -> None:
    assert "removed step 10" in stillframe("prune", copy, "--keep-last", 1, "--keep-every", 20)
    assert Catalog(copy).steps() == [20, 30]


@pytest.mark.parametrize("arguments", [[], ["--keep-last", "0"], ["--keep-last", "x"]])
def test_prune_wants_to_know_what_to_keep(copy: Path, arguments: list[str]) -> None:
    stillframe("prune", copy, *arguments, code=2)
    assert Catalog(copy).steps() == [10, 20, 30]


def test_prune_of_a_sharded_root_removes_all_ranks(sharded_copy: Path) -> None:
    stillframe("prune", sharded_copy, "--keep-last", 1)
    assert Catalog(sharded_copy).steps() == [2]
    assert not layout.has_step(sharded_copy, 1)


def test_a_split_root_is_not_pruned_by_hand(split: Path, tmp_path: Path) -> None:
    """Another node may not have the newest step: then the one before is all that there is."""
    root = Path(shutil.copytree(split, tmp_path / "split"))
    assert "did not share" in stillframe("prune", root, "--keep-last", 1, code=2)
    assert [Catalog(root, rank).steps() for rank in (0, 1)] == [[1, 2], [1, 2]]
    stillframe("prune", root, "--leftovers")
    assert [Catalog(root, rank).steps() for rank in (0, 1)] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("lack", ["segment", "seal", "short", "manifest", "newer"])
def test_a_newest_step_that_lacks_something_does_not_count(copy: Path, lack: str) -> None:
    """Else the last whole checkpoint would go, and one that cannot be restored would stay."""
    if lack == "short":
        os.truncate(layout.segment(copy, 30), 4096)
    elif lack == "manifest":
        layout.manifest(copy, 30).write_text("{}")
    elif lack == "newer":
        layout.make_newer(layout.manifest(copy, 30))
    else:
        layout.file(copy, 30, lack).unlink()
    wanted = answer("prune", copy, "--keep-last", 1, "--dry-run")
    done = answer("prune", copy, "--keep-last", 1)
    assert [each["step"] for each in done["removed"]] == [each["step"] for each in wanted["removed"]] == [10]
    assert Catalog(copy).steps() == [20, 30]
    stillframe("verify", copy, 20)


def test_prune_leaves_what_somebody_reads(copy: Path) -> None:
    with Catalog(copy).open(10):
        assert [each["step"] for each in answer("prune", copy, "--keep-last", 1)["removed"]] == [20]
    assert Catalog(copy).steps() == [10, 30]


def test_leftovers_of_a_killed_run_go(copy: Path) -> None:
    """A trainer and its keeper, both killed in the middle of a save."""
    code = (
        "import sys, os, signal, torch, stillframe\nfrom stillframe import spi\n"
        "c = stillframe.Checkpointer(sys.argv[1], arena='64MiB'); c.restore({}, strict=False)\n"
        "os.kill(spi.keeper_pid(c), signal.SIGSTOP); c.save(50, {'w': torch.ones(1 << 20)})\n"
        "os.kill(spi.keeper_pid(c), signal.SIGKILL); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([COMMAND[0], "-c", code, str(copy)], env=environment(PYTHONWARNINGS="ignore"), capture_output=True)
    layout.make_torn_step(copy, 50)
    layout.spare(copy).write_bytes(bytes(10))
    text = stillframe("doctor", copy, code=11)
    assert "\nFIX  " in text
    assert "never committed (steps 50)" in text
    assert "--leftovers" in text
    assert "spare" in text
    stillframe("prune", copy, "--leftovers", "--dry-run")
    assert layout.has_step(copy, 50)
    assert "removed what was left of step 50" in stillframe("prune", copy, "--leftovers")
    assert not layout.has_step(copy, 50)
    assert not layout.spare(copy).exists()
    assert Catalog(copy).steps() == [10, 20, 30]
    stillframe("doctor", copy)


def test_prune_touches_no_strangers(copy: Path) -> None:
    notes = layout.step_dir(copy, 10) / "notes.txt"
    notes.write_text("mine")
    (copy / "README").write_text("mine")
    stillframe("prune", copy, "--keep-last", 1, "--leftovers")
    assert notes.read_text() == "mine"
    assert (copy / "README").exists()


def test_doctor_is_content_with_a_whole_root(single: Path, sharded: Path, split: Path) -> None:
    for root in (single, sharded, split):
        levels = {each["level"] for each in answer("doctor", root)["findings"]}
        assert levels <= {"fine", "note"}


def test_doctor_finds_what_is_missing(sharded_copy: Path) -> None:
    missing = layout.segment(sharded_copy, 2, rank=1)
    missing.unlink()
    text = stillframe("doctor", sharded_copy, code=4)
    assert f"step 2 is damaged: {missing.name}" in text
    assert "→" in text


def test_doctor_finds_a_quarantined_checkpoint(copy: Path) -> None:
    layout.set_aside(copy, 10)
    findings = answer("doctor", copy, code=4)["findings"]
    assert [each["level"] for each in findings if "step 10" in each["what"]] == ["damage"]


def test_doctor_finds_a_disk_that_is_too_small(single: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    size = sum(path.stat().st_size for path in single.rglob("*") if path.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size + 32768}", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        root = Path(shutil.copytree(single, small / "gpt"))
        assert "make room" in stillframe("doctor", root, code=11)
    finally:
        subprocess.run(["umount", str(small)], check=True)
