"""What a commit on an object store may cost in requests."""

from __future__ import annotations

from benchmarks.requests import carrying, requests

RANKS = 40


def test_a_commit_reads_each_seal_once_and_a_look_reads_none() -> None:
    found = {what: counts.total() for what, counts in requests(RANKS).items()}
    assert found.pop("root: rank 0 takes all seals but the last") <= RANKS + 2
    assert found.pop("tier: the commit") <= RANKS + 15
    assert all(count <= 10 for count in found.values()), found


def test_promoting_one_rank_costs_its_parts_and_22_requests() -> None:
    assert carrying(32).total() <= 24
