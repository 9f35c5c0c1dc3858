"""Roots that are made once; tests that change one copy it first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import layout
from tests.cli.roots import make_root
from tests.ranks.launch import run_ranks


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("cli") / "gpt"
    return root, make_root(root)


@pytest.fixture(scope="session")
def single(made: tuple[Path, dict[str, Any]]) -> Path:
    """Of one rank; not to be changed."""
    return made[0]


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two FSDP2 ranks; not to be changed."""
    root = tmp_path_factory.mktemp("cli") / "sharded"
    run_ranks(2, "cli_worker.py", root)
    return root


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks that did not share it."""
    root = tmp_path_factory.mktemp("cli") / "split"
    run_ranks(2, "cli_worker.py", root, "split")
    return root


@pytest.fixture(scope="session")
def half(split: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the node of rank 1 holds of it."""
    root = Path(shutil.copytree(split, tmp_path_factory.mktemp("cli") / "half"))
    for step in (1, 2):
        layout.segment(root, step, 0).unlink()
        layout.seal(root, step, 0).unlink()
    return root


@pytest.fixture
def copy(single: Path, tmp_path: Path) -> Path:
    """Of one rank, to be changed."""
    return Path(shutil.copytree(single, tmp_path / "gpt"))


@pytest.fixture
def sharded_copy(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "sharded"))
