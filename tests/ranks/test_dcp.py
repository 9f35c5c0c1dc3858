"""torch.distributed.checkpoint as a client, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stillframe import Catalog
from tests.ranks.launch import Launch, run_ranks


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By two ranks, in every way that DCP has; the worker checks what it can itself."""
    root = tmp_path_factory.mktemp("dcp")
    run_ranks(2, "dcp_worker.py", root, "write")
    return root


def test_every_mode_of_dcp_saves_what_was_there_and_loads_it_bit_for_bit(written: Path) -> None:
    assert Catalog(written / "sync").steps() == [0, 1, 2]
    assert Catalog(written / "lazy").steps() == [0, 1, 2, 3]
    for kind in ("THREAD", "PROCESS"):
        assert Catalog(written / kind).steps() == [5]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_load_it(written: Path, ranks: int) -> None:
    run_ranks(ranks, "dcp_worker.py", written, "read")


def test_models_that_are_divided_wrapped_or_compiled_come_back_bit_for_bit_also_in_others(tmp_path: Path) -> None:
    run_ranks(2, "dcp_models_worker.py", tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cases",
    [
        ("overlap", "cached", "two_roots", "alone", "alone_beside", "other_coordinator"),
        ("failure", "failure_in_threads", "alone_after_failure", "every_stage"),
        ("every_stage_in_a_process",),
    ],
)
def test_no_save_is_torn_and_the_next_one_works_at_once(tmp_path: Path, cases: tuple[str, ...]) -> None:
    """Whatever overlaps, fails on one rank, comes from DCP's cache of plans, or is one rank's alone."""
    run_ranks(2, "ticket_worker.py", tmp_path, *cases, timeout_s=280)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with Launch(2, "dcp_worker.py", tmp_path, "train", "5") as launch:
        output = launch.wait()
        assert launch.process.returncode != 0, output
        assert "trained calm" in output, output
    output = run_ranks(2, "dcp_worker.py", tmp_path, "hit", 8)
    # What dcp.save returned from is there; of the two async_saves behind it none has been waited for.
    assert any(f"resumed at {at}" in output for at in (4, 5, 6)), output
    calm, hit = (torch.load(tmp_path / f"{name}.pt") for name in ("calm", "hit"))
    assert calm["model"].keys() == hit["model"].keys()
    for name in calm["model"]:
        assert torch.equal(calm["model"][name], hit["model"][name]), name
