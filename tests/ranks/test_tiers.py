"""Two ranks with tiers: every part is carried, and each rank comes back from the nearest place that has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import stillframe
from stillframe import Catalog, MismatchError, RestoreReport, Tier, load
from stillframe.checkpoint.survey import survey
from stillframe.checkpoint.tiers import look_at_tiers
from stillframe.checkpoint.verify import verify
from stillframe.model import SkippedStep
from stillframe.observe.history import histories
from stillframe.ranks.group import Group
from stillframe.restoring.resume import Resume
from stillframe.restoring.selection import Wanted
from tests.ranks.launch import run_ranks

SCENARIOS = "shared", "node_lost", "part_lost", "half_carried", "half_carried_of_rank_0", "two_runs", "one_read_fails"


class Said(NamedTuple):
    root: Path
    lines: dict[tuple[int, str], list[str]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """All scenarios in one launch: what each rank said in each, in order."""
    root = tmp_path_factory.mktemp("tiers")
    found: dict[tuple[int, str], list[str]] = {}
    output = run_ranks(2, "tiers_worker.py", root, *SCENARIOS, timeout_s=170)
    for rank, scenario, line in re.findall(r"^\[(\d+) (\w+)\] (.*)$", output, re.MULTILINE):
        found.setdefault((int(rank), scenario), []).append(line)
    return Said(root, found)


def check_whole(tier: Path) -> list[int]:
    catalog = Catalog(tier)
    for save in catalog.committed():
        with catalog.open_save(save) as checkpoint:
            assert checkpoint.world_size == 2
            assert verify(checkpoint).is_whole
    return catalog.steps()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shared_root_that_is_lost_comes_back_from_its_tier(said: Said, rank: int) -> None:
    first, second = said.lines[rank, "shared"]
    assert re.fullmatch(r"steps \[.*4, 6\] 6", first)
    assert second == "restored 6 tier True"
    assert check_whole(said.root / "shared" / "tier") == [6, 8]


def test_a_replaced_node_reads_the_tier_and_the_others_their_own(said: Said) -> None:
    assert said.lines[0, "node_lost"] == [
        "restored 4 node0 True", "restored 7 node0 True", "restored 6 tier True",
    ]  # fmt: skip
    assert said.lines[1, "node_lost"] == [
        "restored 4 tier True", "restored 7 node1 True", "restored 6 tier True",
    ]  # fmt: skip


def test_with_a_tier_behind_them_roots_that_are_not_shared_serve_any_number_of_ranks(said: Said) -> None:
    tier = said.root / "node_lost" / "tier"
    assert check_whole(tier) == [4, 6]
    assert bool((load(tier, rank=1)["w"] == 106.0).all())
    live = {"w": torch.zeros(200_000), "step": 0}
    report = stillframe.restore(said.root / "node_lost" / "nowhere", live, tiers=[Tier(tier)], rank=0, world_size=1)
    assert report.step == 6
    assert live["step"] == 6


def test_a_step_whose_parts_are_not_all_there_any_more_holds_up_no_later_one(said: Said) -> None:
    for rank in (0, 1):
        assert said.lines[rank, "part_lost"] == ["MismatchError", "steps [4]"]
    assert check_whole(said.root / "part_lost" / "tier") == [4]


def test_a_part_that_lies_in_a_tier_alone_counts_before_the_others_have_come(said: Said) -> None:
    assert said.lines[0, "half_carried"] == ["restored 4 node0 True", "steps [2, 4]"]
    assert said.lines[1, "half_carried"] == ["steps [2]", "restored 4 tier True", "steps [2, 4]"]
    assert check_whole(said.root / "half_carried" / "tier") == [2, 4]


def test_so_does_the_part_of_rank_0(said: Said) -> None:
    assert said.lines[0, "half_carried_of_rank_0"] == ["steps [2]", "restored 4 tier True", "steps [2, 4]"]
    assert said.lines[1, "half_carried_of_rank_0"] == ["restored 4 node1 True", "steps [2, 4]"]
    assert check_whole(said.root / "half_carried_of_rank_0" / "tier") == [2, 4]


def restore_own(root: Path, tier: Path, step: int | None = None) -> RestoreReport:
    """As the only rank of a run that does not share its roots: the checkpoints are of two."""
    live = {"w": torch.zeros(200_000), "step": 0}
    resume = Resume(
        Catalog(root, 0), Group(0, 1, None, 60.0), live, Wanted.given(step, True, None, None), [Catalog(tier)]
    )
    resume.run(lambda: None)
    return resume.report


@pytest.mark.parametrize("step", [None, 5])
def test_roots_of_another_number_of_ranks_are_no_fresh_start_when_the_tier_is_empty(
    said: Said, tmp_path: Path, step: int | None
) -> None:
    with pytest.raises(MismatchError, match=r"newest: step 5\) were saved by 2 ranks .* this run has 1: run with 2"):
        restore_own(said.root / "half_carried" / "node0", tmp_path / "empty", step)


def test_steps_of_another_number_of_ranks_that_are_newer_than_the_tiers_are_told(said: Said) -> None:
    directory = said.root / "half_carried"
    with pytest.warns(RuntimeWarning, match=r"step 4 is restored, .* \(step 5: 2 ranks .* run with 2 ranks"):
        report = restore_own(directory / "node0", directory / "tier")
    assert (report.step, report.source) == (4, str(directory / "tier"))
    assert report.skipped == (SkippedStep(5, "2 ranks saved it into roots that are not shared"),)


@pytest.mark.parametrize("rank", [0, 1])
def test_saves_of_two_runs_are_never_restored_together(said: Said, rank: int) -> None:
    refused, apart, found = said.lines[rank, "two_runs"]
    assert refused.startswith("MismatchError the ranks see checkpoints of different runs under one name (step 2")
    assert apart.startswith("MismatchError the ranks see checkpoints of different runs under one name (step 2")
    assert found == f"restored 2 {('b0', 'tier_b')[rank]} True"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_fails_on_one_rank_is_not_taken_for_damage(said: Said, rank: int) -> None:
    first, second = said.lines[rank, "one_read_fails"]
    assert re.match(r"StorageError (on rank 1: )?step 8 .* was chosen, but .*Input/output error", first)
    assert second == "restored 8 tier True"


def test_every_root_says_which_tiers_it_has_and_every_rank_what_it_carried(said: Said) -> None:
    for root, scenario, ranks in (("node0", "node_lost", [0]), ("node1", "node_lost", [1]), ("root", "shared", [0, 1])):
        directory = said.root / scenario
        found = survey(directory / root)
        (view,) = look_at_tiers(found)
        assert (view.root, view.trouble) == (str(directory / "tier"), "")
        assert {(held.state, held.parts, held.of) for held in view.held.values()} == {("whole", 2, 2)}
        carried = {(each.rank, event.step) for each in histories(directory / root) for event in each.carried}
        if scenario == "shared":
            assert carried == {(rank, 8) for rank in ranks}  # what was carried before, went with the root
            assert all(event.bytes for each in histories(directory / root) for event in each.carried)
