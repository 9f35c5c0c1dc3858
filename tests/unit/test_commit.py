"""Counting seals: what the coordinator and the members do with what they find in a step's directory."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from stillframe import Catalog
from stillframe.checkpoint.lock import Life, RootLock, life_of
from stillframe.errors import DeadlineError, ExistsError, KeeperError, StateError, StorageError
from stillframe.format import names, records
from stillframe.format.digest import digest
from stillframe.format.records import Failure, SealDraft, Team
from stillframe.format.segment import encode_header
from stillframe.format.tree import DictNode, RankBox, ShardedNode
from stillframe.keeper.commit import Coordinator, Member, Terms
from stillframe.keeper.segment import SegmentWriter, report_failure
from stillframe.link.messages import Begin
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore

ATTEMPT = "0123abcd"
STEP = 7


def sealed(
    root: Path | PosixStore, rank: int, world_size: int = 3, attempt: str = ATTEMPT, tensors: tuple[str, ...] = ()
) -> SegmentWriter:
    """A rank's part of the step, without data, as its keeper leaves it."""
    flush = unsealed(root, rank, world_size, attempt, tensors)
    flush.seal()
    return flush


def unsealed(
    root: Path | PosixStore, rank: int, world_size: int, attempt: str = ATTEMPT, tensors: tuple[str, ...] = ()
) -> SegmentWriter:
    nodes = [ShardedNode(name, "F32", (4,), [RankBox(rank, (rank,), (1,))]) for name in tensors]
    teams = [Team(digest(b"all"), world_size, digest(repr(tensors).encode()))] if tensors else []
    draft = SealDraft(
        STEP, rank, world_size, attempt, records.encode_shards([]),
        records.encode_tree(DictNode(list(tensors), list(nodes))), msgspec.Raw(b"[]"), teams,
    )  # fmt: skip
    header = encode_header([], {})
    begin = Begin(1, STEP, 0.0, len(header), 0, 0, "", ())
    return SegmentWriter(begin, header, draft, Catalog(root), threading.Lock())


def terms(root: Path, world_size: int = 3, deadline_s: float = 60.0) -> Terms:
    return Terms(PosixStore(root), ATTEMPT, world_size, deadline_s)


def coordinator(
    root: Path, world_size: int = 3, deadline_s: float = 60.0, tensors: tuple[str, ...] = ()
) -> Coordinator:
    flush = sealed(root, 0, world_size, tensors=tensors)
    return Coordinator(flush, terms(root, world_size, deadline_s), has_locks=True)


def test_it_commits_when_every_rank_has_sealed_and_not_before(tmp_path: Path) -> None:
    commit = coordinator(tmp_path)
    assert not commit.poll(is_orphan=False)
    sealed(tmp_path, 2)
    assert not commit.poll(is_orphan=False)
    assert commit.awaited == [1]
    sealed(tmp_path, 1)
    assert commit.poll(is_orphan=False)
    with Catalog(tmp_path).open(STEP) as checkpoint:
        assert checkpoint.ranks == [0, 1, 2]
        assert [checkpoint.of(rank).seal.rank for rank in checkpoint.ranks] == [0, 1, 2]


