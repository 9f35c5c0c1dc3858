"""A rank whose keeper cannot write, and so cannot say in the root that its save has failed."""

from __future__ import annotations

import re
from pathlib import Path

import stillframe
from tests.ranks.launch import Ranks


def test_rank_0_learns_by_the_store_of_the_group_that_another_rank_will_not_seal(tmp_path: Path) -> None:
    """And not by its deadline, which is 600 s; the step can be saved again."""
    with Ranks(2, "mute_worker.py", tmp_path) as running:
        codes = [each.wait(150) for each in running.workers]
        output = running.output
    assert codes == [0, 0], output[-3000:]
    found = dict(re.findall(r"^(\[\d\] \w+) (.*)$", output, re.MULTILINE))
    assert found["[0] first"] == found["[1] first"] == "committed"
    assert "KeeperError after" in found["[0] second"], output
    assert "step 2 is not committed: rank 1 could not save it: " in found["[0] second"]
    assert "StorageError after" in found["[1] second"]
    assert found["[0] again"] == found["[1] again"] == "committed"
    assert stillframe.Catalog(tmp_path).steps() == [1, 2]
