"""The position in the data, on another number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.ranks.launch import Ranks


def taken(ranks: int, root: Path, steps: int) -> list[int]:
    with Ranks(ranks, "batches_worker.py", root, steps) as running:
        codes = running.wait(100)
        assert codes == [0] * ranks, running.output[-3000:]
        return [int(each) for line in re.findall(r"samples \[(.*)\]", running.output) for each in line.split(",")]


def test_two_ranks_then_one_then_two_take_every_sample_once(tmp_path: Path) -> None:
    """Batches of 2 from 24 samples: 3 on each of two ranks, 2 more on one, the rest on two."""
    found = [taken(2, tmp_path, 3), taken(1, tmp_path, 5), taken(2, tmp_path, 100)]
    assert [len(each) for each in found] == [12, 4, 8]
    assert sorted(sample for each in found for sample in each) == list(range(24))
