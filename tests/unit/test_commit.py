"""Counting seals: what the coordinator and the members do with what they find of a save."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from stillframe import Catalog
from stillframe.checkpoint.lock import Life, RootLock, life_of
from stillframe.checkpoint.removal import remove_all, set_aside
from stillframe.errors import (
    BusyError,
    DeadlineError,
    ExistsError,
    FormatError,
    KeeperError,
    StateError,
    StorageError,
)
from stillframe.format import names
from stillframe.format.epochs import Outcome
from stillframe.format.records import Failure
from stillframe.keeper.commit import Coordinator, Member, UpdateCounts
from stillframe.keeper.epochs import CurrentEpoch
from stillframe.keeper.outcomes import OutcomeBook, read_outcome
from stillframe.keeper.reporting import Reporting
from stillframe.keeper.segment import report_failure
from stillframe.link.messages import Uncommitted
from stillframe.model import SaveId
from stillframe.store.calls import Calls
from stillframe.store.memory import Fault, MemoryBackend, MemoryStore
from stillframe.store.posix import PosixStore
from tests.unit.saved import OTHER, RUN, STEP, begun, sealed, terms, unsealed

SAVE = SaveId(STEP)


def coordinator(
    root: Path,
    world_size: int = 3,
    deadline_s: float = 60.0,
    tensors: tuple[str, ...] = (),
    updates: int | None = None,
    counts: UpdateCounts | None = None,
) -> Coordinator:
    save = sealed(root, 0, world_size, tensors=tensors, updates=updates)
    return Coordinator(save, terms(root, world_size, deadline_s), True, counts or UpdateCounts())


def member(root: Path, deadline_s: float = 60.0) -> Member:
    """Rank 1 of 2."""
    return Member(sealed(root, 1, 2), terms(root, 2, deadline_s), has_locks=True)


def manifest(root: Path) -> Path:
    return Path(Catalog(root).dir(SAVE)) / names.MANIFEST


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that sees a manifest waits no longer to be told of it."""
    monkeypatch.setattr("stillframe.keeper.commit._UNTOLD_S", 0.0)


# --- rank 0 ------------------------------------------------------------------------------------


def test_it_commits_when_every_rank_has_sealed_and_not_before(tmp_path: Path) -> None:
    commit = coordinator(tmp_path)
    assert not commit.poll(is_orphan=False)
    sealed(tmp_path, 2)
    assert not commit.poll(is_orphan=False)
    assert commit.awaited == [1]
    sealed(tmp_path, 1)
    assert commit.poll(is_orphan=False)
    with Catalog(tmp_path).open(STEP) as checkpoint:
        assert checkpoint.save == SAVE
        assert checkpoint.ranks == [0, 1, 2]
        assert [checkpoint.of(rank).seal.rank for rank in checkpoint.ranks] == [0, 1, 2]


def test_seals_of_another_attempt_do_not_count(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2, deadline_s=0.0)
    sealed(tmp_path, 1, 2, attempt=2)
    with pytest.raises(DeadlineError, match="rank 1 has sealed it as attempt 2, rank 0 as attempt 1"):
        commit.poll(is_orphan=False)
    assert not Catalog(tmp_path).steps()


