"""Deleting with several ranks: rank 0 decides, each removes its own, and nothing that may still count goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe import Catalog
from stillframe.checkpoint.lock import RootLock
from stillframe.format import names
from stillframe.format.records import Manifest, RankEntry, encode_manifest
from stillframe.keeper.retention import Pruner, remove_spares, sweep
from stillframe.retention import Keep, KeepLast
from stillframe.store.posix import PosixStore

ATTEMPT = "0123abcd"
OTHER = "ffffffff"


def files(root: Path, step: int) -> set[str]:
    path = Catalog(root).dir(step)
    return {each.name for each in path.iterdir()} if path.exists() else set()


def rank_files(rank: int, attempt: str = ATTEMPT) -> set[str]:
    return {names.segment(rank, attempt), names.seal(rank, attempt)}


def write(root: Path, step: int, *ranks: int, attempt: str = ATTEMPT) -> None:
    Catalog(root).dir(step).mkdir(exist_ok=True)
    for rank in ranks:
        for name in rank_files(rank, attempt):
            (Catalog(root).dir(step) / name).write_bytes(b"x")


def commit(root: Path, step: int, attempt: str = ATTEMPT, rank: int | None = None) -> None:
    entry = RankEntry(rank or 0, names.segment(rank or 0, attempt), 1, names.seal(rank or 0, attempt), "0" * 32)
    manifest = Manifest(step, attempt, 1 if rank is None else rank + 1, 0.0, 0.0, 0.0, [entry], rank)
    (Catalog(root).dir(step) / names.manifest(rank)).write_bytes(encode_manifest(manifest))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        write(tmp_path, step, 0, 1)
        commit(tmp_path, step)
    return tmp_path


def pruner(root: Path, rank: int, keep: Keep | None = None, unshared: bool = False) -> Pruner:
    catalog = Catalog(root, rank if unshared else None)
    return Pruner(catalog, keep or KeepLast(1), rank, ATTEMPT, is_alone=False)


def test_rank_0_takes_the_manifest_and_its_own_files_the_others_theirs(root: Path) -> None:
    first, member = pruner(root, 0), pruner(root, 1)
    first._own.add(1)
    for step in (1, 2):
        member.committed(step, None)
    assert files(root, 1) > rank_files(1)  # its manifest is still there
    first.committed(2, None)
    assert files(root, 1) == rank_files(1) | {names.pruned_manifest()}
    assert not Catalog(root).is_committed(1)
    assert member.has_work
    member.tidy()
    assert files(root, 1) == {names.pruned_manifest()}
    first.committed(2, None)
    assert not Catalog(root).dir(1).exists()
    assert files(root, 2) == rank_files(0) | rank_files(1) | {names.MANIFEST}


def test_what_a_rank_has_left_behind_rank_0_removes_in_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pruner(root, 0)
    first._own.add(1)
    for _ in range(3):
        first.committed(2, None)
        assert files(root, 1) == rank_files(1) | {names.pruned_manifest()}
    monkeypatch.setattr("stillframe.keeper.retention._OVERDUE_S", -1.0)
    first.committed(2, None)
    assert files(root, 1) == set()


def test_a_member_removes_nothing_that_its_policy_keeps(root: Path) -> None:
    """Somebody has removed a manifest by hand: that is no reason to remove more."""
    member = pruner(root, 1, KeepLast(2))
    for step in (1, 2):
        (Catalog(root).dir(step) / names.MANIFEST).unlink()
        member.committed(step, None)
    assert files(root, 1) == files(root, 2) == rank_files(0) | rank_files(1)


def test_a_member_removes_nothing_of_a_damaged_checkpoint(root: Path) -> None:
    member = pruner(root, 1)
    Catalog(root).mark_damaged(1)
    for step in (1, 2):
        member.committed(step, None)
    assert files(root, 1) >= rank_files(1)


def test_a_checkpoint_of_an_earlier_run_goes_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 1, 2, attempt=OTHER)
    commit(tmp_path, 1, OTHER)
    write(tmp_path, 2, 0, 1)
    commit(tmp_path, 2)
    pruner(tmp_path, 0).committed(2, None)
    assert files(tmp_path, 1) == set()


def test_where_roots_are_not_shared_nothing_goes_that_another_rank_may_lack(tmp_path: Path) -> None:
    own = pruner(tmp_path, 1, unshared=True)
    for step in (1, 2, 3):
        write(tmp_path, step, 0, 1)
        commit(tmp_path, step, rank=0)
        commit(tmp_path, step, rank=1)
        own.committed(step, -1)
    assert Catalog(tmp_path, 1).steps() == [1, 2, 3]
    own.committed(3, 2)
    assert Catalog(tmp_path, 1).steps() == [2, 3]
    assert Catalog(tmp_path, 0).steps() == [1, 2, 3]
    assert files(tmp_path, 1) == rank_files(0) | {names.manifest(0)}


def test_a_sweep_leaves_the_files_of_keepers_that_live(tmp_path: Path) -> None:
    write(tmp_path, 5, 0, 1, 2, attempt=OTHER)
    write(tmp_path, 5, 1)
    living, dead = RootLock(PosixStore(tmp_path), 1, OTHER), RootLock(PosixStore(tmp_path), 2, ATTEMPT)
    living.acquire()
    dead.acquire()
    assert sweep(Catalog(tmp_path), ATTEMPT, "partial")  # there are such
    assert files(tmp_path, 5) == rank_files(1, OTHER) | rank_files(1)
    living.release()
    assert not sweep(Catalog(tmp_path), ATTEMPT, "nothing")
    assert files(tmp_path, 5) == rank_files(1)


def test_a_sweep_of_the_same_attempt_leaves_what_may_be_counted_on(tmp_path: Path) -> None:
    write(tmp_path, 5, 0)
    partial = Catalog(tmp_path).dir(5) / (names.segment(0, ATTEMPT) + ".00000000.partial")
    partial.touch()
    sweep(Catalog(tmp_path), ATTEMPT, "nothing")
    assert files(tmp_path, 5) == rank_files(0) | {partial.name}
    sweep(Catalog(tmp_path), ATTEMPT, "partial")
    assert files(tmp_path, 5) == rank_files(0)
    sweep(Catalog(tmp_path), ATTEMPT, "all")
    assert files(tmp_path, 5) == set()


def test_a_sweep_leaves_checkpoints_of_ranks_that_did_not_share_the_root(tmp_path: Path) -> None:
    write(tmp_path, 5, 0, 1, attempt=OTHER)
    commit(tmp_path, 5, OTHER, rank=1)
    before = files(tmp_path, 5)
    sweep(Catalog(tmp_path), ATTEMPT, "partial")
    assert files(tmp_path, 5) == before


def test_spares_of_ranks_that_there_are_no_more_go(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / names.spare(rank)).touch()
        (tmp_path / f"{names.spare(rank)}.0123abcd.partial").touch()
    RootLock(PosixStore(tmp_path), 3, OTHER).acquire()
    remove_spares(Catalog(tmp_path), 1, 2)
    assert [rank for rank in range(4) if (tmp_path / f"{names.spare(rank)}.0123abcd.partial").exists()] == [0, 2, 3]
    remove_spares(Catalog(tmp_path), 0, 2)
    assert [rank for rank in range(4) if (tmp_path / names.spare(rank)).exists()] == [0, 1, 3]


def test_remains_of_a_damaged_step_go_but_not_what_is_being_saved_again(root: Path) -> None:
    Catalog(root).mark_damaged(1)
    write(root, 1, 1, attempt=OTHER)
    first = pruner(root, 0)
    first.committed(2, None)
    assert files(root, 1) == rank_files(0) | rank_files(1)  # another rank may be saving it again in this attempt


def test_what_has_just_been_committed_stays_whatever_its_number(root: Path) -> None:
    """Somebody has gone back and saves lower steps."""
    write(root, 0, 0, 1)
    commit(root, 0)
    pruner(root, 0).committed(0, None)
    assert Catalog(root).steps() == [0, 2]


def test_files_that_a_manifest_of_the_other_kind_names_are_left_alone(root: Path) -> None:
    write(root, 1, 1, attempt=OTHER)
    commit(root, 1, OTHER, rank=1)
    before = files(root, 1) - {names.MANIFEST}
    sweep(Catalog(root), ATTEMPT, "partial")
    pruner(root, 0).committed(2, None)
    assert files(root, 1) == before
