"""Real signals at random moments of a loop: nothing hangs, no checkpoint is torn, and the next save works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def interrupt(rounds: int, seed: int, root: Path, timeout_s: float) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.signals", str(rounds), str(seed), str(root)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    interrupted = int(run.stdout.split()[0])
    assert interrupted > 0.8 * rounds, run.stdout


def test_a_loop_interrupted_by_real_signals_hangs_nowhere_and_tears_nothing(tmp_path: Path) -> None:
    """`make torture` sends more."""
    interrupt(30, 1, tmp_path, 110)
