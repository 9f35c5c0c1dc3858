"""DeepSpeed as a client, on real ranks; each case is a function of the worker, which checks what it can itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import Launch, run_ranks


def test_every_stage_saves_what_was_there_and_trains_on_the_same(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "stages")


def test_objects_tags_strangers_and_exports(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "objects", "choices", "rewound", "strangers", "exported", "broken")


def test_experts_and_pipelines(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "moe", "pipeline")


@pytest.mark.timeout(300)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with Launch(2, "deepspeed_worker.py", tmp_path, "calm", "hit") as launch:
        output = launch.wait()
        assert launch.process.returncode != 0, output
        assert "trained calm" in output, output
    output = run_ranks(2, "deepspeed_worker.py", tmp_path, "resumed")
    assert "resumed at 6" in output or "resumed at 5" in output, output
    for rank in range(2):
        calm, hit = ((tmp_path / name / f"{rank}.pt").read_bytes() for name in ("calm", "hit"))
        assert calm == hit, rank
    output = run_ranks(1, "deepspeed_worker.py", tmp_path, "fewer")
    assert "world size of 2 but" in output  # DeepSpeed's own words
