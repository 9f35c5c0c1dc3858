"""The oracle of the whole: a run killed at random moments, again and again, ends bit-equal to one left alone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stillframe import Catalog, Checkpointer
from tests import trainee
from tests.layout import leftovers
from tests.support import keeper_is_gone, start_child, until

STEPS = 40


def torment(root: Path, kills: int, seed: int) -> int:
    """Kill and resume until ``kills`` kills are done, then let it end; gives how many kills there were."""
    rng = random.Random(seed)
    expected = trainee.undisturbed(STEPS)
    done = 0
    furthest = 0
    while True:
        child = start_child("import runpy; runpy.run_module('tests.trainee', run_name='__main__')", root, STEPS)
        assert child.stdout is not None
        line = child.stdout.readline().split()
        assert line[:1] == ["go"], child.communicate()[1]
        start = int(line[1])
        assert start >= furthest, f"resumed from {start}, but step {furthest} was committed before"
        if start == STEPS:
            # It got through before the kill: begin another life.
            out, err = child.communicate(timeout=60)
            assert child.returncode == 0, err
            assert out.split() == ["end", expected]
            if done >= kills:
                return done
            until(lambda: keeper_is_gone(root), "the keeper leaves")
            subprocess.run(["rm", "-rf", str(root)], check=True)
            furthest = 0
            continue
        if done < kills:
            time.sleep(rng.uniform(0.0, 0.5))
            if child.poll() is None:
                child.kill()
                done += 1
        out, err = child.communicate(timeout=60)
        if child.returncode == 0:
            assert out.split() == ["end", expected]
        else:
            assert child.returncode == -9, err
        furthest = Catalog(root).latest() or 0
        print(f"\rkill {done}/{kills}, at step {furthest} of {STEPS}  ", end="", file=sys.stderr, flush=True)  # noqa: T201


def assert_clean(root: Path) -> None:
    """The next run that saves leaves nothing of those that were killed: the last of these may have had no time to."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(STEPS + 1, {"more": 1})
    assert leftovers(root) == []


@pytest.mark.timeout(280)
def test_a_run_killed_a_few_times_ends_bit_equal_to_one_left_alone(tmp_path: Path) -> None:
    assert torment(tmp_path / "run", kills=3, seed=1) == 3
    assert_clean(tmp_path / "run")


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_run_killed_200_times_ends_bit_equal_to_one_left_alone(tmp_path: Path) -> None:
    assert torment(tmp_path / "run", kills=200, seed=int(time.time())) == 200
    assert_clean(tmp_path / "run")
