"""The branch: what counts after a restore, a rewind, a crash, and a writer that comes too late."""

from __future__ import annotations

from stillframe.lineage import Branch, Row, continue_from, recover
from stillframe.model import SaveId


def steps(branch: Branch, *saves: SaveId) -> list[int]:
    return list(branch.of(saves))


def test_of_its_own_epoch_every_save_counts() -> None:
    assert steps(Branch(1), SaveId(3, 1), SaveId(1, 1)) == [1, 3]


def test_where_there_is_no_epoch_nothing_counts() -> None:
    assert steps(Branch(None), SaveId(1, 1)) == []


def test_an_epoch_that_goes_on_from_nothing_leaves_everything_behind() -> None:
    assert continue_from(None, [Row(1, 5)]) == ()
    assert steps(Branch(2, continue_from(None, [Row(1, 5)])), SaveId(5, 1), SaveId(1, 2)) == [1]


def test_a_rewind_leaves_what_came_after_behind() -> None:
    """1, 2, 3 | back to 1 | 2': of the two steps 2, the second counts."""
    branch = Branch(2, continue_from(SaveId(1, 1), []))
    saves = [SaveId(1, 1), SaveId(2, 1), SaveId(3, 1), SaveId(2, 2)]
    assert branch.of(saves) == {1: [SaveId(1, 1)], 2: [SaveId(2, 2)]}


def test_a_late_commit_beyond_the_cut_does_not_count_and_one_before_it_does() -> None:
    branch = Branch(3, continue_from(SaveId(4, 2), continue_from(SaveId(2, 1), [])))
    assert not branch.has(SaveId(5, 2))
    assert not branch.has(SaveId(9, 1))
    assert branch.has(SaveId(1, 1))
    assert branch.has(SaveId(3, 2))


def test_a_rewind_beyond_an_older_cut_cuts_that_too() -> None:
    lineage = continue_from(SaveId(6, 2), continue_from(SaveId(4, 1), []))
    assert lineage == (Row(2, 6), Row(1, 4))
    assert continue_from(SaveId(3, 1), []) == (Row(1, 3),)
    assert continue_from(SaveId(5, 3), [Row(2, 9), Row(1, 4)]) == (Row(3, 5), Row(2, 5), Row(1, 4))


def test_of_two_attempts_at_a_step_the_later_comes_first() -> None:
    saves = [SaveId(1, 1, 1), SaveId(1, 1, 2), SaveId(2, 1)]
    assert Branch(1).of(saves) == {1: [SaveId(1, 1, 2), SaveId(1, 1, 1)], 2: [SaveId(2, 1)]}


def test_another_attempt_at_the_step_that_an_epoch_went_on_from_does_not_count() -> None:
    branch = Branch(2, (Row(1, 4),), SaveId(4, 1, 1))
    assert branch.has(SaveId(4, 1, 1))
    assert not branch.has(SaveId(4, 1, 2))
    assert branch.has(SaveId(3, 1, 2))


def test_what_manifests_say_is_enough_where_the_epochs_files_are_lost() -> None:
    assert recover({1: None}, 1) == Branch(1)
    assert recover({1: None, 2: SaveId(4, 1), 3: SaveId(6, 2)}, 3) == Branch(3, (Row(2, 6), Row(1, 4)), SaveId(6, 2))
    assert recover({2: SaveId(4, 1)}, 2) == Branch(2, (Row(1, 4),), SaveId(4, 1))


def test_parents_that_go_round_in_a_circle_end() -> None:
    """Nobody writes them, but a file can say anything."""
    assert recover({1: SaveId(3, 2), 2: SaveId(3, 1)}, 2) == Branch(2, (Row(1, 3),), SaveId(3, 1))
    assert recover({2: SaveId(3, 2)}, 2) == Branch(2, (Row(2, 3),), SaveId(3, 2))
