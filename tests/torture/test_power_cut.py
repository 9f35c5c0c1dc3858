"""Power cuts under real trainers and keepers, of one rank and of two: whatever they leave is restored from."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.torture.power_cut.parse import Parser
from tests.torture.power_cut.record import ALONE, TOGETHER, Run, record, why_not
from tests.torture.power_cut.replay import replay

pytestmark = [pytest.mark.torture, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("runs", "ranks"), [(ALONE, 1), (TOGETHER, 2)], ids=["1 rank", "2 ranks"])
def test_10_000_states_after_a_power_cut_are_restored_from(tmp_path: Path, runs: Sequence[Run], ranks: int) -> None:
    began, seed = time.monotonic(), int(time.time())
    parser = Parser(tmp_path / "top")
    for trace in record(tmp_path, runs, ranks, seed):
        parser.read(trace)
    parser.check()
    recorded = time.monotonic()
    report = replay(parser.events, parser.notes, ranks=ranks, limit=16, runs=30, seed=seed)
    took = f"recorded in {recorded - began:.0f} s, replayed in {time.monotonic() - recorded:.0f} s"
    sys.stdout.write(f"{len(runs)} runs of {ranks}, seed {seed}: {report}; {took}\n")
    assert not report.faults, f"seed {seed}: {report.faults[0]}"
    assert report.states >= 10_000
