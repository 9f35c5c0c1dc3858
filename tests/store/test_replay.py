"""Refinement: whatever a crash leaves of the store on a file system is something that the contract allows."""

from __future__ import annotations

import sys
import time

import pytest

from tests.store.crash import Judge
from tests.store.recording import record
from tests.store.scenarios import random_scenario, scenarios
from tests.store.support import small_blobs_reused


def replay(seeds: int, step: int, limit: int, random_ones: int) -> int:
    """The number of states, which are distinct within their recording."""
    chosen = scenarios(seeds, step) | {f"any, {seed}": random_scenario(seed) for seed in range(random_ones)}
    judge = Judge()
    points, began = 0, time.monotonic()
    try:
        with small_blobs_reused():
            for name, scenario in chosen.items():
                recording = record(scenario)
                points += len(recording.events) + 1
                try:
                    judge.judge(recording, limit)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from error
        took = f"{time.monotonic() - began:.1f} s"
        sys.stdout.write(f"{len(chosen)} recordings, {points} crash points, {judge.count} distinct states, {took}\n")
        return judge.count
    finally:
        judge.close()


def test_every_crash_leaves_what_the_contract_allows() -> None:
    assert replay(seeds=4, step=2, limit=12, random_ones=12) >= 2_000


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_many_more_crashes() -> None:
    assert replay(seeds=120, step=1, limit=40, random_ones=300) >= 20_000


def test_a_recording_is_the_same_every_time() -> None:
    for name in ("deep", "put and claim (30,)"):
        scenario = scenarios(0)[name]
        assert record(scenario).events == record(scenario).events
