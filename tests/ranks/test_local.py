"""A root that the ranks did not share can be read by anybody: the parts that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe import Catalog, NotFoundError, load
from stillframe.checkpoint.survey import open_checkpoint
from stillframe.spi import BoxReader
from tests import layout
from tests.ranks.launch import run_ranks


def test_whoever_sees_the_root_reads_the_parts_that_are_there(tmp_path: Path) -> None:
    root = tmp_path / "r"
    output = run_ranks(2, "local_worker.py", root)
    assert not layout.manifest(root, 1).exists()
    assert "loaded 0 [0.0, 0.0, 0.0, 0.0]" in output
    assert "loaded 1 [1.0, 1.0, 1.0, 1.0]" in output
    assert "box reader 1 1" in output
    assert "steps [1]" in output

    layout.segment(root, 1, 0).unlink()
    layout.seal(root, 1, 0).unlink()
    assert load(root)["rank"] == 1, "what another node holds is not needed"
    with BoxReader(root) as reader:
        assert reader.outline["rank"] == 1
    with open_checkpoint(root) as checkpoint:
        assert (checkpoint.ranks, checkpoint.world_size) == ([1], 2)
    with pytest.raises(NotFoundError, match="no rank 5"):
        load(root, rank=5)
    layout.seal(root, 1, 1).unlink()
    assert Catalog(root).steps() == []
