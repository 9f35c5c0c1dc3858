"""The lines for several ranks of README and guide run as they stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe import Catalog, load
from tests.ranks.launch import run_ranks


def test_the_lines_for_several_ranks_train_and_resume(tmp_path: Path) -> None:
    run_ranks(2, "readme_worker.py", tmp_path / "root")
    assert Catalog(tmp_path / "root/readme").steps() == [1, 2]
    assert Catalog(tmp_path / "root/guide").steps() == [3, 4, 5]
    for name in ("readme", "guide"):
        assert load(tmp_path / "root" / name)["model"]["1.weight"].shape == (8, 8)


def test_hsdp_with_tensor_parallelism_goes_on_on_another_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for ranks, last in ((8, 19), (4, 39)):
        output = run_ranks(ranks, "../../examples/hsdp_tp.py", timeout_s=200)
        assert f"step  {last}" in output
        assert Catalog("runs/hsdp_tp").latest() == last
    assert f"step {0:3}" not in output  # the second run did not begin again
    saved = load("runs/hsdp_tp")["model"]
    assert saved["0.up.weight"].shape == (256, 64)  # whole, whatever it was split over


@pytest.mark.timeout(620)  # in a new environment DeepSpeed compiles its operators first
@pytest.mark.parametrize("example", ["fsdp2_dcp.py", "fsdp2_native.py", "slurm_preemption.py", "deepspeed_gpt.py"])
def test_the_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPS", "20")  # of the one that does not count its own
    output = run_ranks(2, f"../../examples/{example}", timeout_s=600)
    assert "step  19" in output
    assert "committed" in output
    assert Catalog(next((tmp_path / "runs").iterdir())).latest() is not None
