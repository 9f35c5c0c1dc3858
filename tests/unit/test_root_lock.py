"""One writer per root, whatever happens to the file that is locked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stillframe import BusyError
from stillframe.checkpoint import lock as locks
from stillframe.checkpoint.lock import Life, RootLock, life_of, owner_of
from stillframe.format import names
from stillframe.store.posix import PosixStore

RUN, OTHER = "0123abcd", "ffffffff"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PosixStore:
    monkeypatch.setattr(locks, "GRACE_S", 0.0)
    return PosixStore(tmp_path)


def acquired(store: PosixStore, run: str = RUN) -> RootLock:
    lock = RootLock(store, 0, run)
    lock.acquire()
    return lock


def test_a_second_run_is_kept_away(store: PosixStore) -> None:
    first = acquired(store)
    with pytest.raises(BusyError, match=str(os.getpid())):
        acquired(store, OTHER)
    assert not first.is_wanted
    first.release()
    assert acquired(store, OTHER).is_held


def test_a_copy_made_of_hard_links_and_its_original_are_both_locked_afresh(store: PosixStore, tmp_path: Path) -> None:
    acquired(store).release()
    path, copy = tmp_path / names.lock(0), tmp_path / "copy"
    os.link(path, copy)
    before = copy.read_bytes()
    lock = acquired(store, OTHER)
    assert copy.read_bytes() == before, "the other name's file is as it was"
    assert path.stat().st_nlink == 1
    owner = owner_of(store, 0)
    assert owner is not None
    assert owner.run == OTHER
    assert life_of(store, 0, OTHER) is Life.ALIVE
    with pytest.raises(BusyError):
        acquired(store)
    lock.release()


def test_a_living_owner_keeps_a_lock_with_a_second_name(store: PosixStore, tmp_path: Path) -> None:
    first = acquired(store)
    os.link(tmp_path / names.lock(0), tmp_path / "copy")
    with pytest.raises(BusyError):
        acquired(store, OTHER)
    first.release()


def test_a_lock_whose_file_was_removed_is_taken_again(store: PosixStore, tmp_path: Path) -> None:
    first = acquired(store)
    (tmp_path / names.lock(0)).unlink()
    assert first.is_wanted
    first.acquire()
    assert not first.is_wanted
    with pytest.raises(BusyError):
        acquired(store, OTHER)
    first.release()
