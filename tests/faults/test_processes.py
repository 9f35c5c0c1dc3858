"""What survives when processes die: the trainer, the keeper, or both, at chosen moments.

The moments are chosen by stopping the keeper (SIGSTOP) and by an arena too small for the state: then staging
stands still half-way, or is complete with nothing written yet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer
from tests.layout import leftovers
from tests.support import keeper_is_gone, kill, run_child, start_child, until

CHILD = """
import os, signal, sys, time, torch, stillframe
root, arena, scene = sys.argv[1:]
checkpointer = stillframe.Checkpointer(root, arena=arena)
state = {"weights": torch.arange(12_000_000, dtype=torch.float32)}
checkpointer.save(1, state).wait()
keeper = checkpointer.keeper_pid
os.kill(keeper, signal.SIGSTOP)
if scene == "with workers" and os.fork() == 0:  # as a data loader does: it inherits the socket to the keeper
    os.close(1); os.close(2); time.sleep(20); os._exit(0)
checkpointer.fence()
state["weights"].mul_(2)
save = checkpointer.save(2, state)
if scene != "staging":
    save.wait("staged")
else:
    while save.progress.staged_bytes < 2 * 16 * 2**20: time.sleep(0.001)
print(keeper, flush=True)
time.sleep(60)
"""


def play(root: Path, scene: str, arena: str) -> tuple[subprocess.Popen[str], int]:
    """A trainer whose second save stands at the scene, and the pid of its stopped keeper."""
    child = start_child(CHILD, root, arena, scene)
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1]
    return child, int(line)


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def weights(root: Path, step: int) -> torch.Tensor:
    loaded: torch.Tensor = stillframe.load(root, step)["weights"]
    return loaded


def test_a_trainer_killed_while_staging_leaves_no_trace_of_that_save(tmp_path: Path) -> None:
    child, keeper = play(tmp_path, "staging", "32MiB")
    end(child)
    os.kill(keeper, signal.SIGCONT)
    until(lambda: keeper_is_gone(tmp_path), "the keeper leaves")
    assert Catalog(tmp_path).steps() == [1]
    assert leftovers(tmp_path) == []
    assert torch.equal(weights(tmp_path, 1), torch.arange(12_000_000, dtype=torch.float32))


@pytest.mark.parametrize("scene", ["staged", "with workers"])
def test_a_trainer_killed_after_staging_loses_nothing(tmp_path: Path, scene: str) -> None:
    child, keeper = play(tmp_path, scene, "auto")
    end(child)
    os.kill(keeper, signal.SIGCONT)
    until(lambda: keeper_is_gone(tmp_path), "the keeper finishes and leaves", 10.0)
    assert Catalog(tmp_path).steps() == [1, 2]
    assert torch.equal(weights(tmp_path, 2), torch.arange(12_000_000, dtype=torch.float32) * 2)
    assert leftovers(tmp_path) == []


def test_both_killed_leaves_the_checkpoint_before_and_the_next_run_sweeps(tmp_path: Path) -> None:
    child, keeper = play(tmp_path, "staged", "auto")
    end(child)
    kill(keeper)
    until(lambda: keeper_is_gone(tmp_path), "the lock is free")
    assert Catalog(tmp_path).steps() == [1]
    state = {"weights": torch.zeros(12_000_000)}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
        assert leftovers(tmp_path) == []
        checkpointer.save(2, state).wait()
    assert Catalog(tmp_path).steps() == [1, 2]


def test_a_run_started_at_once_waits_for_the_keeper_of_the_one_killed(tmp_path: Path) -> None:
    child, keeper = play(tmp_path, "staged", "auto")
    end(child)
    state = {"weights": torch.zeros(12_000_000)}
    with Checkpointer(tmp_path) as checkpointer:
        threading.Timer(1.0, os.kill, (keeper, signal.SIGCONT)).start()
        assert checkpointer.restore(state) == 2
        assert torch.equal(state["weights"], torch.arange(12_000_000, dtype=torch.float32) * 2)


def test_a_root_that_a_living_run_writes_to_is_refused(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(10)}
    with Checkpointer(tmp_path) as first:
        first.save(1, state).wait()
        with pytest.raises(stillframe.BusyError, match="another run"), Checkpointer(tmp_path) as second:
            second.restore(state)
        first.save(2, state).wait()


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path) as made:
        made.save(0, {"weights": torch.zeros(6_000_000)}).wait()
        yield made


def stop_keeper(checkpointer: Checkpointer) -> int:
    pid = checkpointer.keeper_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_killed_keeper_fails_only_the_saves_in_flight(checkpointer: Checkpointer, tmp_path: Path) -> None:
    keeper = stop_keeper(checkpointer)
    lost = checkpointer.save(1, {"weights": torch.ones(6_000_000)})
    lost.wait("staged")
    kill(keeper)
    with pytest.raises(stillframe.KeeperError, match="SIGKILL"):
        lost.wait()
    assert lost.phase == "failed"
    checkpointer.save(2, {"weights": torch.full((6_000_000,), 2.0)}).wait()
    assert checkpointer.stats().keeper_starts == 2
    assert Catalog(tmp_path).steps() == [0, 2]
    assert leftovers(tmp_path) == []


def test_a_killed_keeper_is_raised_at_the_next_save_and_only_once(checkpointer: Checkpointer) -> None:
    keeper = stop_keeper(checkpointer)
    checkpointer.save(1, {"weights": torch.ones(6_000_000)})
    kill(keeper)
    until(lambda: checkpointer.stats().failed == 1, "the death is noticed")
    with pytest.raises(stillframe.KeeperError, match="step 1"):
        checkpointer.save(2, {"weights": torch.ones(6_000_000)})
    checkpointer.save(2, {"weights": torch.ones(6_000_000)}).wait()


def test_a_keeper_killed_while_idle_is_replaced_without_an_error(checkpointer: Checkpointer) -> None:
    kill(checkpointer.keeper_pid or 0)
    until(lambda: checkpointer.keeper_pid is None, "the death is noticed")
    checkpointer.save(1, {"weights": torch.ones(6_000_000)}).wait()
    assert checkpointer.stats().failed == 0


def has_ended(save: stillframe.Save) -> bool:
    return save.phase in ("failed", "committed")


def test_keepers_killed_again_and_again_lose_no_span_of_the_arena(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(12_000_000)}
    with Checkpointer(tmp_path, arena="64MiB", on_error="warn") as checkpointer:
        for step in range(6):
            save = checkpointer.save(step, state)
            until(lambda: checkpointer.keeper_pid, "a keeper")
            kill(checkpointer.keeper_pid or 0)
            until(partial(has_ended, save), "the save ends")
        checkpointer.save(10, state).wait()
        assert checkpointer._stager.arena is not None
        until(lambda: checkpointer._stager.arena.free_spans == 4, "every span comes back")  # type: ignore[union-attr]


def test_a_keeper_serves_a_living_trainer_whatever_signal_the_job_gets(
    checkpointer: Checkpointer, tmp_path: Path
) -> None:
    keeper = stop_keeper(checkpointer)
    save = checkpointer.save(1, {"weights": torch.ones(6_000_000)})
    save.wait("staged")
    os.kill(keeper, signal.SIGINT)
    os.kill(keeper, signal.SIGTERM)
    os.kill(keeper, signal.SIGCONT)
    save.wait()
    checkpointer.save(2, {"weights": torch.ones(6_000_000)}).wait()
    assert checkpointer.keeper_pid == keeper
    assert Catalog(tmp_path).steps() == [0, 1, 2]


@pytest.mark.parametrize("leaving", ["", "raise SystemExit(0)", "sys.exit(0)"])
def test_leaving_without_close_loses_nothing_that_was_requested(tmp_path: Path, leaving: str) -> None:
    code = f"""
