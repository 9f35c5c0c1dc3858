"""doctor --quarantine: damage is made sure of, then set aside; nothing is deleted."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from stillframe import Catalog, Checkpointer, KeepLast, load
from stillframe.checkpoint.verify import Verdict, verify_save
from stillframe.model import SaveId
from stillframe.observe.doctor import examine
from stillframe.observe.quarantine import treat
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from tests import layout
from tests.cli.roots import answer, flip, make_state, stillframe


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.glob("step-*/*")}


def test_damage_is_set_aside_and_nothing_is_deleted(copy: Path) -> None:
    flip(layout.segment(copy, 20), 4096 + 10)
    before = contents(copy)
    assert "set aside" not in stillframe("doctor", copy), "names and sizes are right"
    text = stillframe("doctor", copy, "--quarantine", code=4)
    assert "3 checkpoints; 1 set aside" in text
    assert "step 20 is quarantined" in text
    assert "chunk 0" in text
    assert f"stillframe remove {copy} 20" in text
    after = contents(copy)
    assert {path: after[path] for path in before} == before
    assert [Path(path).name for path in after.keys() - before.keys()] == ["aside.json"]
    assert Catalog(copy).steps() == [10, 30]
    stillframe("verify", copy, "--all")
    assert "no longer a checkpoint" in stillframe("verify", copy, 20, code=4)
    states = {each["step"]: each["state"] for each in answer("list", copy, "--all")["steps"]}
    assert states == {10: "committed", 20: "quarantined", 30: "committed"}
    stillframe("doctor", copy, "--quarantine", code=4)
    assert contents(copy) == after


def test_doctor_alone_only_reports(copy: Path) -> None:
    layout.segment(copy, 20).unlink()
    before = contents(copy)
    assert "--quarantine" in stillframe("doctor", copy, code=4)
    assert contents(copy) == before
    stillframe("doctor", copy, "--quarantine", code=4)
    assert Catalog(copy).steps() == [10, 30]


def test_a_tombstone_that_is_removed_brings_it_back(copy: Path) -> None:
    flip(layout.segment(copy, 30), 4096 + 10)
    stillframe("doctor", copy, "--quarantine", code=4)
    flip(layout.segment(copy, 30), 4096 + 10)
    layout.aside(copy, 30).unlink()
    stillframe("doctor", copy, "--quarantine")
    assert Catalog(copy).latest() == 30


def test_what_is_quarantined_goes_only_by_hand(copy: Path) -> None:
    flip(layout.segment(copy, 20), 4096 + 10)
    stillframe("doctor", copy, "--quarantine", code=4)
    with Checkpointer(copy, arena="64MiB", keep=KeepLast(1)) as checkpointer:
        assert checkpointer.restore(make_state()).step == 30
        for step in (40, 50):
            checkpointer.save(step, make_state())
            checkpointer.wait()
    stillframe("prune", copy, "--keep-last", 1, "--leftovers")
    assert layout.segment(copy, 20).exists()
    assert Catalog(copy).steps() == [50]
    stillframe("remove", copy, 20)
    assert not layout.has_step(copy, 20)
    stillframe("doctor", copy)


def test_a_run_that_knows_a_step_does_not_remove_it_when_it_is_quarantined(tmp_path: Path) -> None:
    """The keeper has seen the checkpoint whole, and its policy lets it go: what is set aside stays for a person."""
    root = tmp_path / "r"
    with Checkpointer(root, arena="64MiB", keep=KeepLast(2)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((1000,), float(step))})
            checkpointer.wait()
        flip(layout.segment(root, 1), 4096 + 10)
        stillframe("doctor", root, "--quarantine", code=4)
        for step in (3, 4):
            checkpointer.save(step, {"w": torch.full((1000,), float(step))})
            checkpointer.wait()
    assert Catalog(root).steps() == [3, 4]
    assert layout.segment(root, 1).exists()


def test_a_node_sets_its_own_part_aside(split: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(split, tmp_path / "split"))
    flip(layout.segment(root, 2, rank=1), 4096 + 1)
    stillframe("doctor", root, "--quarantine", code=4)
    assert Catalog(root, 0).steps() == [1, 2]
    assert Catalog(root, 1).steps() == [1]
    assert answer("list", root)["steps"][-1]["ranks"] == [0]
    flip(layout.segment(root, 2, rank=0), 4096 + 1)
    stillframe("doctor", root, "--quarantine", code=4)
    assert Catalog(root).steps() == [1]
    stillframe("remove", root, 2)
    assert not layout.has_step(root, 2)


class Flaky(Calls):
    """The first ``wrong`` reads of one chunk have a wrong bit, or fail: of the one that is read first."""

    def __init__(self, wrong: int, error: int = 0) -> None:
        self.wrong, self.error = wrong, error
        self._place: tuple[str, int] | None = None
        self._lock = threading.Lock()  # several threads read

    def _is_wrong(self, place: tuple[str, int]) -> bool:
        with self._lock:
            self._place = self._place or place
            is_wrong = self.wrong > 0 and place == self._place
            self.wrong -= is_wrong
            return is_wrong

    def pread(self, fd: int, into: Any, offset: int) -> int:
        count = super().pread(fd, into, offset)
        place = os.readlink(f"/proc/self/fd/{fd}"), offset
        if place[0].endswith(".safetensors") and offset >= 4096 and self._is_wrong(place):
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            memoryview(into)[0] ^= 1
        return count


def reader(calls: Flaky) -> Any:
    def read(catalog: Catalog, save: SaveId) -> Verdict:
        return verify_save(Catalog(PosixStore(catalog.root, calls=calls)), save)

    return read


def test_what_is_whole_when_read_again_is_not_set_aside(copy: Path) -> None:
    """Both reads of the first pass are wrong: a bad cable, bad memory.  The second pass is independent."""
    findings = treat(copy, reader(Flaky(wrong=2)))
    assert [each.level for each in findings] == ["fine", "problem"]
    assert "whole when it was read again" in findings[1].what
    assert Catalog(copy).steps() == [10, 20, 30]
    assert {each.level for each in examine(copy)} == {"fine"}


def test_a_read_error_is_not_damage(copy: Path) -> None:
    flip(layout.segment(copy, 10), 4096 + 10)
    findings = treat(copy, reader(Flaky(wrong=1, error=5)))
    assert "step 10 could not be verified, and was not set aside" in findings[1].what
    assert Catalog(copy).steps() == [10, 20, 30]


def test_a_step_that_cannot_be_read_now_is_not_set_aside(copy: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    layout.segment(copy, 20).chmod(0)
    assert "not set aside" in stillframe("doctor", copy, "--quarantine", code=11)
    assert Catalog(copy).steps() == [10, 20, 30]


def test_load_passes_it(copy: Path) -> None:
    flip(layout.segment(copy, 30), 4096 + 10)
    stillframe("doctor", copy, "--quarantine", code=4)
    assert load(copy)["step"] == 20
