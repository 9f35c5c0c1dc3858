"""Removing by hand on any store: with locks, without, with locks that hold on one node; beside a run and without."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stillframe import BusyError, Catalog, Checkpointer, ConfigError, KeepLast, NotFoundError
from stillframe.checkpoint import epochs, removal, requests
from stillframe.checkpoint.lock import Owner, RootLock
from stillframe.checkpoint.requests import Presence, presence
from stillframe.format import names
from stillframe.format.epochs import Answer, Request, encode_answer, encode_request
from stillframe.keeper import requests as desks
from stillframe.keeper.requests import RequestDesk
from stillframe.keeper.retention import Pruner
from stillframe.model import SaveId
from stillframe.retention import encode_policy
from stillframe.store.calls import Calls
from stillframe.store.memory import MemoryBackend, MemoryStore
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Store

STEPS = [1, 2, 3, 4]


class Lockless(Calls):
    def lock(self, fd: int, is_shared: bool) -> None:
        raise OSError(37, "No locks available")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("requests") / "r"
    with Checkpointer(root, arena="64MiB") as checkpointer:
        for step in STEPS:
            checkpointer.save(step, {"w": torch.full((100,), float(step))})
            checkpointer.wait()
    return root


def in_memory(root: Path, _to: Path) -> Store:
    backend = MemoryBackend()
    for place, _, found in os.walk(root):
        for name in found:
            path = Path(place, name)
            backend.blobs[str(path.relative_to(root))] = path.read_bytes()
    return MemoryStore(backend)


def copied(root: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(root, to / "r"))


def without_locks(root: Path, to: Path) -> Store:
    return PosixStore(copied(root, to), calls=Lockless())


STORES: dict[str, Callable[[Path, Path], Store]] = {"memory": in_memory, "a directory without locks": without_locks}


@pytest.fixture(params=STORES)
def catalog(made: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """In a store without locks."""
    monkeypatch.setattr(desks, "_PERIOD_S", 0.02)
    return Catalog(STORES[request.param](made, tmp_path))


@pytest.fixture
def locked(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """In a directory with locks."""
    monkeypatch.setattr(desks, "_PERIOD_S", 0.02)
    return Catalog(copied(made, tmp_path))


class Living:
    """The part of rank 0's keeper that answers, in an epoch of its own."""

    def __init__(self, catalog: Catalog) -> None:
        self.epoch = epochs.claim(catalog, "0123abcd", 0)
        pruner = Pruner(catalog, None, 0, True, lambda: self.epoch)
        self.desk = RequestDesk(catalog, pruner, lambda: self.epoch, threading.Lock())

    def __enter__(self) -> Living:
        self.desk.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.desk.close()


def asked(catalog: Catalog) -> list[str]:
    return [name for name in catalog.store.list(names.RUN) if names.parse_asked(name)]


# --- where locks tell nothing ------------------------------------------------------------------


def test_without_an_answer_an_epoch_is_claimed(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.2)
    before = catalog.epochs()
    assert presence(catalog.store) is Presence.NO_LOCKS
    done = requests.prune(catalog, KeepLast(2))
    assert [each.save.step for each in done.gone] == [1, 2]
    assert catalog.steps() == [3, 4]
    assert len(catalog.epochs()) == len(before) + 1
    assert asked(catalog) == []
    catalog.pin(3)
    assert requests.prune(catalog, KeepLast(1)).gone == []
    with pytest.raises(ConfigError, match="pinned"):
        catalog.delete(3)
    catalog.unpin(3)
    catalog.delete(3)
    assert catalog.steps() == [4]


def test_a_run_that_answers_carries_it_out(catalog: Catalog) -> None:
    with Living(catalog) as living:
        done = requests.prune(catalog, KeepLast(2))
        assert [each.save.step for each in done.gone] == [1, 2]
        catalog.delete(3)
        assert catalog.steps() == [4]
        assert max(catalog.epochs()) == living.epoch
        assert asked(catalog) == []