import sys, torch, stillframe
checkpointer = stillframe.Checkpointer(sys.argv[1])
checkpointer.save(1, {{"weights": torch.ones(6_000_000)}})
{leaving}
"""
    run_child(code, tmp_path)
    until(lambda: keeper_is_gone(tmp_path), "the keeper finishes and leaves")
    assert Catalog(tmp_path).steps() == [1]


def test_an_exception_in_the_loop_is_not_masked_and_loses_no_save(tmp_path: Path) -> None:
    def loop() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"weights": torch.ones(6_000_000)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert Catalog(tmp_path).steps() == [1]


def test_the_keeper_holds_no_pipe_of_the_trainer(tmp_path: Path) -> None:
    child, keeper = play(tmp_path, "staged", "auto")
    child.kill()
    child.communicate(timeout=10)  # would hang if the stopped keeper had inherited stdout or stderr
    os.kill(keeper, signal.SIGCONT)
    until(lambda: keeper_is_gone(tmp_path), "the keeper leaves")


def test_an_update_in_a_forked_child_does_not_hang(checkpointer: Checkpointer) -> None:
    keeper = stop_keeper(checkpointer)
    weights = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    checkpointer.save(1, {"weights": torch.ones(6_000_000)})
    child = os.fork()
    if child == 0:
        weights.grad = torch.ones(10)
        optimizer.step()
        os._exit(0)
    os.kill(keeper, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    checkpointer.wait()


def test_a_deadline_passes_with_the_save_going_on(checkpointer: Checkpointer) -> None:
    keeper = stop_keeper(checkpointer)
    save = checkpointer.save(1, {"weights": torch.ones(6_000_000)})
    with pytest.raises(stillframe.DeadlineError, match="step 1"):
        save.wait(timeout_s=0.05)
    with pytest.raises(stillframe.DeadlineError, match="1 \\("):
        checkpointer.wait(timeout_s=0.05)
    os.kill(keeper, signal.SIGCONT)
    save.wait()


def test_close_with_a_deadline_leaves_the_rest_to_the_keeper(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, {"weights": torch.ones(6_000_000)}).wait()
    keeper = stop_keeper(checkpointer)
    checkpointer.save(1, {"weights": torch.ones(6_000_000)}).wait("staged")
    with pytest.raises(stillframe.DeadlineError):
        checkpointer.close(timeout_s=0.1)
    os.kill(keeper, signal.SIGCONT)
    until(lambda: keeper_is_gone(tmp_path), "the keeper finishes and leaves")
    assert Catalog(tmp_path).steps() == [0, 1]


def test_close_with_a_deadline_gives_up_what_cannot_be_staged(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, arena="32MiB")
    checkpointer.save(0, {"weights": torch.ones(12_000_000)}).wait()
    keeper = stop_keeper(checkpointer)
    save = checkpointer.save(1, {"weights": torch.ones(12_000_000)})
    with pytest.raises(stillframe.DeadlineError):
        checkpointer.close(timeout_s=0.1)
    assert save.phase == "failed"
    os.kill(keeper, signal.SIGCONT)
    until(lambda: keeper_is_gone(tmp_path), "the keeper leaves")
    assert Catalog(tmp_path).steps() == [0]
    assert leftovers(tmp_path) == []


def test_a_keeper_that_makes_no_progress_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillframe.save.keeper_process.STALL_S", 0.5)
    monkeypatch.setattr("stillframe.save.keeper_process._WATCH_MS", 100)
    with Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        checkpointer.save(0, {"weights": torch.zeros(12_000_000)}).wait()
        stop_keeper(checkpointer)
        save = checkpointer.save(1, {"weights": torch.zeros(12_000_000)})
        checkpointer.fence()  # does not hang: the save is given up
        with pytest.raises(stillframe.KeeperError, match="no progress"):
            save.wait()
        checkpointer.save(2, {"weights": torch.zeros(12_000_000)}).wait()
    assert Catalog(tmp_path).steps() == [0, 2]
