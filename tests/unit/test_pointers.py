"""The small files of a DeepSpeed tag: each gives what it stands for itself, or says that it cannot tell."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

from stillframe import Checkpointer, FormatError, NotFoundError, StorageError, spi
from stillframe.integrations.deepspeed.pointers import FILES, RUN, content_of, read


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    return saved(tmp_path / "root", 1)


def saved(root: Path, value: int) -> Path:
    with Checkpointer(root) as checkpointer:
        label = spi.Label("tag", ("a.pt",), content_of(f"run {value}"))
        spi.save(checkpointer, {RUN: f"run {value}", FILES: {"a.pt": value}}, 1, label=label).wait()
    return root / "tag"


def test_it_is_opened_by_its_path_and_by_an_open_file(tag: Path) -> None:
    assert torch.load(tag / "a.pt", weights_only=False) == 1
    with open(tag / "a.pt", "rb") as file:
        assert torch.load(file, weights_only=False) == 1


def test_a_name_that_is_not_the_open_files_own_is_not_followed(
    tag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run's file may be where the name leads to."""
    saved(tmp_path / "other", 2)
    monkeypatch.chdir(tag.parent)
    with open("tag/a.pt", "rb") as file:
        monkeypatch.chdir(tmp_path / "other")
        with pytest.raises(FormatError, match="cannot tell where it is"):
            torch.load(file, weights_only=False)
    copied = io.BytesIO((tag / "a.pt").read_bytes())
    copied.name = str(tmp_path / "other" / "tag" / "a.pt")
    with pytest.raises(FormatError, match="cannot tell where it is"):
        torch.load(copied, weights_only=False)


@pytest.mark.parametrize("name", ["b.pt", "*", "[a].pt"])
def test_a_renamed_one_says_so(tag: Path, name: str) -> None:
    os.rename(tag / "a.pt", tag / name)
    with pytest.raises(NotFoundError, match="was renamed"):
        torch.load(tag / name, weights_only=False)


def test_one_that_is_missing_and_one_that_cannot_be_read_are_told_apart(tag: Path) -> None:
    (tag / "a.pt").unlink()
    with pytest.raises(NotFoundError, match="is a rank's file missing"):
        read(str(tag / "a.pt"), None, None)
    (tag / "a.pt").symlink_to("a.pt")  # ELOOP, also for root
    with pytest.raises(StorageError):
        read(str(tag / "a.pt"), None, None)
    (tag / "b.pt").mkdir()
    with pytest.raises(StorageError):
        read(str(tag / "b.pt"), None, None)
