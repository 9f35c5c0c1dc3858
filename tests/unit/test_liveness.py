"""How long a keeper is waited for: pure judgement, and what a process can say of its own storage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stillframe.link import liveness, messages
from stillframe.link.liveness import Patience, Pulse
from stillframe.store.activity import _WATCHED, Activity, WatchedCalls
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 2.0)
    monkeypatch.setattr(liveness, "STALL_S", 10.0)
    monkeypatch.setattr(liveness, "HANG_S", 30.0)


def test_who_beats_and_gets_on_is_never_given_up() -> None:
    patience = Patience()
    for beat in range(1, 1000):
        patience.heard(Pulse(beat, operation=beat // 10))
        patience.waited(2.0)
        assert not patience.verdict


def test_who_waits_for_other_ranks_is_in_no_operation_and_never_given_up() -> None:
    patience = Patience()
    for beat in range(1, 1000):
        patience.heard(Pulse(beat))
        assert not patience.verdict


def test_who_says_nothing_is_given_up_with_its_last_words() -> None:
    patience = Patience()
    patience.heard(Pulse(1, 7, "in fsync of x for 3 s"))
    for _ in range(4):
        patience.waited(2.0)
        patience.heard(Pulse(1, 7, "in fsync of x for 3 s"))  # read once more from a file
    assert not patience.verdict
    patience.waited(2.0)
    assert "nothing for 10 s; it was last in fsync of x for 3 s" in patience.verdict
    patience.heard()
    assert not patience.verdict


def test_who_does_not_get_out_of_one_operation_is_given_up_by_beats_whether_all_were_heard_or_not() -> None:
    patience = Patience()
    for beat in (1, 2, 9, 15):
        assert not patience.verdict
        patience.heard(Pulse(beat, 7, f"beat {beat}"))
    assert not patience.verdict
    patience.heard(Pulse(16, 7, "in fsync of x for 32 s"))
    assert "hangs in one storage operation: in fsync of x for 32 s" in patience.verdict
    patience.heard(Pulse(17, 8))
    assert not patience.verdict


def test_every_call_of_the_store_that_may_wait_is_watched() -> None:
    calls = {name for name in vars(Calls) if not name.startswith("_")}
    assert calls - set(_WATCHED) == {"dup", "set_buffered"}, "these touch no storage"


def test_a_store_says_what_each_thread_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity()
    store = PosixStore(tmp_path, calls=WatchedCalls(activity))
    store.put("some/first", b"")  # from here on the directories above are durable
    entered, go_on = threading.Event(), threading.Event()
    real = Calls.fsync

    def fsync(self: Calls, fd: int) -> None:
        entered.set()
        assert go_on.wait(30)
        real(self, fd)

    monkeypatch.setattr(Calls, "fsync", fsync)
    writing = threading.Thread(target=store.put, args=("some/key", b"x"))
    writing.start()
    assert entered.wait(30)
    assert store.head("other") is None, "another thread goes on"
    oldest = activity.oldest()
    assert oldest is not None
    assert oldest.describe().startswith(f"in fsync of {tmp_path}/some/key.")
    go_on.set()
    writing.join()
    assert activity.oldest() is None
    with pytest.raises(IsADirectoryError):
        store.calls.open(str(tmp_path), 1)
    assert activity.oldest() is None, "a call that failed is over, too"


def test_the_build_changes_with_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    before = messages.build()
    assert before == messages.build()
    monkeypatch.setattr(messages.Chunk, "__annotations__", {**messages.Chunk.__annotations__, "codec": "str"})
    assert messages.build() != before
