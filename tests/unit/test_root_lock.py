"""One writer per root, whatever happens to the file that is locked."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from stillframe import BusyError
from stillframe.checkpoint import lock as locks
from stillframe.checkpoint.lock import Life, Note, RootLock, life_of, owner_of
from stillframe.format import names
from stillframe.link import liveness
from stillframe.link.liveness import Pulse
from stillframe.store.calls import Calls
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


NO_NOTES = [
    b"\xff\xfe",
    b'{"pid":',
    b"[" * 4096,
    b'{"of tomorrow":' + b"[" * 4000,
    b"\x00" * 4096,
    b"1",
    b'{"pid":"x"}',
]


@pytest.mark.parametrize("note", NO_NOTES, ids=lambda note: repr(note[:16]))
def test_whatever_stands_in_the_file_the_lock_can_be_had(store: PosixStore, tmp_path: Path, note: bytes) -> None:
    """One byte that was not UTF-8 kept every later run from saving."""
    acquired(store).release()
    (tmp_path / names.lock(0)).write_bytes(note)
    assert owner_of(store, 0) is None
    assert life_of(store, 0, RUN) is Life.UNKNOWN
    acquired(store, OTHER).release()


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


# --- the note ------------------------------------------------------------------------------------


class Turns:
    """In the place of ``time``: each turn of waiting does something, and takes no time."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self._turn = turn
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self._turn()


class Finishing:
    """A keeper without a trainer; each word is a beat, in this operation."""

    def __init__(self, store: PosixStore) -> None:
        self._beats = itertools.count(1)
        self.operation = 0
        self.lock = RootLock(store, 0, RUN, self._says)
        self.lock.acquire()

    def _says(self) -> Note:
        return Note("finishing", pulse=Pulse(next(self._beats), self.operation, f"in fsync of file-{self.operation}"))


def test_a_keeper_that_finishes_is_waited_for_as_long_as_it_gets_on(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, told = Finishing(store), list[str]()

    def turn() -> None:
        before.operation += 1
        if turns.slept_s < 3 * liveness.HANG_S:
            before.lock.note()
        else:
            before.lock.release()

    turns = Turns(turn)
    monkeypatch.setattr(locks, "time", turns)
    RootLock(store, 0, OTHER, tell=told.append).acquire()
    assert f"the keeper of the run before (pid {os.getpid()} on {socket.gethostname()}): it is in fsync of" in told[0]
    assert turns.slept_s / 15 < len(told) < turns.slept_s / 5, "people are told every few seconds"


def test_a_keeper_that_says_nothing_more_is_given_up(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Finishing(store)
    turns = Turns(lambda: None)
    monkeypatch.setattr(locks, "time", turns)
    with pytest.raises(BusyError, match=rf"\(pid {os.getpid()} on .* nothing for 300.* last in fsync of file-0"):
        acquired(store, OTHER)
    assert turns.slept_s >= liveness.STALL_S
    before.lock.release()


def test_a_keeper_that_hangs_in_one_operation_is_given_up(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Finishing(store)
    before.operation = 7
    monkeypatch.setattr(locks, "time", Turns(before.lock.note))
    with pytest.raises(
        BusyError, match=rf"\(pid {os.getpid()} on .* hangs in one storage operation: in fsync of file-7"
    ):
        acquired(store, OTHER)
    before.lock.release()


def test_what_was_said_later_stands_whoever_writes_last(store: PosixStore) -> None:
    """One thread is about to note a failure when another learns that the trainer is gone."""
    state: list[Literal["training", "finishing"]] = ["training"]
    is_asked, go_on = threading.Event(), threading.Event()

    def says() -> Note:
        said = Note(state[0])
        if threading.current_thread() is slow:
            is_asked.set()
            assert go_on.wait(30)
        return said

    lock = RootLock(store, 0, RUN, says)
    slow = threading.Thread(target=lock.note)
    lock.acquire()
    slow.start()
    assert is_asked.wait(30)
    state[0] = "finishing"
    later = threading.Thread(target=lock.note)
    later.start()
    go_on.set()
    slow.join()
    later.join()
    owner = owner_of(store, 0)
    assert owner is not None
    assert owner.state == "finishing"
    lock.release()


def test_a_note_can_be_read_after_every_call_that_writes_it(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = ["x" * 1000]
    lock = RootLock(store, 0, RUN, lambda: Note("finishing", failure[0]))
    lock.acquire()
    failure[0] = ""
    real, seen = Calls.pwrite, []

    def pwrite(self: Calls, fd: int, data: memoryview, offset: int) -> int:
        count = real(self, fd, data, offset)
        seen.append(owner_of(PosixStore(store.where()), 0))
        return count

    monkeypatch.setattr(Calls, "pwrite", pwrite)
    lock.note()
    assert [owner and (owner.state, owner.failure) for owner in seen] == [("finishing", "")]
    lock.release()