def test_a_long_removal_is_waited_for(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it takes longer than an answer may; the run says that it goes on."""
    monkeypatch.setattr(requests, "ANSWER_S", 0.5)

    def slowly(*given: object) -> str:
        time.sleep(0.3)
        return remove(*given)  # type: ignore[arg-type]

    remove = removal.remove
    monkeypatch.setattr(removal, "remove", slowly)
    with Living(catalog) as living:
        done = requests.prune(catalog, KeepLast(1))
        assert [each.save.step for each in done.gone] == [1, 2, 3]
        assert max(catalog.epochs()) == living.epoch


def test_a_run_that_was_taken_over_removes_nothing_and_says_so(catalog: Catalog) -> None:
    with Living(catalog):
        epochs.claim(catalog, "ffffffff", 0)
        done = requests.prune(catalog, KeepLast(1))
    assert isinstance(done.error, BusyError)
    assert done.gone == []
    assert catalog.steps() == STEPS


def test_an_old_request_is_left_alone_and_a_very_old_one_removed(catalog: Catalog) -> None:
    living = Living(catalog)
    for ticket, age_s in (("00000001", 300.0), ("00000002", 7200.0), ("00000003", -300.0)):
        request = Request(ticket, time.time() - age_s, [], encode_policy(KeepLast(1)))
        catalog.store.put(names.request(ticket), encode_request(request))
    catalog.store.put(names.request("00000004"), b"{}")
    catalog.store.put(names.answer("00000005"), encode_answer(Answer("00000005", True, [], [])))
    living.desk.look()
    assert sorted(asked(catalog)) == ["request-00000001.json", "request-00000003.json", "request-00000004.json"]
    assert catalog.steps() == STEPS


def test_a_request_is_carried_out_once(catalog: Catalog) -> None:
    living = Living(catalog)
    (save, *_) = catalog.look().saves
    catalog.store.put(names.request("00000001"), encode_request(Request("00000001", time.time(), [save])))
    living.desk.look()
    assert catalog.steps() == [2, 3, 4]
    assert sorted(asked(catalog)) == ["answer-00000001.json", "request-00000001.json"]
    data = requests._read_answer(catalog.store, "00000001")
    living.desk.look()
    assert requests._read_answer(catalog.store, "00000001") == data
    assert data is not None
    assert [each.save for each in data.gone] == [save]


def test_what_is_no_checkpoint_is_not_removed_by_request(catalog: Catalog) -> None:
    """A save under way: were it set aside, its run would report a checkpoint that is none."""
    living = Living(catalog)
    save = SaveId(5, living.epoch)
    catalog.store.put(names.key(save, names.seal(0)), b"under way")
    catalog.store.put(names.request("00000001"), encode_request(Request("00000001", time.time(), [save])))
    living.desk.look()
    data = requests._read_answer(catalog.store, "00000001")
    assert data is not None
    assert [(each.save, each.why) for each in data.stays] == [(save, "it is no checkpoint")]
    assert catalog.aside(save) is None


# --- where locks tell --------------------------------------------------------------------------


def test_nobody_is_waited_for_where_the_lock_is_free(locked: Catalog) -> None:
    assert presence(locked.store) is Presence.NOBODY
    began = time.monotonic()
    requests.prune(locked, KeepLast(2))
    assert time.monotonic() - began < 2
    assert locked.steps() == [3, 4]


def test_a_held_lock_without_an_answer_is_respected(locked: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.2)
    lock = RootLock(PosixStore(locked.root), 0, "0123abcd")
    lock.acquire()
    before = locked.epochs()
    with pytest.raises(BusyError, match=f"process {os.getpid()}.* has not answered"):
        requests.prune(locked, KeepLast(2))
    assert locked.epochs() == before
    assert asked(locked) == []
    assert locked.steps() == STEPS
    lock.release()


def test_a_run_that_ends_while_it_is_asked(locked: Catalog) -> None:
    lock = RootLock(PosixStore(locked.root), 0, "0123abcd")
    lock.acquire()
    threading.Timer(0.5, lock.release).start()
    requests.prune(locked, KeepLast(2))
    assert locked.steps() == [3, 4]


@pytest.fixture
def elsewhere(locked: Catalog, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """The lock is free, and was held last by a keeper of another node: it may be held there still."""
    import msgspec

    owner = Owner(1, "another-node", "0123abcd", "training")
    (Path(locked.root) / names.lock(0)).write_bytes(msgspec.json.encode(owner))
    monkeypatch.setattr(requests, "ELSEWHERE_S", 0.3)
    return locked


def test_a_lock_that_holds_on_another_node_only(elsewhere: Catalog) -> None:
    assert presence(elsewhere.store) is Presence.ELSEWHERE
    with Living(elsewhere) as living:
        requests.prune(elsewhere, KeepLast(2))
        assert max(elsewhere.epochs()) == living.epoch, "the run was asked, and not superseded"
    requests.prune(elsewhere, KeepLast(1))
    assert elsewhere.steps() == [4]
    assert max(elsewhere.epochs()) > living.epoch


# --- pins against removals ---------------------------------------------------------------------


def test_a_pin_that_comes_before_the_tombstone_wins(catalog: Catalog) -> None:
    save = catalog.find(2)
    epoch = epochs.claim(catalog, "0123abcd", 0)
    catalog.pin(2)
    assert removal.set_aside(catalog, save, "pruned", epoch) == removal.PINNED
    assert catalog.is_committed(save)


def test_who_pins_what_is_pinned_writes_nothing(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who may only read can ask for it."""
    catalog.pin(2)
    monkeypatch.setattr(catalog.store, "put", lambda *_, **__: pytest.fail("something was written"))
    catalog.pin(2)


def test_a_pin_that_comes_after_the_tombstone_is_refused(catalog: Catalog) -> None:
    save = catalog.find(2)
    epoch = epochs.claim(catalog, "0123abcd", 0)
    original = catalog.find

    def late(step: int) -> object:
        found = original(step)
        assert removal.set_aside(catalog, save, "pruned", epoch) == ""
        return found

    catalog.find = late  # type: ignore[method-assign, assignment]
    with pytest.raises(NotFoundError, match="being removed"):
        catalog.pin(2)
    assert not removal.is_pinned(catalog, save)


# --- the keeper's side -------------------------------------------------------------------------


def test_a_member_waits_until_rank_0_has_made_sure(locked: Catalog) -> None:
    """Rank 0 puts the tombstone, and may find that a later run has begun: then it withdraws it."""
    member = Pruner(locked, KeepLast(1), 1, False, lambda: 1)
    for step in STEPS:
        member._own.add(locked.find(step))
    save = locked.find(1)
    segment = Path(locked.dir(save)) / names.segment(1)
    segment.write_bytes(b"of rank 1")
    removal.set_aside(locked, save, "pruned", max(locked.epochs()))
    member.tidy()
    assert segment.exists()
    locked.store.delete([locked.commit_key(save)])
    member.tidy()
    assert not segment.exists()
