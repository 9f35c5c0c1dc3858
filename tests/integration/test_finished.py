"""Waiting for the keeper of a run that was killed: until it has committed what it holds, and without a trace."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from stillframe import Catalog, Checkpointer, spi
from stillframe.checkpoint import lock
from tests.support import kill, pause, start_child

CODE = """
import os, signal, sys
import torch
from stillframe import Checkpointer, spi
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"w": torch.ones(9)}).wait()
os.kill(spi.keeper_pid(checkpointer), signal.SIGSTOP)
checkpointer.save(2, {"w": torch.ones(9)}).wait("staged")
print(spi.keeper_pid(checkpointer), flush=True)
sys.stdin.readline()
"""


def tree(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(root)), path.stat().st_mtime_ns) for path in root.rglob("*"))


def test_a_root_that_nobody_has_used_is_finished(tmp_path: Path) -> None:
    assert spi.wait_finished(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, {"n": 1})
    before = tree(tmp_path)
    assert spi.wait_finished(tmp_path / "root")
    assert tree(tmp_path) == before


def test_the_keeper_of_a_killed_run_is_waited_for(tmp_path: Path) -> None:
    child = start_child(CODE, tmp_path)
    assert child.stdout is not None
    keeper = int(child.stdout.readline())
    kill(child.pid)
    child.communicate(timeout=60)
    assert Catalog(tmp_path).latest() == 1
    threading.Timer(1.0, os.kill, (keeper, signal.SIGCONT)).start()
    assert spi.wait_finished(tmp_path)
    assert Catalog(tmp_path).latest() == 2


def test_a_living_run_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "GRACE_S", 0.2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": 1}).wait()
        assert not spi.wait_finished(tmp_path)
        pid = spi.keeper_pid(checkpointer)
        assert pid is not None
        pause(pid)
        try:
            assert not spi.wait_finished(tmp_path)
        finally:
            os.kill(pid, signal.SIGCONT)
        checkpointer.save(2, {"n": 2})
    assert Catalog(tmp_path).steps() == [1, 2]
