"""DeepSpeed as a client, on real ranks; each case is a function of the worker, which checks what it can itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.launch import Launch, run_ranks
from tests.support import until


def test_every_kind_of_engine_saves_what_was_there_and_trains_on_the_same(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "stages", "moe", "pipeline")


def test_objects_tags_strangers_and_exports(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "objects", "choices", "rewound", "strangers", "exported", "broken")


def test_whatever_fails_on_one_rank_is_told_to_all_and_the_next_save_works(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "every_stage")


def test_what_programs_do_with_tags_and_engines(tmp_path: Path) -> None:
    run_ranks(2, "deepspeed_worker.py", tmp_path, "second", "again", "opened", "weights", "left")
    until(lambda: (tmp_path / "left" / "latest").exists(), "the keeper commits what was staged at the end")


@pytest.mark.timeout(300)
def test_the_trainer_of_transformers_saves_rotates_and_resumes(tmp_path: Path) -> None:
    """With ZeRO-2 and ZeRO-3.  Nothing is destroyed."""
    output = run_ranks(2, "hf_trainer_worker.py", tmp_path, 2, 3, timeout_s=240)
    assert "trained 3" in output


@pytest.mark.timeout(300)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with Launch(2, "deepspeed_worker.py", tmp_path, "way_in", "train:calm", "train:hit:5") as launch:
        output = launch.wait(200)
        assert launch.process.returncode != 0, output
        assert "trained calm" in output, output
    output = run_ranks(2, "deepspeed_worker.py", tmp_path, "train:hit")
    assert "resumed at 6" in output or "resumed at 5" in output, output
    for rank in range(2):
        calm, hit = ((tmp_path / name / f"{rank}.pt").read_bytes() for name in ("calm", "hit"))
        assert calm == hit, rank
    output = run_ranks(1, "deepspeed_worker.py", tmp_path, "fewer", "one_way_in")
    assert "world size of 2 but" in output  # DeepSpeed's own words
