"""The conformance suite: every way into stillframe keeps the same promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.launch import HERE, SOURCE

CLIENTS = ["checkpointer", "dcp", "dcp-lazy", "deepspeed"]


def run(client: str, root: Path, what: str) -> tuple[int, str]:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE)]),
        "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, str(HERE / "client_worker.py"), client, str(root), what],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110,
    )  # fmt: skip
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("client", CLIENTS)
def test_a_save_holds_the_state_as_it_was_and_a_crash_leaves_what_was_committed(client: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    code, output = run(client, root, "train")
    assert code == -signal.SIGKILL, output[-4000:]
    assert "committed 5" in output
    code, output = run(client, root, "resume")
    assert code == 0, output[-4000:]
    assert "resumed" in output


@pytest.mark.parametrize("client", CLIENTS)
def test_a_failure_is_told(client: str, tmp_path: Path) -> None:
    code, output = run(client, tmp_path / "root", "fail")
    assert code == 0, output[-4000:]
    assert "told" in output
