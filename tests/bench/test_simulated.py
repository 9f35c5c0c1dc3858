"""The simulated job, in short: what rank 0 does grows with the ranks, and no faster; what a member does, not at all."""

from __future__ import annotations

import pytest
from benchmarks.simulated import WAVES, Job, Phase, simulate

SIZES = 64, 256
LINEAR = 1.2 * SIZES[1] / SIZES[0]


@pytest.fixture(scope="module")
def jobs() -> tuple[Job, Job]:
    return simulate(SIZES[0]), simulate(SIZES[1])


def phases(job: Job) -> dict[str, Phase]:
    return {phase.name: phase for phase in job.leader.phases}


def test_calls_and_bytes_of_rank_0_grow_no_faster_than_the_ranks(jobs: tuple[Job, Job]) -> None:
    few, many = map(phases, jobs)
    assert few.keys() == many.keys()
    for name, phase in many.items():
        for verb, count in phase.calls.items():
            assert count <= LINEAR * few[name].calls[verb], (name, verb)
        assert phase.read_bytes <= LINEAR * few[name].read_bytes, name
        assert phase.written_bytes <= LINEAR * few[name].written_bytes, name
    assert jobs[1].manifest_bytes <= LINEAR * jobs[0].manifest_bytes


def test_only_the_heads_of_seals_are_read_once_for_each_rank(jobs: tuple[Job, Job]) -> None:
    for job in jobs:
        taken = phases(job)["rank 0 takes the seals as they come"]
        assert taken.calls["read"] == job.ranks - 2
        assert taken.read_bytes <= 4096 * job.ranks
        assert taken.calls["list"] == WAVES
        by_all = {taken.name, "a node is dead: the save fails"}
        others = [phase for phase in phases(job).values() if phase.name not in by_all]
        assert max(phase.calls.get("read", 0) for phase in others) < SIZES[0]


def test_a_restore_reads_the_seals_that_it_needs_however_many_there_are(jobs: tuple[Job, Job]) -> None:
    for job in jobs:
        found = phases(job)
        assert found["restored onto as many ranks"].seals == 1
        assert found["restored onto half of the ranks"].seals == 2
        assert found["restored onto a sixteenth of the ranks"].seals == 16
        assert found["restored onto half of the ranks"].total < 20


def test_the_work_of_a_member_does_not_grow(jobs: tuple[Job, Job]) -> None:
    few, many = ({phase.name: phase.calls for phase in job.member.phases} for job in jobs)
    assert few == many
