"""Ranks that have a root each: a save is committed on all of them or on none, and nobody waits for what cannot come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks.launch import run_ranks

SCENARIOS = (
    "restore_beside_a_wait", "restore_without_saving", "staging_fails", "two_attempts", "settling_fails",
    "keeper_waits", "retention",
)  # fmt: skip

Said = dict[tuple[int, str], list[str]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """All scenarios in one launch: what each rank said in each, in order."""
    root: Path = tmp_path_factory.mktemp("unshared")
    found: Said = {}
    output = run_ranks(2, "unshared_worker.py", root, *SCENARIOS)
    for rank, scenario, line in re.findall(r"^\[(\d+) (\w+)\] (.*)$", output, re.MULTILINE):
        found.setdefault((int(rank), scenario), []).append(line)
    return found


def test_one_rank_restores_while_another_waits_for_its_save(said: Said) -> None:
    assert said[0, "restore_beside_a_wait"] == ["ok 2", "committed"]
    assert said[1, "restore_beside_a_wait"] == ["ok None", "ok 2", "committed"]


def test_a_save_that_one_rank_does_not_make_fails_when_that_one_restores(said: Said) -> None:
    assert said[0, "restore_without_saving"] == ["ok 1", "ok None"]
    failed, *rest = said[1, "restore_without_saving"]
    assert failed.startswith("KeeperError step 2 is not committed: rank 0 went on to restore() without saving it")
    assert rest == ["ok 1", "ok None"]


def test_a_rank_that_cannot_stage_tells_the_others(said: Said) -> None:
    first, again = said[0, "staging_fails"]
    assert re.match(r"KeeperError step 1 is not committed: rank 1 could not save it: .*no memory for an arena", first)
    assert again == "ok None"
    first, again = said[1, "staging_fails"]
    assert "no memory for an arena" in first
    assert again == "ok None"


def test_an_attempt_that_every_rank_has_sealed_is_restored_whatever_one_of_them_has_tried_since(said: Said) -> None:
    restored, rewound = ["ok 1", "1.0"], ["ok None", "ok 1", "1.0"]
    assert said[0, "two_attempts"] == [*restored, *rewound]
    assert said[1, "two_attempts"] == ["ok None", *restored, *rewound]


def test_ranks_count_epochs_alike_after_a_restore_that_one_of_them_could_not_begin(said: Said) -> None:
    for rank in (0, 1):
        failed, *rest = said[rank, "settling_fails"]
        assert re.match(r"StorageError .*the disk is asleep", failed)
        assert rest == ["sequence 1 epoch 2", "ok 2"]


def test_a_keeper_that_has_sealed_is_not_taken_for_one_that_hangs(said: Said) -> None:
    assert said[0, "keeper_waits"] == ["same keeper", "ok None"]


def test_nothing_goes_before_a_later_step_is_complete_on_every_rank(said: Said) -> None:
    restored, before, after, last = said[0, "retention"]
    assert (restored, before) == ("ok 2", "kept [1, 2, 3, 4]")
    assert (after, last) == ("kept [4, 5]", "kept [6, 7]")
    assert said[1, "retention"] == ["ok 2", "kept [1, 2]", "kept [4, 5]", "kept [6, 7]"]
