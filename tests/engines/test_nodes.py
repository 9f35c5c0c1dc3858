"""Two hosts with addresses of their own under each engine: one is cut off and killed, a fresh one takes its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from demo.hosts import missing

PROJECT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "ray"])
def test_training_goes_on_bit_for_bit_with_a_fresh_host(engine: str) -> None:
    if trouble := missing():
        pytest.skip(trouble)
    demo = subprocess.run(
        [sys.executable, str(PROJECT / "demo" / "nodes.py"), engine], capture_output=True, text=True, timeout=1100
    )
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    assert "bit for bit" in demo.stdout
