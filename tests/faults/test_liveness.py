"""Storage that is slow or hangs, and keepers that say so: how long they are waited for, and what is said of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stillframe import BusyError, Catalog, Checkpointer, KeeperError, Save, load, spi
from stillframe.checkpoint.lock import owner_of
from stillframe.link import liveness
from stillframe.save import keeper_client, keeper_process
from stillframe.store.posix import PosixStore
from tests.faults.held import BEAT_S, bootstrap
from tests.support import keeper_is_gone, start_child, until

STATE = {"weights": torch.arange(1000)}
STALL_S = 1.5


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", BEAT_S)
    monkeypatch.setattr(keeper_process, "_WATCH_MS", 100)
    monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap())


def said(checkpointer: Checkpointer) -> str:
    keeper = checkpointer._keeper._current
    return keeper.doing if keeper is not None else ""


def has_lasted(text: str) -> bool:
    """Whether it says of an operation that it lasts longer than any silence would be borne."""
    return any(int(seconds) > 2 * STALL_S for seconds in re.findall(r"in fsync of \S+ for (\d+) s", text))


def has_ended(save: Save) -> bool:
    return save.phase in ("failed", "committed")


def test_a_keeper_in_one_long_operation_is_waited_for_and_one_that_hangs_is_given_up(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap("fsync", gate))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, STATE).wait()
        monkeypatch.setattr(liveness, "STALL_S", STALL_S)
        gate.touch()
        slow = checkpointer.save(2, STATE)
        until(lambda: has_ended(slow) or has_lasted(said(checkpointer)), "the keeper says how long it is in fsync")
        assert f"in fsync of {root}" in said(checkpointer)
        assert slow.phase == "staged"
        gate.unlink()
        slow.wait()
        assert checkpointer.stats().keeper_starts == 1

        gate.touch()
        monkeypatch.setattr(liveness, "HANG_S", 1.0)
        hung = checkpointer.save(3, STATE)
        checkpointer.fence()
        with pytest.raises(
            KeeperError, match=rf"pid \d+\) hangs in one storage operation: in fsync of {root}.* for \d+ s"
        ):
            hung.wait()
        gate.unlink()
        monkeypatch.undo()
        checkpointer.save(4, STATE).wait()
        assert checkpointer.stats().keeper_starts == 2
    assert Catalog(root).steps() == [1, 2, 4]


def test_close_leaves_a_keeper_that_only_tidies_up(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap("unlink", gate))
    monkeypatch.setattr(keeper_client, "TIDY_S", 1.5)
    checkpointer = Checkpointer(root)
    checkpointer.save(1, STATE).wait()
    keeper = spi.keeper_pid(checkpointer)
    gate.touch()
    with caplog.at_level(logging.WARNING):
        checkpointer.close()
    assert f"the keeper (pid {keeper}) continues to clean up in the background (it is in unlink of" in caplog.text
    assert Catalog(root).steps() == [1]
    owner = owner_of(PosixStore(root), 0)
    assert owner is not None
    assert owner.state == "finishing", "who opens the root next waits for it"
    assert "in unlink of" in owner.pulse.doing
    gate.unlink()
    until(lambda: keeper_is_gone(root), "the keeper leaves")
    assert torch.equal(load(root, 1)["weights"], STATE["weights"])


FIRST = """
import sys, pathlib, torch, stillframe
from stillframe import spi
from stillframe.save import keeper_process
from tests.faults.held import bootstrap
root, gate = map(pathlib.Path, sys.argv[1:])
keeper_process._BOOTSTRAP = bootstrap("fsync", gate)
checkpointer = stillframe.Checkpointer(root)
checkpointer.save(1, {"weights": torch.arange(1000)}).wait()
gate.touch()
checkpointer.save(2, {"weights": torch.arange(1000) * 2}).wait("staged")
print(spi.keeper_pid(checkpointer), flush=True)
sys.stdin.read()
"""


def test_a_restarted_run_waits_for_the_keeper_before_as_long_as_that_lives_and_says_so(
    root: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_process, "_BOOTSTRAP", bootstrap(more=f"liveness.STALL_S = {STALL_S}\n"))
    first = start_child(FIRST, root, gate)
    assert first.stdout is not None
    keeper = int(first.stdout.readline())
    first.kill()
    first.communicate()

    def go_on() -> None:
        try:
            until(lambda: "waiting for" in caplog.text, "the new keeper waits")
            monkeypatch.setattr(liveness, "STALL_S", STALL_S)  # for its trainer, too
            until(lambda: has_lasted(caplog.text), "the keeper before says how long it is in fsync")
        finally:
            gate.unlink()

    watching = threading.Thread(target=go_on)
    state = {"weights": torch.zeros(1000, dtype=torch.int64)}
    with caplog.at_level(logging.WARNING), Checkpointer(root) as second:
        watching.start()
        assert second.restore(state).step == 2
        watching.join()
        monkeypatch.undo()
    assert torch.equal(state["weights"], torch.arange(1000) * 2)
    host = os.uname().nodename
    assert f"waiting for the keeper of the run before (pid {keeper} on {host}): it is in fsync of {root}" in caplog.text


def test_a_root_that_was_moved_away_is_locked_anew_by_whoever_comes_first(root: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Checkpointer(root, on_error="warn"))
        first.save(1, STATE).wait()
        root.rename(tmp_path / "away")
        first.save(2, STATE).wait()
        second = stack.enter_context(Checkpointer(root, on_error="warn"))
        with pytest.raises(BusyError, match=f"same process .pid {os.getpid()}"):
            second.restore(STATE)
        root.rename(tmp_path / "away too")
        assert second.restore(STATE).step is None
        second.save(1, STATE).wait()
        with pytest.raises(BusyError, match=f"same process .pid {os.getpid()}"):
            first.save(3, STATE).wait()
        second.save(2, STATE).wait()
    assert Catalog(root).steps() == [1, 2]


def test_a_keeper_starts_whatever_the_length_of_the_path(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [f"/opt/runfiles/{number:04d}_{'x' * 150}/site-packages" for number in range(1000)]
    monkeypatch.setattr(sys, "path", [*sys.path, *entries])
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, STATE).wait()


def test_a_package_that_was_changed_under_a_running_job_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_process, "build", lambda: "0.0.9 (messages 00000000)")
    changed = r"the package on disk has changed from 0\.0\.9 .* to .*: restart the job"
    with Checkpointer(root, on_error="warn") as checkpointer:
        with pytest.raises(KeeperError, match=changed):
            checkpointer.restore(STATE)
        with pytest.raises(KeeperError, match=changed):
            checkpointer.save(1, STATE).wait()