def test_seals_of_another_attempt_do_not_count(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    sealed(tmp_path, 1, 2, attempt="ffffffff")
    assert not commit.poll(is_orphan=False)
    assert not Catalog(tmp_path).steps()


def test_a_manifest_of_another_run_is_never_replaced(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    member = Member(sealed(tmp_path, 1, 2), terms(tmp_path, 2), has_locks=True)
    manifest = Catalog(tmp_path).dir(STEP) / names.MANIFEST
    manifest.write_bytes(b'{"attempt":"ffffffff"}')
    with pytest.raises(ExistsError):
        commit.poll(is_orphan=False)
    with pytest.raises(ExistsError, match="another run"):
        member.poll(is_orphan=False)
    assert manifest.read_bytes() == b'{"attempt":"ffffffff"}'


def test_a_member_sees_the_manifest(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    member = Member(sealed(tmp_path, 1, 2), terms(tmp_path, 2), has_locks=True)
    assert not member.poll(is_orphan=False)
    assert commit.poll(is_orphan=False)
    assert member.poll(is_orphan=False)


def test_a_member_that_looks_late_sees_that_there_was_a_manifest(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)
    member = Member(sealed(tmp_path, 1, 2), terms(tmp_path, 2), has_locks=True)
    assert commit.poll(is_orphan=False)
    manifest = Catalog(tmp_path).dir(STEP) / names.MANIFEST
    manifest.rename(manifest.with_name(names.pruned_manifest()))
    assert member.poll(is_orphan=False)


def test_a_rank_that_reports_a_failure_ends_the_wait(tmp_path: Path) -> None:
    commit = coordinator(tmp_path)
    report_failure(Catalog(tmp_path), Failure(STEP, 2, ATTEMPT, "StorageError", "no space left"))
    with pytest.raises(StorageError, match="step 7 is not committed: rank 2 could not save it: no space left"):
        commit.poll(is_orphan=False)


def test_a_member_takes_back_its_files_only_on_the_word_of_rank_0(tmp_path: Path) -> None:
    late = Member(sealed(tmp_path, 1, 2), terms(tmp_path, 2, deadline_s=-20.0), has_locks=True)
    late.save.is_promised = True
    with pytest.raises(DeadlineError, match="rank 0 did not commit it"):
        late.poll(is_orphan=False)
    assert late.save.is_promised
    report_failure(Catalog(tmp_path), Failure(STEP, 0, ATTEMPT, "StateError", "they differ"))
    with pytest.raises(StateError, match="they differ"):
        late.poll(is_orphan=False)
    assert not late.save.is_promised


class Failing(Calls):
    """The directory's fsync fails once a name is there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode) and self._name in os.listdir(fd):
            raise OSError(5, "Input/output error")


def test_a_seal_is_promised_from_its_rename_on(tmp_path: Path) -> None:
    """The directory's fsync fails after it: rank 0 may have counted the seal all the same."""
    save = unsealed(PosixStore(tmp_path, calls=Failing(names.seal(1, ATTEMPT))), 1, 2)
    save.is_counted = True
    with pytest.raises(StorageError):
        save.seal()
    assert save.is_promised


def test_a_manifest_whose_fsync_fails_is_taken_back(tmp_path: Path) -> None:
    save = unsealed(PosixStore(tmp_path, calls=Failing(names.MANIFEST)), 0, 1)
    save.seal()
    with pytest.raises(StorageError):
        save.commit([save.entry])
    assert not Catalog(tmp_path).steps()
    assert not save.is_promised


def test_files_stay_where_nobody_can_tell_whether_a_manifest_names_them(tmp_path: Path) -> None:
    class Stuck(Failing):
        def unlink(self, name: str, dir_fd: int) -> None:
            if name == names.MANIFEST:
                raise OSError(5, "Input/output error")
            super().unlink(name, dir_fd)

    save = unsealed(PosixStore(tmp_path, calls=Stuck(names.MANIFEST)), 0, 1)
    save.seal()
    with pytest.raises(StorageError):
        save.commit([save.entry])
    assert save.is_promised


def test_a_manifest_that_is_set_aside_while_a_member_looks_is_found(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 2)

    class Slow(Calls):
        """Between the two looks, retention comes by."""

        def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
            if name == names.MANIFEST and (Catalog(tmp_path).dir(STEP) / name).exists():
                assert Catalog(tmp_path).set_aside(STEP, Catalog(tmp_path).key(STEP, names.pruned_manifest()))
            return super().open(name, flags, dir_fd)

    store = PosixStore(tmp_path, calls=Slow())
    member = Member(sealed(tmp_path, 1, 2), Terms(store, ATTEMPT, 2, 60.0), has_locks=True)
    assert commit.poll(is_orphan=False)
    assert member.poll(is_orphan=False)


def test_the_deadline_names_the_missing_ranks_and_what_they_did_instead(tmp_path: Path) -> None:
    commit = coordinator(tmp_path, 4, deadline_s=-1.0)
    sealed(tmp_path, 1, 4)
    other = tmp_path / names.step_dir(9) / names.seal(2, ATTEMPT)
    other.parent.mkdir()
    other.touch()
    with pytest.raises(DeadlineError, match=r"ranks 2-3 of 4 did not seal it .* \(rank 2 has sealed step 9"):
        commit.poll(is_orphan=False)


def test_a_keeper_that_is_gone_ends_the_wait_long_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillframe.keeper.commit._LOOK_AT_LOCKS_S", 0.0)
    lock = RootLock(PosixStore(tmp_path), 1, ATTEMPT)
    lock.acquire()
    commit = coordinator(tmp_path, 2)
    assert life_of(PosixStore(tmp_path), 1, ATTEMPT) is Life.ALIVE
    assert not commit.poll(is_orphan=False)
    assert not commit.poll(is_orphan=False)
    lock.release()
    assert life_of(PosixStore(tmp_path), 1, ATTEMPT) is Life.GONE
    assert not commit.poll(is_orphan=False)  # its seal may have come between the listing and this look
    assert not commit.poll(is_orphan=False)  # its trainer may start another and save the step yet
    monkeypatch.setattr("stillframe.keeper.commit._ABSENT_S", -1.0)
    with pytest.raises(KeeperError, match="rank 1 ended without saving it; every rank must save the same steps"):
        commit.poll(is_orphan=False)
    (Catalog(tmp_path).dir(STEP) / (names.segment(1, ATTEMPT) + ".00000000.partial")).touch()
    with pytest.raises(KeeperError, match="rank 1 ended before sealing it"):
        commit.poll(is_orphan=False)


def test_a_seal_that_comes_with_the_end_of_its_keeper_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillframe.keeper.commit._LOOK_AT_LOCKS_S", 0.0)
    lock = RootLock(PosixStore(tmp_path), 1, ATTEMPT)
    lock.acquire()
    lock.release()
    commit = coordinator(tmp_path, 2)
    assert not commit.poll(is_orphan=False)
    sealed(tmp_path, 1, 2)
    assert commit.poll(is_orphan=False)


def test_a_lock_of_another_attempt_says_nothing(tmp_path: Path) -> None:
    assert life_of(PosixStore(tmp_path), 1, ATTEMPT) is Life.UNKNOWN
    RootLock(PosixStore(tmp_path), 1, "ffffffff").acquire()
    assert life_of(PosixStore(tmp_path), 1, ATTEMPT) is Life.UNKNOWN


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
