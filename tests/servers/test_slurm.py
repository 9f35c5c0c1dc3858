"""The example of Slurm under a real one: preempted, requeued, and with the same bits as without all that."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import stillframe
from tests.servers.slurm import Slurm, missing
from tests.support import assert_same, until

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 400


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    home = Path(tempfile.mkdtemp(prefix="sf-slurm-"))
    server = Slurm(home)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


def told(output: Path) -> list[int]:
    """The steps that were printed, in this order."""
    return [int(step) for step in re.findall(r"^step +(\d+) ", output.read_text(), re.MULTILINE)]


@pytest.mark.torture
@pytest.mark.timeout(400)
def test_a_preempted_job_saves_is_requeued_and_ends_with_the_same_bits(slurm: Slurm, tmp_path: Path) -> None:
    environment = {
        "STEPS": str(STEPS), "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    }  # fmt: skip
    for name in ("job", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "examples").symlink_to(REPOSITORY / "examples")
    output = tmp_path / "job" / "out"
    script = "examples/slurm_preemption.sbatch"
    job = slurm.submit(tmp_path / "job", "--partition=low", "--output=out", str(REPOSITORY / script), **environment)
    until(lambda: output.exists() and len(told(output)) > 10, "the first steps", 90)
    slurm.submit(tmp_path, "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: slurm.state(job) == "COMPLETED", "the end of the job", 150)

    assert slurm.restarts(job) == 1
    text = output.read_text()
    assert "SIGTERM: saving step" in text
    assert "committed; all steps are done" in text
    assert told(output) == list(range(STEPS))  # none lost, none twice

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*command, "examples/slurm_preemption.py"], cwd=tmp_path / "alone", env={**os.environ, **environment},
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    roots = [tmp_path / name / "runs/slurm_preemption" for name in ("job", "alone")]
    only = ["model", "optimizer", "rng/torch"]
    assert_same(*(stillframe.load(root, STEPS - 1, only=only) for root in roots))
