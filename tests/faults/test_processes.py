"""What survives when processes die: the trainer, the keeper, or both, at chosen moments.

The moments are chosen by stopping the keeper (SIGSTOP) and by an arena too small for the state: then staging
stands still half-way, or is complete with nothing written yet.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import stillframe
from stillframe import Catalog, Checkpointer, spi
from stillframe.save.keeper_client import KeeperClient
from tests.fork_server import Talker
from tests.layout import leftovers
from tests.support import keeper_is_gone, kill, pause, run_child, start_child, until

CHILD = """
import os, signal, sys, time, torch, stillframe
from stillframe import spi
root, arena, scene = sys.argv[1:]
checkpointer = stillframe.Checkpointer(root, arena=arena)
state = {"weights": torch.arange(12_000_000, dtype=torch.float32)}
checkpointer.save(1, state).wait()
keeper = spi.keeper_pid(checkpointer)
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


def play(root: Path, scene: str, arena: str) -> tuple[Talker, int]:
    """A trainer whose second save stands at the scene, and the pid of its stopped keeper."""
    child = start_child(CHILD, root, arena, scene)
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1]
    return child, int(line)


def end(child: Talker) -> None:
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
        assert checkpointer.restore(state).step == 1
        assert leftovers(tmp_path) == []
        checkpointer.save(2, state).wait()
    assert Catalog(tmp_path).steps() == [1, 2]


def test_a_run_started_at_once_waits_for_the_keeper_of_the_one_killed(tmp_path: Path) -> None:
    child, keeper = play(tmp_path, "staged", "auto")
    end(child)
    state = {"weights": torch.zeros(12_000_000)}
    with Checkpointer(tmp_path) as checkpointer:
        threading.Timer(1.0, os.kill, (keeper, signal.SIGCONT)).start()
        assert checkpointer.restore(state).step == 2
        assert torch.equal(state["weights"], torch.arange(12_000_000, dtype=torch.float32) * 2)


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path) as made:
        made.save(0, {"weights": torch.zeros(6_000_000)}).wait()
        yield made


def stop_keeper(checkpointer: Checkpointer) -> int:
    pid = spi.keeper_pid(checkpointer)
    assert pid is not None
    pause(pid)
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


def test_a_keeper_killed_by_a_signal_without_a_name_says_which_it_was(checkpointer: Checkpointer) -> None:
    keeper = stop_keeper(checkpointer)
    lost = checkpointer.save(1, {"weights": torch.ones(6_000_000)})
    lost.wait("staged")
    number = signal.SIGRTMIN + 3
    os.kill(keeper, number)
    os.kill(keeper, signal.SIGCONT)
    with pytest.raises(stillframe.KeeperError, match=f"was killed by signal {number}; saves in flight are lost"):
        lost.wait()


def test_a_killed_keeper_is_raised_at_the_next_save_and_only_once(checkpointer: Checkpointer) -> None:
    keeper = stop_keeper(checkpointer)
    checkpointer.save(1, {"weights": torch.ones(6_000_000)}).wait("staged")  # before that the next one would take it
    kill(keeper)
    until(lambda: checkpointer.stats().failed == 1, "the death is noticed")
    with pytest.raises(stillframe.KeeperError, match=r"step 1 .*step 2, requested now, goes on"):
        checkpointer.save(2, {"weights": torch.ones(6_000_000)})
    checkpointer.wait()


def test_a_keeper_killed_while_idle_is_replaced_without_an_error(checkpointer: Checkpointer) -> None:
    kill(spi.keeper_pid(checkpointer) or 0)
    until(lambda: spi.keeper_pid(checkpointer) is None, "the death is noticed")
    checkpointer.save(1, {"weights": torch.ones(6_000_000)}).wait()
    assert checkpointer.stats().failed == 0


def has_ended(save: stillframe.Save) -> bool:
    return save.phase in ("failed", "committed")


def test_keepers_killed_again_and_again_lose_no_span_of_the_arena(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(12_000_000)}
    with Checkpointer(tmp_path, arena="64MiB", on_error="warn") as checkpointer:
        for step in range(6):
            save = checkpointer.save(step, state)
            until(lambda: spi.keeper_pid(checkpointer), "a keeper")
            kill(spi.keeper_pid(checkpointer) or 0)
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
    assert spi.keeper_pid(checkpointer) == keeper
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


def test_a_keeper_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillframe.save.keeper_process._WATCH_MS", 100)
    with Checkpointer(tmp_path, arena="32MiB") as checkpointer:
        checkpointer.save(0, {"weights": torch.zeros(12_000_000)}).wait()
        stop_keeper(checkpointer)
        monkeypatch.setattr("stillframe.link.liveness.STALL_S", 0.5)
        save = checkpointer.save(1, {"weights": torch.zeros(12_000_000)})
        checkpointer.fence()  # does not hang: the save is given up
        with pytest.raises(stillframe.KeeperError, match="has said nothing for"):
            save.wait()
        monkeypatch.setattr("stillframe.link.liveness.STALL_S", 300.0)
        checkpointer.save(2, {"weights": torch.zeros(12_000_000)}).wait()
    assert Catalog(tmp_path).steps() == [0, 2]


def is_dead(pid: int) -> bool:
    """Whether or not somebody has taken note of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_save_requested_right_after_its_keeper_died_goes_to_the_next(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death is noticed by a thread of its own: for a moment the dead one is still the one to talk to."""
    on_exit = KeeperClient._on_exit

    def late(*arguments: Any) -> None:
        time.sleep(0.5)
        on_exit(*arguments)

    monkeypatch.setattr(KeeperClient, "_on_exit", late)
    for step in (1, 2):
        pid = spi.keeper_pid(checkpointer)
        assert pid is not None
        kill(pid)
        until(lambda: is_dead(pid), "its end")  # noqa: B023
        time.sleep(0.1)  # its other threads may hold its socket open a little longer
        checkpointer.save(step, {"weights": torch.ones(6_000_000)}).wait(timeout_s=60)
    assert checkpointer.stats().failed == 0
