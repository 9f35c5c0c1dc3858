"""torchrun starts the ranks again when one of them dies, and the run ends as if nothing had happened."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stillframe import Catalog
from tests.layout import leftovers
from tests.ranks.launch import Launch

pytestmark = pytest.mark.timeout(240)

STEPS = 12
RUN_S = 100.0


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.torture), "alone"])
def test_a_run_whose_ranks_are_killed_goes_on_and_ends_bit_equal_to_one_left_alone(tmp_path: Path, kind: str) -> None:
    """Rank 1 dies right after a save, and later rank 0: parameters, optimizer, random state, data position agree.

    Restarted ranks meet in the store of those before, unless torchrun is told to make another.  Gloo needs another
    one: it finds the addresses of the dead there.  Without a process group ("alone") there is only stillframe in it.
    """
    own_store = {} if kind == "alone" else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    work = "train", tmp_path / "root", kind, STEPS, "1:4", "0:9"
    with Launch(2, "trainee.py", *work, max_restarts=3, **own_store) as launch:
        try:
            output = launch.wait(RUN_S)
        except subprocess.TimeoutExpired:
            launch.process.terminate()  # torchrun takes its workers with it
            output = launch.wait()
        assert launch.process.returncode == 0, output[-8000:]
    for rank in (0, 1):
        lines = [line for line in output.splitlines() if line.startswith(f"rank {rank} ")]
        starts = [int(line.split()[-1]) for line in lines if "starts after" in line]
        assert len(starts) == 3, output[-8000:]
        assert starts[0] == 0
        assert starts[1] in (3, 4)  # the one that was being saved, if it was staged in time
        assert starts[2] in (8, 9)
        assert lines[-1] == f"rank {rank} ends equal"
    assert Catalog(tmp_path / "root").steps() == [STEPS - 1, STEPS]
    assert leftovers(tmp_path / "root") == []
