"""What ranks agree on: bad input is an error that names the ranks and the difference, within the deadline."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch

from stillframe import Catalog, Checkpointer, load
from tests.layout import leftovers
from tests.ranks.launch import run_ranks
from tests.support import start_child

WORKER = "agree_worker.py"


SCENARIOS = (
    "other_root", "other_version", "too_large_a_world", "other_steps", "other_shape", "missing_tensor",
    "other_step_to_restore", "mismatch_on_one", "refused_by_an_object", "failure_on_one", "refused_on_one",
    "uncaptured_on_one",
    "same_name", "no_collective", "unshared", "unshared_by_flag", "lost_node",
)  # fmt: skip

Said = dict[tuple[int, str], list[str]]


def run(root: Path, ranks: int, *scenarios: str) -> Said:
    """What each rank said in each scenario, in order."""
    said: Said = {}
    output = run_ranks(ranks, WORKER, root, *scenarios)
    for rank, scenario, line in re.findall(r"^\[(\d+) (\w+)\] (.*)$", output, re.MULTILINE):
        said.setdefault((int(rank), scenario), []).append(line)
    return said


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agree")


@pytest.fixture(scope="module")
def said(root: Path) -> Said:
    """All scenarios of two ranks in one launch: starting them takes longer than running them."""
    return run(root, 2, *SCENARIOS)


def seconds(line: str) -> float:
    return float(re.findall(r"([\d.]+)s ", line)[0])


def test_one_rank_with_another_root_is_named(said: Said) -> None:
    for rank in (0, 1):
        (line,) = said[rank, "other_root"]
        assert line.startswith("ConfigError")
        assert re.search(r"rank 0: root=.*/other_root'; rank 1: root=.*/other_root/other'", line)
        assert seconds(line) < 5


def test_one_rank_with_another_version_is_named(said: Said) -> None:
    for rank in (0, 1):
        assert re.search(r"ConfigError.*rank 0: version='0.*'; rank 1: version='9.9.9'", said[rank, "other_version"][0])


def test_a_rank_that_does_not_come_is_named_within_the_deadline(tmp_path: Path) -> None:
    said = run(tmp_path, 3, "missing_rank")
    assert re.search(r"DeadlineError.*rank 1 of 3 did not come within 2 s", said[0, "missing_rank"][0])
    assert re.search(r"DeadlineError.*rank 1 of 3 did not come within 2 s", said[2, "missing_rank"][0])
    assert seconds(said[0, "missing_rank"][0]) < 10


def test_a_world_that_is_larger_than_the_ranks_is_refused(said: Said) -> None:
    for rank in (0, 1):
        assert re.search(r"DeadlineError.*ranks 2-3 of 4 did not come", said[rank, "too_large_a_world"][0])


def test_ranks_that_save_different_steps_are_told(said: Said, root: Path) -> None:
    assert re.search(r"DeadlineError.*step 10 .*rank 1 of 2 did not seal it within 2 s", said[0, "other_steps"][0])
    assert "rank 1 has sealed step 11" in said[0, "other_steps"][0]
    assert re.search(r"(DeadlineError|KeeperError).*step 11", said[1, "other_steps"][0])
    assert Catalog(root / "other_steps").steps() == []


@pytest.mark.parametrize(
    ("scenario", "difference"),
    [
        ("other_shape", r"model/w: F32\[8, 4\] on rank 0, F32\[10, 4\] on rank 1"),
        ("missing_tensor", r"model/b: F32\[4, 4\] on rank 0, not on rank 1"),
    ],
)
def test_ranks_that_hold_parts_of_different_tensors_are_told_which(
    said: Said, root: Path, scenario: str, difference: str
) -> None:
    for rank in (0, 1):
        assert re.search(f"StateError.*{difference}", said[rank, scenario][0])
    steps = [2] if scenario == "missing_tensor" else []
    assert Catalog(root / scenario).steps() == steps


def test_ranks_that_restore_different_steps_are_told(said: Said) -> None:
    for rank in (0, 1):
        assert re.search(r"ConfigError.*rank 0: step=1; rank 1: step=2", said[rank, "other_step_to_restore"][0])


def test_a_state_that_fits_on_one_rank_only_is_touched_on_none(said: Said) -> None:
    assert re.search(r"MismatchError.*on rank 1: step 1 does not fit", said[0, "mismatch_on_one"][0])
    assert re.search(
        r"MismatchError.*x: float32\[4\] in the checkpoint, float32\[5\] in the state", said[1, "mismatch_on_one"][0]
    )
    assert said[0, "mismatch_on_one"][1] == said[1, "mismatch_on_one"][1] == "untouched"


def test_an_object_that_refuses_its_state_on_one_rank_is_an_error_on_all(said: Said) -> None:
    for rank in (0, 1):
        error, again = said[rank, "refused_by_an_object"]
        assert re.search(
            r"StateError.*on rank 1: loader: load_state_dict of Refusing raised RuntimeError: cannot take \{'n': 1\}.*"
            r"the state is partly overwritten",
            error,
        )
        assert again == "again 1 [1.0, 1.0, 1.0, 1.0]"


def test_a_rank_that_cannot_save_fails_the_step_for_all_at_once(said: Said, root: Path) -> None:
    assert re.search(
        "step 1 is not committed: rank 1 could not save it: .*no memory for an arena", said[0, "failure_on_one"][0]
    )
    assert "there is no memory for an arena" in said[1, "failure_on_one"][0]
    assert max(seconds(said[0, "failure_on_one"][0]), seconds(said[1, "failure_on_one"][0])) < 30
    assert not Catalog(root / "failure_on_one").steps()


def test_a_state_that_one_rank_refuses_is_no_wait_for_the_others(said: Said, root: Path) -> None:
    for rank in (0, 1):
        refused, saved = said[rank, "refused_on_one"]
        assert re.search(r"UnsupportedStateError.*state\['bad'\]", refused)
        assert seconds(refused) < 30
        assert saved == "ok None"
    assert Catalog(root / "refused_on_one").steps() == [2]


def test_what_one_rank_cannot_capture_is_no_wait_for_the_others(said: Said, root: Path) -> None:
    for rank in (0, 1):
        failed, saved = said[rank, "uncaptured_on_one"]
        assert "capturing step 1 failed: OutOfMemoryError: on purpose" in failed
        assert seconds(failed) < 30
        assert saved == "ok None"
    assert Catalog(root / "uncaptured_on_one").steps() == [2]


def test_one_name_for_tensors_of_different_ranks(said: Said, root: Path) -> None:
    for rank in (0, 1):
        assert said[rank, "same_name"] == [f"restored 1 [{float(rank)}]"]
        assert load(root / "same_name", rank=rank)["w"].unique().tolist() == [float(rank)]


def test_a_node_that_has_lost_its_root_is_no_fresh_start(said: Said) -> None:
    for rank in (0, 1):
        assert re.search(
            r"MismatchError.*no step that every rank has sealed \(rank 0: \[1\]", said[rank, "lost_node"][0]
        )


def test_a_steady_save_makes_no_collective_and_waits_for_nobody(said: Said) -> None:
    for rank in (0, 1):
        quiet, control, steady, committed = said[rank, "no_collective"]
        assert (quiet, control) == ("collectives 0", "collectives 1")  # the second shows that they are noticed
        assert (steady, committed) == ("steady at once", "committed 4")


def test_roots_that_are_not_shared_agree_on_what_all_have_sealed(said: Said) -> None:
    for rank in (0, 1):
        kept, *alone, restored, saved, again = said[rank, "unshared"]
        assert len(alone) == rank
        for line in alone:
            assert re.search("DeadlineError.*step 5 is not committed: rank 0 of 2 did not seal it within 10 s", line)
        assert kept in ("kept [2, 3, 4]", "kept [3, 4]")
        assert restored == f"restored 4 [4.0] {{'rank': {rank}}}"
        assert saved == "ok None"
        assert again == "again 5 [7.0]"


def test_ranks_in_one_directory_that_is_not_shared_keep_apart(said: Said) -> None:
    assert said[0, "unshared_by_flag"] == ["restored 3 [3.0] {'rank': 0}"]
    assert said[1, "unshared_by_flag"] == ["restored 3 [13.0] {'rank': 1}"]


def test_the_environment_variables_are_enough(tmp_path: Path) -> None:
    said = run(tmp_path, 2, "only_environment")
    for rank in (0, 1):
        assert said[rank, "only_environment"] == [f"restored 1 [{float(rank)}] {{'number': {rank}}}"]
    assert load(tmp_path / "only_environment", rank=1)["rank"] == {"number": 1}
    assert not leftovers(tmp_path / "only_environment")


_ALONE = """
import os, sys, time
root, rank, port, done = sys.argv[1:]
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
import torch, stillframe
state = {"w": torch.zeros(4)}
print(stillframe.restore(root, state, deadline_s=60).step, state["w"].sum().item(), flush=True)
open(f"{done}-{rank}", "w").close()
while not all(os.path.exists(f"{done}-{each}") for each in (0, 1)):
    time.sleep(0.02)
"""


def test_who_only_reads_needs_no_process_group(tmp_path: Path) -> None:
    """Rank 0 serves the store, also when it has restored and the other has not."""
    with Checkpointer(tmp_path / "root", rank=0, world_size=1) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(4)})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = [start_child(_ALONE, tmp_path / "root", rank, port, tmp_path / "done") for rank in (0, 1)]
    for child in children:
        out, err = child.communicate(timeout=100)
        assert out == "1 4.0\n", err
