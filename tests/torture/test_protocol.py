"""The protocol replay, at every operation; and lives to which anything may happen at any time."""

from __future__ import annotations

import sys
import time

import pytest

from tests.protocol.scenarios import SCENES, new_judge, wreak
from tests.protocol.test_replay import replay
from tests.protocol.truth import Broken


@pytest.mark.torture
@pytest.mark.timeout(7200)
def test_many_more_states_keep_the_promises() -> None:
    judge, began, lives = new_judge(), time.monotonic(), 0
    for scene in SCENES.values():
        lives += replay(scene, 13 if scene.is_long else 3, 1, judge)
    took = f"{time.monotonic() - began:.0f} s"
    sys.stdout.write(f"{lives} lives, {judge.count} different states, {judge.checks} looks, {took}\n")
    assert judge.count >= 20_000


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_anything_may_happen() -> None:
    judge, began, lives = new_judge(), time.monotonic(), 400
    for seed in range(10_000, 10_000 + lives):
        try:
            wreak(seed, judge)
        except Broken as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    took = f"{time.monotonic() - began:.0f} s"
    sys.stdout.write(f"{lives} seeds, {judge.count} different states, {judge.checks} looks, {took}\n")
    assert judge.count >= 20_000
