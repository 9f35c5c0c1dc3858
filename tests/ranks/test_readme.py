"""The README's lines for several ranks run as they stand there."""

from __future__ import annotations

from pathlib import Path

from stillframe import Catalog, load
from tests.ranks.launch import run_ranks


def test_the_lines_for_several_ranks_train_and_resume(tmp_path: Path) -> None:
    run_ranks(2, "readme_worker.py", tmp_path / "root")
    assert Catalog(tmp_path / "root").steps() == [1, 2]
    assert load(tmp_path / "root")["model"]["weight"].shape == (8, 8)
