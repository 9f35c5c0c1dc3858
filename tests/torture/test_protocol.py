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
@pytest.mark.parametrize(("has_tier", "lives"), [(False, 400), (True, 200)], ids=["alone", "with a tier"])
def test_anything_may_happen(has_tier: bool, lives: int) -> None:
    judge, began = new_judge(), time.monotonic()
    for seed in range(10_000, 10_000 + lives):
        try:
            wreak(seed, judge, has_tier)
        except Broken as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    took = f"{time.monotonic() - began:.0f} s"
    sys.stdout.write(f"{lives} seeds, {judge.count} different states, {judge.checks} looks, {took}\n")
    assert judge.count >= 20_000
