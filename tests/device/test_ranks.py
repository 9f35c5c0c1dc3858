"""FSDP2 on two ranks, each with a device and a stream of its own."""

from __future__ import annotations

from pathlib import Path

from tests.device.running import need_device
from tests.ranks.launch import run_ranks

WORKER = Path(__file__).parent / "fsdp_worker.py"


def test_each_save_of_two_ranks_of_fsdp2_is_what_the_state_was(tmp_path: Path) -> None:
    need_device()
    output = run_ranks(2, str(WORKER), tmp_path, timeout_s=100)
    assert output.count("all as they were") == 2, output
