"""A segment that retention lets go is written over by the next save; never under the eyes of anybody."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from stillframe import Checkpointer, KeepLast, load, spi
from tests import layout
from tests.layout import leftovers, segment
from tests.support import kill, until


def state(value: float, items: int = 400_000) -> dict[str, torch.Tensor]:
    return {"x": torch.full((items,), value)}


def test_the_file_of_a_step_that_goes_becomes_that_of_a_later_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        inodes = []
        for step in range(1, 6):
            checkpointer.save(step, state(step)).wait()
            inodes.append(segment(tmp_path, step).stat().st_ino)
        assert inodes[2] == inodes[0]
        assert inodes[3] == inodes[1]
        assert load(tmp_path)["x"].unique().tolist() == [5.0]
    assert not layout.spare(tmp_path).exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("sizes", [(9_000_000, 10), (300_000, 9_000_000), (5_000_000, 4_999_999)])
def test_a_spare_of_another_size_serves_as_well(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state(step, sizes[step % 2])).wait()
            found = load(tmp_path)["x"]
            assert (found.numel(), found.unique().tolist()) == (sizes[step % 2], [float(step)])


def test_what_somebody_has_linked_is_not_written_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        kept = tmp_path / "kept"
        os.link(segment(tmp_path / "root", 1), kept)
        before = kept.read_bytes()
        for step in (2, 3, 4):
            checkpointer.save(step, state(step)).wait()
    assert kept.read_bytes() == before
    assert load(tmp_path / "root")["x"].unique().tolist() == [4.0]


@pytest.mark.parametrize("is_mapped", [True, False])
def test_what_somebody_reads_is_not_written_over(tmp_path: Path, is_mapped: bool) -> None:
    """Somebody who knows nothing of our locks, such as safetensors."""
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        with segment(tmp_path, 1).open("rb") as file:
            before = file.read()
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            if is_mapped:
                file.close()
            for step in (2, 3, 4):
                checkpointer.save(step, state(step)).wait()
            assert bytes(memory) == before
            memory.close()
    assert load(tmp_path)["x"].unique().tolist() == [4.0]


def test_a_spare_that_a_killed_keeper_left_is_used_or_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=KeepLast(1), on_error="warn") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).wait()
        until(layout.spare(tmp_path).exists, "the first step is removed")
        kill(spi.keeper_pid(checkpointer) or 0)
    assert layout.spare(tmp_path).exists()
    with Checkpointer(tmp_path, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(3, state(3)).wait()
        assert load(tmp_path)["x"].unique().tolist() == [3.0]
    assert not layout.spare(tmp_path).exists()


def test_something_strange_in_the_place_of_the_spare_does_no_harm(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"not ours")
    root = tmp_path / "root"
    layout.spare(root).parent.mkdir(parents=True)
    layout.spare(root).symlink_to(outside)
    with Checkpointer(root, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1, state(1)).wait()
    assert outside.read_bytes() == b"not ours"
    assert load(root)["x"].unique().tolist() == [1.0]
