"""Runs that are told to end leave one more checkpoint, of the same step on every rank."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

import stillframe
from tests.ranks.launch import Launch, Ranks
from tests.support import until

pytestmark = pytest.mark.timeout(120)


def steps_said(output: str, rank: int = 0) -> list[int]:
    return [int(step) for step in re.findall(rf"\[{rank}\] step (\d+)", output)]


def check_newest(root: Path, ranks: int, last: int) -> None:
    """The step that was trained last is there, with the values of that step."""
    newest = stillframe.Catalog(root).latest()
    assert newest == last
    found = stillframe.load(root)
    assert found["step"] == last
    assert bool((found["weights"] == ranks * (last + 1)).all())


@pytest.mark.parametrize("mode", ["plain", "busy"])
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(tmp_path: Path, ranks: int, number: int, mode: str) -> None:
    for life in range(2 if mode == "plain" else 1):  # and the next run goes on from there
        with Ranks(ranks, "preemption_worker.py", tmp_path, mode) as running:
            until(lambda: len(steps_said(running.output)) > 3, "training", 60)
            running.workers[-1].send_signal(number)
            codes = [each.wait(60) for each in running.workers]
            output = running.output
        assert codes == [128 + number] * ranks, output[-3000:]
        last = {steps_said(output, rank)[-1] for rank in range(ranks)}
        assert len(last) == 1
        check_newest(tmp_path, ranks, last.pop())
        assert life == 0 or steps_said(output)[0] > 3
    assert signal.Signals(number).name in output


@pytest.mark.parametrize("mode", ["tiers", "tiers-saved", "tiers-local"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tier_gets_the_last_checkpoint_due_there_or_not(tmp_path: Path, ranks: int, mode: str) -> None:
    """The machine may not come back: one tier takes every millionth step, the other one a day."""
    with Ranks(ranks, "preemption_worker.py", tmp_path, mode) as running:
        until(lambda: len(steps_said(running.output)) > 3, "training", 60)
        running.workers[-1].send_signal(signal.SIGTERM)
        codes = [each.wait(60) for each in running.workers]
        output = running.output
    assert codes == [128 + signal.SIGTERM] * ranks, output[-3000:]
    last = steps_said(output)[-1]
    for tier in ("far", "timed"):
        check_newest(tmp_path / tier, ranks, last)
    root = tmp_path / ("node0" if mode == "tiers-local" else "root")
    places = rf"{root}, {tmp_path / 'far'}, {tmp_path / 'timed'}"
    assert re.search(rf"exited after .* s: step {last} is committed in {places}$", output, re.MULTILINE), output


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_tier_gets_the_checkpoint_of_an_exception(tmp_path: Path, ranks: int) -> None:
    with Ranks(ranks, "preemption_worker.py", tmp_path, "tiers-forward") as running:
        codes = [each.wait(60) for each in running.workers]
        assert codes == [1] * ranks, running.output
    for tier in ("far", "timed"):
        check_newest(tmp_path / tier, ranks, 4)


def test_torchrun_that_is_told_to_end_leaves_a_checkpoint(tmp_path: Path) -> None:
    with Launch(2, "preemption_worker.py", tmp_path, "plain") as running:
        until(lambda: len(steps_said(running.output)) > 3, "training", 60)
        running.process.send_signal(signal.SIGTERM)
        output = running.wait(60)
    check_newest(tmp_path, 2, steps_said(output)[-1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_before_the_update_leaves_a_checkpoint_of_the_step_before(tmp_path: Path, ranks: int) -> None:
    with Ranks(ranks, "preemption_worker.py", tmp_path, "forward") as running:
        codes = [each.wait(60) for each in running.workers]
        assert codes == [1] * ranks, running.output
        assert "on purpose" in running.output
    check_newest(tmp_path, ranks, 4)


def test_an_exception_after_the_update_leaves_none(tmp_path: Path) -> None:
    with Ranks(1, "preemption_worker.py", tmp_path, "update") as running:
        assert running.workers[0].wait(60) == 1
        assert "an update had begun since step 4" in running.output
    assert stillframe.Catalog(tmp_path).latest() is None


def test_a_rank_whose_others_are_gone_leaves_without_a_checkpoint(tmp_path: Path) -> None:
    """The other is stopped: neither its training nor its threads answer."""
    with Ranks(2, "lonely_preemption_worker.py", tmp_path) as running:
        until(lambda: steps_said(running.output, 0) and steps_said(running.output, 1), "training", 60)
        running.workers[1].send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        running.workers[0].send_signal(signal.SIGTERM)
        assert running.workers[0].wait(60) == 128 + signal.SIGTERM
        assert "exited without another checkpoint" in running.output
        assert "rank 1" in running.output
    assert stillframe.Catalog(tmp_path).latest() is None
