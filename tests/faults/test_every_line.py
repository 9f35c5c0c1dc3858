"""Whatever line fails or is interrupted: every call returns, the save is told, and the next one works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A part of the lines of each; `make torture` tries every one.
THREADS = [("stage", "once", 1, 12), ("stage", "always", 5, 36), ("receive", "once", 0, 9), ("receive", "always", 4, 9)]
THREADS += [("arrive", "once", 2, 9), ("arrive", "always", 5, 27)]
THREADS += [("keeper", "once", 7, 300), ("keeper", "always", 150, 400)]
CALLS = [("save", "once", 0, 3), ("fence", "once", 0, 2), ("wait", "once", 0, 2)]
SLOWER = [("restore", "once", 5, 24), ("close", "once", 1, 12)]


def try_lines(where: str, mode: str, part: int, parts: int, root: Path, timeout_s: float) -> int:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.every_line", where, mode, str(part), str(parts), str(root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return int(run.stdout.split()[0])


@pytest.mark.parametrize(("where", "mode", "part", "parts"), [*THREADS, *CALLS, *SLOWER])
def test_an_error_at_any_line_hangs_nothing(where: str, mode: str, part: int, parts: int, tmp_path: Path) -> None:
    assert try_lines(where, mode, part, parts, tmp_path, 220) > 2
