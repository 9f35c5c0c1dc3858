"""Weights that FSDP2 has divided are made whole on the ranks that save them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks.launch import Ranks


def test_every_weight_is_whole_where_it_is_saved_and_nowhere_else(tmp_path: Path) -> None:
    """On three ranks: rows that cannot be divided evenly, ranks without any, several dtypes, other placements."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    with Ranks(3, "wholes_worker.py", tmp_path) as running:
        codes = [each.wait(120) for each in running.workers]
        output = running.output
    assert codes == [0, 0, 0], output[-3000:]
    received = [int(found) for found in re.findall(r"^\[\d\] received (\d+)$", output, re.MULTILINE)]
    numbers = sum((30, 21, 8, 9, 0, 5))
    saves = numbers * (4 + 2 + 1), numbers * (4 + 2 + 1), numbers * (8 + 2 + 1)
    assert sum(received) == 2 * sum(saves)  # of two models; every byte goes to one rank
