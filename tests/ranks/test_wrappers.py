"""Tensors that wrap others as the local tensors of DTensors, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.roots import stillframe
from tests.ranks.launch import run_ranks

pytestmark = pytest.mark.timeout(300)


def test_the_layout_that_was_saved_comes_back_and_no_other(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(2, "wrapper_worker.py", root, "by_hand")
    for options in (["--all"], ["--key", "rows"]):  # a part must not be taken for the whole
        said = stillframe("export", root, tmp_path / "m.safetensors", *options, code=2)
        assert "divided over the ranks" in said
    assert "each rank's own" in stillframe("export", root, tmp_path / "m.safetensors", "--key", "all", code=2)
    stillframe("export", root, tmp_path / "m.safetensors", "--all", "--rank", 1)


def test_what_torchao_makes_under_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    run_ranks(2, "wrapper_worker.py", tmp_path, "low_bit", "float8")
