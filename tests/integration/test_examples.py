"""The examples for one process run, and go on where they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stillframe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["plain_loop", "lora"])
def test_an_example_goes_on_when_it_is_run_again(name: str, tmp_path: Path) -> None:
    for steps in (range(20), range(20, 40)):
        ran = subprocess.run(
            [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert ran.returncode == 0, ran.stderr
        lines = ran.stdout.splitlines()
        assert [int(line.split()[1]) for line in lines[:-1]] == list(steps)
        assert "committed" in lines[-1]
        assert stillframe.Catalog(tmp_path / "runs" / name).latest() == steps[-1]


def test_tiers_go_on_when_the_local_disk_is_lost(tmp_path: Path) -> None:
    for options, says, steps in (([], "starts anew", range(22)), (["--lost"], "step 20 in", range(21, 43))):
        ran = subprocess.run(
            [sys.executable, EXAMPLES / "tiers.py", *options], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert ran.returncode == 0, ran.stderr
        first, *lines, last = ran.stdout.splitlines()
        assert says in first
        assert [int(line.split()[1]) for line in lines] == list(steps)
        assert "committed" in last
    assert stillframe.Catalog(tmp_path / "runs/tiers/shared").steps() == [35, 40]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    limit = 120 if example.name == "read_without_stillframe.py" else 80  # that one is a whole reader
    assert len(example.read_text().splitlines()) <= limit


def test_lora_saves_the_adapters_only(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "lora.py"], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    saved = stillframe.load(tmp_path / "runs/lora")["adapters"]
    assert sorted(saved) == ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight"]
