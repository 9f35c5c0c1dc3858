"""Ranks whose keepers cannot write, and so cannot say in the root that a save has failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stillframe
from tests.ranks.launch import Ranks


def run(root: Path, case: str) -> tuple[dict[str, str], str]:
    """What became of each save, by rank and name; and all that was printed."""
    with Ranks(2, "mute_worker.py", root, case) as running:
        codes = [each.wait(150) for each in running.workers]
        output = running.output
    assert codes == [0, 0], output[-3000:]
    return dict(re.findall(r"^(\[\d\] \w+) (.*)$", output, re.MULTILINE)), output


def test_rank_0_learns_by_the_store_of_the_group_that_another_rank_will_not_seal(tmp_path: Path) -> None:
    """And not by its deadline, which is 600 s; the step can be saved again."""
    found, output = run(tmp_path, "member")
    assert found["[0] first"] == found["[1] first"] == "committed"
    assert "KeeperError after" in found["[0] second"], output
    assert "step 2 is not committed: rank 1 could not save it: " in found["[0] second"]
    assert "StorageError after" in found["[1] second"]
    assert found["[0] again"] == found["[1] again"] == "committed"
    assert stillframe.Catalog(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("case", ["leader", "start", "tickets"])
def test_the_others_learn_by_the_store_of_the_group_that_rank_0_will_not_commit(tmp_path: Path, case: str) -> None:
    """With rank 0's own reason, and not by their deadline: after they have sealed, and before rank 0 has begun."""
    found, output = run(tmp_path, case)
    assert "StorageError after" in found["[0] second"], output
    assert "StorageError after" in found["[1] second"], output
    assert "step 2 is not committed: rank 0 could not save it: " in found["[1] second"]
    assert found["[0] again"] == found["[1] again"] == "committed", output
    assert stillframe.Catalog(tmp_path).steps() == ([2] if case == "start" else [1, 2])
    saves = [each for each in stillframe.Catalog(tmp_path).look().saves if each.step == 2]
    assert [each.attempt for each in saves] == [2], "rank 1 has taken back what it had sealed"
