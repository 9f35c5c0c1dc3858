"""How ranks tell one another that a save has failed: threads stand in for ranks, around a real store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from stillframe.errors import KeeperError, StillframeError, StorageError
from stillframe.link.messages import Uncommitted
from stillframe.ranks import told
from stillframe.ranks.group import Group
from stillframe.save.failures import Failures
from stillframe.save.saves import Save, Saves
from tests.support import until

FULL = StorageError("no space left on device")
WHY = "step 7 is not committed: rank 0 could not save it: no space left on device"


class Rank:
    """Its book of saves, and what its keeper was told."""

    def __init__(self, rank: int, store: Any, name: str = "0123abcd") -> None:
        self.group = Group(rank, 2, store, 5.0, talks=False)
        if name:
            self.group.meet_as(name)
        self.saves = Saves("warn")
        self.sent: list[Uncommitted] = []
        self.given_up: list[tuple[int, int, StillframeError, bool]] = []
        self.keeper = self._keeper()
        Failures(self.group, self.saves, self.keeper).begin()

    def _keeper(self) -> Any:
        """The process that has its saves, and the client of it, in one."""
        return SimpleNamespace(send=self.sent.append, report_unsaved=self._give_up, on_unsaved=None)

    def _give_up(self, sequence: int, step: int, attempt: int, error: StillframeError, is_begun: bool) -> None:
        assert sequence == self.saves.sequence
        self.given_up.append((step, attempt, error, is_begun))

    def save(self, step: int = 7, attempt: int = 1) -> Save:
        """One that is sealed here."""
        save = self.saves.make(step, attempt, 0, 0.0)
        save.job = SimpleNamespace(keeper=self.keeper)
        self.saves.add(save)
        self.saves.sealed(save.number, 0.0, is_unchanged=False, epoch=1)
        return save

    def wait_for_others(self, save: Save) -> None:
        self.saves.awaiting_ranks(save.number, (1 - self.group.rank,), 600.0)

    def looked(self) -> None:
        """When every watch has been asked at least once."""
        turns: list[int] = []

        def is_second() -> bool:
            turns.append(1)
            return len(turns) > 1

        self.group.watch(is_second)
        until(lambda: len(turns) > 1, "the watches are asked")


@pytest.fixture
def ranks() -> list[Rank]:
    store = HashStore()
    return [Rank(0, store), Rank(1, store)]


@pytest.mark.parametrize("files_stay", [False, True])
def test_rank_0_tells_the_others_why_it_does_not_commit(ranks: list[Rank], files_stay: bool) -> None:
    first, other = ranks
    mine, theirs = first.save(), other.save()
    other.wait_for_others(theirs)
    first.saves.fail(mine.number, FULL, files_stay)
    until(lambda: other.sent, "the word comes")
    assert other.sent == [Uncommitted(theirs.number, "StorageError", WHY, files_stay)]


def test_a_word_that_was_there_before_is_found(ranks: list[Rank]) -> None:
    first, other = ranks
    first.saves.fail(first.save().number, FULL)
    theirs = other.save()
    other.wait_for_others(theirs)
    until(lambda: other.sent, "the word comes")
    assert other.sent[0].files_stay, "unless rank 0's keeper says otherwise"


def test_a_save_that_rank_0_never_began_is_told(ranks: list[Rank]) -> None:
    first, other = ranks
    theirs = other.save()
    other.wait_for_others(theirs)
    first.keeper.on_unsaved(0, 7, 1, FULL)
    until(lambda: other.sent, "the word comes")
    assert other.sent == [Uncommitted(theirs.number, "StorageError", WHY, files_stay=True)]


def test_what_was_refused_before_a_restore_says_nothing_of_the_step_after_it(ranks: list[Rank]) -> None:
    """The word comes late, from the stager's thread: by then the step and its attempts begin anew."""
    first, other = ranks
    for rank in ranks:
        rank.saves.sequence = 1
    theirs = other.save()
    other.wait_for_others(theirs)
    first.keeper.on_unsaved(0, 7, 1, FULL)
    first.looked()
    other.looked()
    assert not other.sent


def test_a_word_is_of_one_save(ranks: list[Rank]) -> None:
    """Not of another step, attempt or epoch, nor of another run that the store has served."""
    first, other = ranks
    stranger = Rank(0, first.group._store._store, "ffffffff")
    for rank, step, attempt in ((first, 8, 1), (first, 7, 2), (stranger, 7, 1)):
        rank.saves.fail(rank.save(step, attempt).number, FULL)
    first.saves.sequence = 1
    first.saves.fail(first.save().number, FULL)
    for rank in (first, stranger):
        rank.looked()  # all of it has been said
    theirs = other.save()
    other.wait_for_others(theirs)
    other.looked()
    assert not other.sent
    other.saves.sequence = 1
    later = other.save()
    other.wait_for_others(later)
    until(lambda: other.sent, "the word comes")
    assert [each.save for each in other.sent] == [later.number]


def test_nothing_is_said_of_a_save_that_is_committed(ranks: list[Rank]) -> None:
    first, other = ranks
    first.saves.committed(first.save().number, 0.0)
    first.looked()
    theirs = other.save()
    other.wait_for_others(theirs)
    other.looked()
    assert not other.sent
    other.saves.committed(theirs.number, 0.0)
    until(lambda: not other.group._telling._watches, "the store is asked no more")


def test_rank_0_is_told_of_a_rank_that_will_not_seal(ranks: list[Rank]) -> None:
    first, other = ranks
    mine = first.save()
    first.wait_for_others(mine)
    other.keeper.on_unsaved(0, 7, 1, FULL)
    until(lambda: first.given_up, "the word comes")
    step, attempt, error, is_begun = first.given_up[0]
    assert (step, attempt, is_begun) == (7, 1, True)
    assert isinstance(error, KeeperError)
    assert "rank 1 could not save it: no space left" in str(error)


def test_a_rank_that_has_sealed_says_nothing_to_rank_0(ranks: list[Rank]) -> None:
    """Rank 0 may have counted its seal."""
    first, other = ranks
    mine = first.save()
    first.wait_for_others(mine)
    other.saves.fail(other.save().number, FULL)
    other.looked()
    first.looked()
    assert not first.given_up


def test_ranks_that_have_not_met_say_nothing() -> None:
    rank = Rank(0, HashStore(), name="")
    assert rank.keeper.on_unsaved is None
    assert len(rank.saves.on_end) == 0


def test_the_store_holds_the_newest_words_only(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "MAX_TOLD", 3)
    first, _ = ranks
    before = first.group._store.num_keys()
    for step in range(20):
        first.saves.fail(first.save(step).number, FULL)
    first.looked()
    assert first.group._store.num_keys() - before == 3


def test_a_keeper_that_is_gone_is_told_nothing(ranks: list[Rank]) -> None:
    first, other = ranks
    theirs = other.save()

    def send(_message: Uncommitted) -> None:
        raise KeeperError("it is gone")

    theirs.job = SimpleNamespace(keeper=SimpleNamespace(send=send))
    other.wait_for_others(theirs)
    other.looked()
    assert other.group._telling._watches
    first.saves.fail(first.save().number, FULL)
    until(lambda: not other.group._telling._watches, "the store is asked no more")