def test_a_seal_that_somebody_has_put_there_from_another_save_is_refused(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    other = sealed(tmp_path, 1, 2, attempt=2).identify()
    shutil.copy(Path(Catalog(tmp_path).dir(other)) / names.seal(1), Path(Catalog(tmp_path).dir(SAVE)) / names.seal(1))
    with pytest.raises(FormatError, match="is the seal of step 7 of start 1, attempt 2"):
        commit.poll(is_orphan=False)
    assert not Catalog(tmp_path).steps()


def test_a_manifest_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    sealed(tmp_path, 1, 2)
    manifest(tmp_path).write_bytes(b"not this one")
    with pytest.raises(ExistsError):
        commit.poll(is_orphan=False)
    assert manifest(tmp_path).read_bytes() == b"not this one"
    assert commit.save.is_promised, "whose files these are nobody can tell"


def test_a_manifest_that_an_earlier_keeper_of_the_same_save_has_put_is_this_one(tmp_path: Path) -> None:
    """It says only what the seals say."""
    for _ in range(2):
        commit = coordinator(tmp_path, 2)
        sealed(tmp_path, 1, 2)
        assert commit.poll(is_orphan=False)


def test_a_commit_is_not_reported_once_another_run_has_taken_over(tmp_path: Path) -> None:
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    begun(tmp_path, OTHER)
    with pytest.raises(BusyError, match="another run has taken over"):
        commit.poll(is_orphan=False)
    assert commit.save.is_promised, "the other run may have chosen it"
    assert Catalog(tmp_path).is_committed(SAVE)
    assert not other.poll(is_orphan=False)
    other._seen_s = 0.0  # it has waited long enough to be told
    with pytest.raises(BusyError, match="another run has taken over"):
        other.poll(is_orphan=False)


def test_a_rank_that_reports_a_failure_ends_the_wait(tmp_path: Path) -> None:
    commit = coordinator(tmp_path)
    report_failure(Catalog(tmp_path), Failure(SAVE, 2, "StorageError", "no space left"))
    with pytest.raises(StorageError, match="step 7 is not committed: rank 2 could not save it: no space left"):
        commit.poll(is_orphan=False)


def test_the_deadline_names_the_missing_ranks_and_what_they_did_instead(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 4, deadline_s=-1.0)
    sealed(tmp_path, 1, 4)
    other = Path(Catalog(tmp_path).dir(SaveId(9))) / names.seal(2)
    other.parent.mkdir()
    other.touch()
    with pytest.raises(DeadlineError, match=r"ranks 2-3 of 4 did not seal it .* \(rank 2 has sealed step 9"):
        commit.poll(is_orphan=False)


def test_a_keeper_that_is_gone_ends_the_wait_long_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillframe.keeper.commit._LOOK_AT_LOCKS_S", 0.0)
    lock = RootLock(PosixStore(tmp_path), 1, RUN)
    lock.acquire()
    commit = coordinator(tmp_path, 2)
    assert life_of(PosixStore(tmp_path), 1, RUN) is Life.ALIVE
    assert not commit.poll(is_orphan=False)
    assert not commit.poll(is_orphan=False)
    lock.release()
    assert life_of(PosixStore(tmp_path), 1, RUN) is Life.GONE
    assert not commit.poll(is_orphan=False)  # its seal may have come between the listing and this look
    assert not commit.poll(is_orphan=False)  # its trainer may start another and save the step yet
    monkeypatch.setattr("stillframe.keeper.commit._ABSENT_S", -1.0)
    with pytest.raises(KeeperError, match="rank 1 ended without saving it; every rank must save the same steps"):
        commit.poll(is_orphan=False)
    (Path(Catalog(tmp_path).dir(SAVE)) / (names.segment(1) + ".00000000.partial")).touch()
    with pytest.raises(KeeperError, match="rank 1 ended before sealing it"):
        commit.poll(is_orphan=False)


def test_a_seal_that_comes_with_the_end_of_its_keeper_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillframe.keeper.commit._LOOK_AT_LOCKS_S", 0.0)
    lock = RootLock(PosixStore(tmp_path), 1, RUN)
    lock.acquire()
    lock.release()
    commit = coordinator(tmp_path, 2)
    assert not commit.poll(is_orphan=False)
    sealed(tmp_path, 1, 2)
    assert commit.poll(is_orphan=False)


def test_a_lock_of_another_run_says_nothing(tmp_path: Path) -> None:
    assert life_of(PosixStore(tmp_path), 1, RUN) is Life.UNKNOWN
    RootLock(PosixStore(tmp_path), 1, OTHER).acquire()
    assert life_of(PosixStore(tmp_path), 1, RUN) is Life.UNKNOWN


def test_ranks_that_hold_different_tensors_are_told_which(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2, tensors=("a", "b"))
    sealed(tmp_path, 1, 2, tensors=("a", "c"))
    with pytest.raises(StateError, match=r"(?s)b: F32\[4\] on rank 0, not on rank 1.*c: F32\[4\] on rank 1"):
        commit.poll(is_orphan=False)
    assert not Catalog(tmp_path).steps()


def test_a_rank_that_holds_nothing_of_what_it_should_is_told(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2, tensors=("a",))
    sealed(tmp_path, 1, 2)
    with pytest.raises(StateError, match=r"a: F32\[4\] on rank 0, not on rank 1"):
        commit.poll(is_orphan=False)


def test_a_rank_of_another_world_is_told(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    sealed(tmp_path, 1, 3)
    with pytest.raises(StateError, match="rank 1 saves step 7 as one of 3 ranks, rank 0 as one of 2"):
        commit.poll(is_orphan=False)


# --- updates -----------------------------------------------------------------------------------


def test_ranks_that_have_made_different_numbers_of_updates_have_not_saved_the_same_step(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2, updates=5)
    sealed(tmp_path, 1, 2, updates=6)
    with pytest.raises(StateError, match=r"different numbers of updates .*\(rank 0: 5; rank 1: 6\)"):
        commit.poll(is_orphan=False)
    assert not Catalog(tmp_path).steps()


@pytest.mark.parametrize("updates", [5, None, 0])
def test_ranks_that_have_made_as_many_or_do_not_know_are_committed(tmp_path: Path, updates: int | None) -> None:
    commit = coordinator(tmp_path, 2, updates=5)
    sealed(tmp_path, 1, 2, updates=updates)
    assert commit.poll(is_orphan=False)


def test_updates_count_from_the_save_before(tmp_path: Path) -> None:
    """One rank has slipped; the save that shows it fails, and the next one, after as many updates, does not."""
    counts = UpdateCounts()
    commit = coordinator(tmp_path, 2, updates=7, counts=counts)
    sealed(tmp_path, 1, 2, updates=8)
    with pytest.raises(StateError, match=r"rank 0: 7; rank 1: 8"):
        commit.poll(is_orphan=False)
    commit = coordinator(tmp_path, 2, updates=9, counts=counts)
    sealed(tmp_path, 1, 2, updates=10)
    assert commit.poll(is_orphan=False)


# --- members -----------------------------------------------------------------------------------


def test_a_member_reports_a_commit_when_it_is_told_of_it(tmp_path: Path) -> None:
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    assert not other.poll(is_orphan=False)
    assert commit.poll(is_orphan=False)
    assert not other.poll(is_orphan=False), "rank 0 has still to see that no other run has taken over"
    OutcomeBook(PosixStore(tmp_path)).tell(Outcome(SAVE))
    assert other.poll(is_orphan=False)


@pytest.mark.usefixtures("impatient")
def test_a_member_that_nobody_tells_makes_sure_itself(tmp_path: Path) -> None:
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    assert commit.poll(is_orphan=False)
    assert other.poll(is_orphan=False)


def test_a_member_whose_rank_0_is_gone_asks_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillframe.keeper.commit._LOOK_AT_LOCKS_S", 0.0)
    lock = RootLock(PosixStore(tmp_path), 0, RUN)
    lock.acquire()
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    lock.release()
    assert not other.poll(is_orphan=False), "its trainer may be starting another keeper"
    monkeypatch.setattr("stillframe.keeper.commit._ABSENT_S", -1.0)
    with pytest.raises(KeeperError, match="rank 0 ended before committing it"):
        other.poll(is_orphan=False)
    assert commit.poll(is_orphan=False)
    assert other.poll(is_orphan=False)


@pytest.mark.usefixtures("impatient")
def test_a_member_that_looks_late_sees_that_there_was_a_manifest(tmp_path: Path) -> None:
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    assert commit.poll(is_orphan=False)
    other._seen_s = 0.0
    set_aside(Catalog(tmp_path), SAVE, "pruned", 1)
    manifest(tmp_path).unlink()
    assert other.poll(is_orphan=False)


def test_what_was_told_is_read_back_however_the_save_ended(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    assert read_outcome(store, SAVE) is None
    begun(tmp_path)
    OutcomeBook(store).tell(Outcome(SAVE, "StateError", "they differ"))
    again = OutcomeBook(store)  # of the next keeper, which knows nothing of the first
    again.tell(Outcome(SaveId(STEP, 1, 2)))
    assert read_outcome(store, SAVE) == Outcome(SAVE, "StateError", "they differ")
    assert read_outcome(store, SaveId(STEP, 1, 2)) == Outcome(SaveId(STEP, 1, 2))
    assert read_outcome(store, SaveId(STEP, 2)) is None
    (tmp_path / names.outcomes(1)).write_bytes(b"torn")
    assert read_outcome(store, SAVE) is None


def test_a_member_takes_back_its_files_only_on_the_word_of_rank_0(tmp_path: Path) -> None:
    late = member(tmp_path, deadline_s=-20.0)
    assert late.save.is_promised
    with pytest.raises(DeadlineError, match="rank 0 did not commit it"):
        late.poll(is_orphan=False)
    assert late.save.is_promised
    OutcomeBook(PosixStore(tmp_path)).tell(Outcome(SAVE, "StateError", "they differ"))
    with pytest.raises(StateError, match="they differ"):
        late.poll(is_orphan=False)
    assert not late.save.is_promised


def test_a_member_keeps_its_files_where_rank_0_cannot_tell(tmp_path: Path) -> None:
    late = member(tmp_path)
    OutcomeBook(PosixStore(tmp_path)).tell(Outcome(SAVE, "StorageError", "it cannot be determined", files_stay=True))
    with pytest.raises(StorageError, match="cannot be determined"):
        late.poll(is_orphan=False)
    assert late.save.is_promised


# --- rank 0's word, by the trainers ------------------------------------------------------------


def word(files_stay: bool = False) -> Uncommitted:
    return Uncommitted(1, "StateError", "step 7 is not committed: they differ", files_stay)


@pytest.mark.parametrize("files_stay", [False, True])
def test_a_member_believes_a_failure_that_comes_by_the_trainers(tmp_path: Path, files_stay: bool) -> None:
    other = member(tmp_path)
    other.save.word = word(files_stay)
    with pytest.raises(StateError, match="they differ"):
        other.poll(is_orphan=False)
    assert other.save.is_promised is files_stay
    assert other.save.is_told, "rank 0 need not be told of it"


def test_what_the_root_says_comes_first(tmp_path: Path) -> None:
    """A keeper of rank 0 has committed and died; its trainer says that the save is lost."""
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    assert commit.poll(is_orphan=False)
    OutcomeBook(PosixStore(tmp_path)).tell(Outcome(SAVE))
    other.save.word = word(files_stay=True)
    assert other.poll(is_orphan=False)


def test_a_member_that_waits_for_rank_0_to_begin_says_so_and_heeds_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = unsealed(tmp_path, 1, 2)
    save._epoch = CurrentEpoch(Catalog(tmp_path), terms(tmp_path, 2, run=OTHER), 1)  # of a run that has not begun
    monkeypatch.setattr("stillframe.keeper.segment.NEWS_S", -1.0)
    mentions = []

    def mention() -> None:
        mentions.append(save.id)
        save.word = word()

    save.on_waiting = mention
    with pytest.raises(StateError, match="they differ"):
        save.open()
    assert mentions == [None]
    assert not save.is_promised, "there is nothing to keep"
    assert save.is_told


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_member_leaves_its_failure_in_the_root_and_waits_only_a_while_for_rank_0_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """Its later saves wait for this."""
    if is_begun:
        begun(tmp_path)
    catalog = Catalog(tmp_path)
    monkeypatch.setattr("stillframe.keeper.reporting._EPOCH_S", -1.0)
    epoch = CurrentEpoch(catalog, terms(tmp_path, 2), 1)
    Reporting(catalog, epoch, 1, is_alone=False).unsaved(STEP, 1, "StorageError", "no space left")
    assert (catalog.store.head(names.key(SAVE, names.failure(1))) is not None) is is_begun


# --- storage that fails ------------------------------------------------------------------------


class Failing(Calls):
    """The directory's fsync fails once a name is there, so many times."""

    def __init__(self, name: str, times: int = 10**9) -> None:
        self._name = name
        self._left = times

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode) and self._name in os.listdir(fd) and self._left > 0:
            self._left -= 1
            raise OSError(5, "Input/output error")


def test_a_seal_is_promised_from_its_rename_on(tmp_path: Path) -> None:
    """The directory's fsync fails after it: rank 0 may have counted the seal all the same."""
    save = unsealed(PosixStore(tmp_path, calls=Failing(names.seal(1))), 1, 2)
    with pytest.raises(StorageError):
        save.seal()
    assert save.is_promised


def test_a_manifest_whose_fsync_fails_once_is_put_again(tmp_path: Path) -> None:
    save = sealed(PosixStore(tmp_path, calls=Failing(names.MANIFEST, times=1)), 0, 1)
    save.commit([save.sealed])
    assert Catalog(tmp_path).steps() == [STEP]


def test_a_manifest_whose_fsync_goes_on_failing_is_in_doubt_and_stays(tmp_path: Path) -> None:
    save = sealed(PosixStore(tmp_path, calls=Failing(names.MANIFEST)), 0, 1)
    with pytest.raises(StorageError, match="cannot determine whether step 7 was committed"):
        save.commit([save.sealed])
    assert save.is_promised
    assert Catalog(tmp_path).is_committed(SAVE)


@pytest.mark.parametrize("lands_late", [False, True])
def test_a_manifest_that_was_refused_is_in_doubt_only_if_it_may_land_late(lands_late: bool) -> None:
    def inject(verb: str, key: str) -> Fault | None:
        return Fault.REFUSED if verb == "put_new" and key.endswith(names.MANIFEST) else None

    save = sealed(MemoryStore(MemoryBackend(lands_late), inject), 0, 1)
    with pytest.raises(StorageError, match="cannot determine" if lands_late else "injected fault"):
        save.commit([save.sealed])
    assert save.is_promised is lands_late


def test_a_save_that_failed_leaves_nothing(tmp_path: Path) -> None:
    save = sealed(tmp_path, 0, 2)
    save.discard()
    assert not Path(Catalog(tmp_path).dir(SAVE)).exists()


def test_what_a_paused_keeper_still_writes_after_its_step_was_set_aside_is_no_checkpoint(tmp_path: Path) -> None:
    save = sealed(tmp_path, 0, 1)
    catalog, later = Catalog(tmp_path), begun(tmp_path, OTHER)
    set_aside(catalog, SAVE, "left over", later)
    remove_all(catalog, SAVE, keeps_tombstone=True)
    with pytest.raises(BusyError):
        save.commit([save.sealed])
    assert manifest(tmp_path).exists()
    assert not Catalog(tmp_path).steps()
    assert not Catalog(tmp_path).is_committed(SAVE)


def test_a_manifest_that_is_there_comes_before_the_word_of_a_trainer(tmp_path: Path) -> None:
    """Rank 0's keeper has put it, and was killed before it told anybody: its trainer says that the save has failed."""
    commit, other = coordinator(tmp_path, 2), member(tmp_path)
    assert commit.poll(is_orphan=False)
    other.save.word = word(files_stay=True)
    assert other.poll(is_orphan=False)
