"""``python -m benchmarks.loops`` runs with every framework; what it finds is not looked at, only that it measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.loops.driving import LIFE_S, SOURCE


@pytest.mark.timeout(LIFE_S + 30)
@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_framework_is_measured(framework: str, ranks: int) -> None:
    measure(framework, ranks)


def measure(framework: str, ranks: int = 1) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, "-W", "ignore", *launch, "-m", "benchmarks.loops", framework]
    command += ["--gib", "0.05", "--steps", "4", "--turns", "1"]
    path = {"PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=SOURCE, env={**os.environ, **path}, timeout=LIFE_S
    )
    assert ended.returncode == 0, ended.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ended.stdout.splitlines() if "│" in line]
    assert rows[0][0] == "no save"
    assert rows[-1][0].startswith("stillframe")
    assert rows[0][1:4] == ["", "", ""]
    for row in rows[1:]:
        assert all(re.match(r"[\d.,]+ \(.*–.*\)$", cell) for cell in row[1:]), row
        assert float(row[1].split()[0].replace(",", "")) > 0
