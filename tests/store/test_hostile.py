"""A root that somebody has prepared against us: nothing outside changes, nothing hangs, and the answer is clear."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stillframe.errors import StorageError
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Missing, NotOurs
from tests.store.recording import Op
from tests.store.support import SPARE, FaultyCalls, small_blobs_reused

TIMEOUT_S = 10
STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mknod and chown need root")


class Place:
    """A root, a directory outside it, and what the outside was like."""

    def __init__(self, top: Path) -> None:
        self.root, self.outside = top / "root", top / "outside"
        (self.root / "d").mkdir(parents=True)
        (self.outside / "sub").mkdir(parents=True)
        (self.outside / "file").write_bytes(b"o" * 5000)
        (self.outside / "sub" / "x").write_bytes(b"p" * 5000)
        self.store = PosixStore(self.root, spare=SPARE)

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in [self.outside, *sorted(self.outside.rglob("*"))]:
            info = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(info.st_mode) else None
            found[str(path)] = info.st_mode, info.st_mtime_ns, info.st_size, info.st_uid, content
        return found


def _symlink(place: Place, path: Path) -> None:
    path.symlink_to(place.outside / "file")


def _directory_link(place: Place, path: Path) -> None:
    path.symlink_to(place.outside / "sub")


def _dangling(place: Place, path: Path) -> None:
    path.symlink_to(place.outside / "new")


def _hard_link(place: Place, path: Path) -> None:
    path.hardlink_to(place.outside / "file")


def _fifo(place: Place, path: Path) -> None:
    os.mkfifo(path)


def _device(place: Place, path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


def _directory(place: Place, path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"i")


def _another_users(place: Place, path: Path) -> None:
    path.write_bytes(b"s" * 5000)
    os.chown(path, STRANGER, STRANGER)


THINGS = [
    pytest.param(_symlink, id="symlink"),
    pytest.param(_directory_link, id="link to a directory"),
    pytest.param(_dangling, id="dangling link"),
    pytest.param(_hard_link, id="hard link"),
    pytest.param(_fifo, id="fifo"),
    pytest.param(_device, id="device", marks=needs_root),
    pytest.param(_directory, id="directory"),
    pytest.param(_another_users, id="another user's file", marks=needs_root),
]


def _write(store: PosixStore, key: str) -> None:
    Op(0, "write", key, b"w" * 9000).perform(store)


def _abort(store: PosixStore, key: str) -> None:
    Op(0, "abort", key, b"w" * 9000).perform(store)


def _rename_from(store: PosixStore, key: str) -> None:
    store.rename(key, "renamed")


def _rename_to(store: PosixStore, key: str) -> None:
    store.put("source", b"s")
    store.rename("source", key)


VERBS: dict[str, Callable[[PosixStore, str], object]] = {
    "put": lambda store, key: store.put(key, b"new"),
    "put_new": lambda store, key: store.put_new(key, b"o" * 5000),
    "write": _write,
    "abort": _abort,
    "read": lambda store, key: store.read(key, 0, memoryview(bytearray(8192))),
    "head": lambda store, key: store.head(key),
    "list": lambda store, key: list(store.list(key)),
    "delete": lambda store, key: store.delete([key]),
    "append": lambda store, key: store.append(key, b"more"),
    "rename from": _rename_from,
    "rename to": _rename_to,
}


def answer_of(call: Callable[[], object]) -> object:
    """What it returned, or the error that it raised; it must do one of them in time."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert found, "it hangs"
    assert isinstance(found[0], StorageError) or not isinstance(found[0], BaseException), repr(found[0])
    return found[0]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("make", THINGS)
def test_in_place_of_a_file(tmp_path: Path, make: Callable[[Place, Path], None], verb: str) -> None:
    place = Place(tmp_path)
    make(place, place.root / "d" / "key")
    before = place.snapshot()
    is_file = make in (_hard_link, _another_users)
    answer = answer_of(lambda: VERBS[verb](place.store, "d/key"))
    assert place.snapshot() == before
    if verb == "read":
        assert answer == 5000 if is_file else isinstance(answer, NotOurs)
    elif verb == "append":
        assert isinstance(answer, NotOurs)
    elif verb == "head":
        assert answer is not None
        assert getattr(answer, "is_ours", None) is is_file
    elif verb == "put_new":
        assert answer is (make is _hard_link) if is_file else isinstance(answer, NotOurs)
    elif verb in ("put", "write", "delete", "rename to") and make is not _directory:
        assert answer is None
        left = os.path.lexists(place.root / "d" / "key")
        assert left == (verb != "delete")
        if left:
            found = (place.root / "d" / "key").lstat()
            assert stat.S_ISREG(found.st_mode)
            assert (found.st_nlink, found.st_uid) == (1, os.geteuid())
    elif verb in ("put", "write", "delete"):
        assert isinstance(answer, NotOurs)
    place.store.close()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("make", THINGS)
def test_in_place_of_a_directory(tmp_path: Path, make: Callable[[Place, Path], None], verb: str) -> None:
    place = Place(tmp_path)
    make(place, place.root / "e")
    before = place.snapshot()
    for key in ("e/x", "e/inside/x"):
        answer = answer_of(lambda key=key: VERBS[verb](place.store, key))  # type: ignore[misc]
        assert place.snapshot() == before
        if make is not _directory and not (verb == "rename from" and isinstance(answer, Missing)):
            assert isinstance(answer, NotOurs), answer
    place.store.close()


@pytest.mark.parametrize("make", THINGS)
def test_in_place_of_the_spare(tmp_path: Path, make: Callable[[Place, Path], None]) -> None:
    place = Place(tmp_path)
    make(place, place.root / SPARE)
    before = place.snapshot()
    with small_blobs_reused():
        assert answer_of(lambda: _write(place.store, "d/blob")) is None
        assert (place.root / "d" / "blob").read_bytes() == b"w" * 9000
        assert answer_of(lambda: place.store.delete(["d/blob"])) is None
        assert not (place.root / "d").exists()
        answer_of(place.store.close)
    assert place.snapshot() == before


@pytest.mark.parametrize("make", THINGS)
def test_a_thing_that_is_removed_is_not_kept_as_the_spare(tmp_path: Path, make: Callable[[Place, Path], None]) -> None:
    place = Place(tmp_path)
    make(place, place.root / "d" / "key")
    before = place.snapshot()
    with small_blobs_reused():
        place.store = PosixStore(place.root, spare=SPARE, calls=FaultyCalls())
        answer_of(lambda: place.store.delete(["d/key"]))
        assert not os.path.lexists(place.root / SPARE)
        assert answer_of(lambda: _write(place.store, "d/blob")) is None
    assert place.snapshot() == before
    place.store.close()


def test_a_link_in_the_roots_own_path_is_the_users_word(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "alias").symlink_to(place.root)
    store = PosixStore(tmp_path / "alias")
    store.put("d/key", b"x")
    assert (place.root / "d" / "key").read_bytes() == b"x"
    store.close()
