"""The protocol replay, at every operation; and lives to which anything may happen at any time."""

from __future__ import annotations

import sys
import time

import pytest

from tests.protocol.scenarios import SCENES, new_judge, wreak
from tests.protocol.test_replay import replay
from tests.protocol.truth import Broken

_TWO_ATTEMPTS = (
    "a tier has one attempt of a step, the root goes on from another, and is lost before the next step is carried: a "
    "restore from the tier alone finds the step off the branch, and says so instead of taking it"
)


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
@pytest.mark.parametrize(
    ("has_tier", "lives"),
    [
        pytest.param(False, 400, id="alone"),
        pytest.param(True, 200, id="with a tier", marks=pytest.mark.xfail(reason=_TWO_ATTEMPTS, strict=False)),
    ],
)
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
