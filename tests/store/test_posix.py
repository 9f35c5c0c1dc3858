"""Single things that a file system does to a store, each injected."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stillframe.errors import StorageError
from stillframe.store.blob import aligned_buffer
from stillframe.store.calls import Calls
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import PARTIAL, Missing, read_all
from tests.store.recording import Op
from tests.store.support import SPARE, FaultyCalls, small_blobs_reused

DIRECT_BYTES = 64 << 10
"""Reads from this size on go past the page cache."""


class RefusesDirect(Calls):
    """Takes O_DIRECT at open and refuses it at every transfer, until the flag is cleared; all threads meet there."""

    def __init__(self, threads: int) -> None:
        self._meeting = threading.Barrier(threads)
        self._direct = True

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        return super().open(name, flags & ~os.O_DIRECT, dir_fd)

    def _refuse(self) -> None:
        if self._direct:
            self._meeting.wait(10)
            raise OSError(errno.EINVAL, "no direct I/O here")

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._refuse()
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._refuse()
        return super().pread(fd, into, offset)

    def set_buffered(self, fd: int) -> None:
        self._meeting.wait(10)  # all of them have been refused before the first knows why
        self._direct = False


def test_direct_io_refused_to_two_threads_at_once(tmp_path: Path) -> None:
    writer = PosixStore(tmp_path, calls=RefusesDirect(2)).writer("blob", 8192)
    errors: list[BaseException] = []

    def write(start: int) -> None:
        try:
            writer.write_at(memoryview(bytes([start // 4096]) * 4096), start)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 4096)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    writer.finish()
    assert (tmp_path / "blob").read_bytes() == bytes(4096) + b"\1" * 4096
    into = bytearray(DIRECT_BYTES)
    assert PosixStore(tmp_path, calls=RefusesDirect(1)).read("blob", 0, memoryview(into)) == 8192
    assert into[:8192] == bytes(4096) + b"\1" * 4096


@pytest.mark.parametrize("length", [1, 511, 1000, 4095, 4096, 4097, 5000])
def test_short_transfers_are_continued(tmp_path: Path, length: int) -> None:
    class Short(Calls):
        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            return super().pread(fd, into[:length], offset)

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return super().pwrite(fd, data[:length], offset)

        def append(self, fd: int, data: memoryview) -> int:
            return super().append(fd, data[:length])

    value = os.urandom(3 * 4096 + 17)
    store = PosixStore(tmp_path, calls=Short())
    store.put("small", value)
    Op(0, "write", "blob", value).perform(store)
    store.append("log", value)
    for key in ("small", "blob", "log"):
        assert (tmp_path / key).read_bytes() == value
        for size in (len(value), 4096, DIRECT_BYTES):
            into = memoryview(aligned_buffer(size))[:size]
            assert store.read(key, 0, into) == min(size, len(value))
            assert into[: len(value)] == value[:size]
    store.close()


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_a_claim_whose_reply_was_lost(tmp_path: Path, code: int, has_links: bool) -> None:
    class LostReply(FaultyCalls):
        def link(self, old: str, new: str, dir_fd: int) -> None:
            super().link(old, new, dir_fd)
            raise OSError(code, "injected")

        def rename_new(self, old: str, new: str, dir_fd: int) -> None:
            super().rename_new(old, new, dir_fd)
            raise OSError(code, "injected")

    store = PosixStore(tmp_path, calls=LostReply(has_links=has_links))
    if code == errno.EIO:
        with pytest.raises(StorageError):
            store.put_new("key", b"mine")
        store = PosixStore(tmp_path)
    assert store.put_new("key", b"mine"), "its own bytes are not recognised"
    assert not store.put_new("key", b"other")
    assert os.listdir(tmp_path) == ["key"]


def test_no_blob_is_reused_where_others_may_read_it(tmp_path: Path) -> None:
    with small_blobs_reused():
        remote = PosixStore(tmp_path, spare=SPARE, calls=FaultyCalls(is_local=False))
        Op(0, "write", "x", b"x" * 9000).perform(remote)
        remote.delete(["x"])
        assert os.listdir(tmp_path) == []
        local = PosixStore(tmp_path, spare=SPARE, calls=FaultyCalls())
        Op(0, "write", "x", b"x" * 9000).perform(local)
        local.delete(["x"])
        inode = (tmp_path / SPARE).stat().st_ino
        with open(tmp_path / SPARE, "rb") as reader:
            Op(0, "write", "y", b"y" * 9000).perform(remote)
            assert reader.read() == b"x" * 9000
        assert (tmp_path / "y").stat().st_ino != inode
        assert remote.caps.lands_late
        assert not local.caps.lands_late


@pytest.mark.parametrize(
    ("verb", "call"),
    [("write", "reserve"), *((verb, call) for verb in ("put", "put_new", "write") for call in ("pwrite", "fsync"))],
)
def test_a_full_disk_leaves_the_old_value_and_nothing_else(tmp_path: Path, verb: str, call: str) -> None:
    class Full(Calls):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if call == "pwrite" and offset >= 4096:
                raise OSError(errno.ENOSPC, "full")
            return super().pwrite(fd, data[:4096], offset)

        def fsync(self, fd: int) -> None:
            if call == "fsync":
                raise OSError(errno.ENOSPC, "full")

        def reserve(self, fd: int, size: int) -> None:
            if call == "reserve":
                raise OSError(errno.ENOSPC, "full")

    PosixStore(tmp_path).put("d/old", b"old")
    key = "d/new" if verb == "put_new" else "d/old"
    with pytest.raises(StorageError, match="free some space"):
        Op(0, verb, key, b"n" * 9000).perform(PosixStore(tmp_path, calls=Full()))
    assert os.listdir(tmp_path / "d") == ["old"]
    assert (tmp_path / "d" / "old").read_bytes() == b"old"


def test_a_root_that_does_not_exist(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "a" / "b" / "root", spare=SPARE)
    assert list(store.list()) == []
    assert store.head("d/x") is None
    store.delete(["d/x", "y"])
    assert not store.caps.lands_late or not PosixStore(tmp_path).caps.is_on_this_node
    store.close()
    assert os.listdir(tmp_path) == [], "reading and deleting have made something"
    store.put("d/x", b"x")
    assert read_all(PosixStore(tmp_path / "a" / "b" / "root"), "d/x", 10) == b"x"
    store.close()


def test_a_root_that_is_removed_under_a_store(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = PosixStore(root)
    store.put("d/x", b"x")
    writer = store.writer("d/y", 10)
    shutil.rmtree(root)
    assert store.head("d/x") is None
    assert list(store.list("d")) == []
    writer.write_at(memoryview(b"0123456789"), 0)
    with pytest.raises(StorageError):
        writer.finish()
    writer.abort()
    store.put("d/x", b"again")
    assert read_all(store, "d/x", 10) == b"again"
    store.close()


def test_a_writer_that_is_given_up_while_a_thread_writes(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    written: list[int] = []

    class Slow(Calls):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            reached.set()
            assert go_on.wait(10)
            written.append(os.fstat(fd).st_ino)
            return super().pwrite(fd, data, offset)

    store = PosixStore(tmp_path, calls=Slow())
    writer = store.writer("blob", 4)
    inode = next(tmp_path.iterdir()).stat().st_ino
    thread = threading.Thread(target=writer.write_at, args=(memoryview(b"blob"), 0))
    thread.start()
    assert reached.wait(10)
    writer.abort()
    others = [os.open(tmp_path / str(number), os.O_WRONLY | os.O_CREAT) for number in range(4)]
    go_on.set()
    thread.join()
    for fd in others:
        os.close(fd)
    assert set(written) == {inode}, "the descriptor became another file's"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(PARTIAL)]
    with pytest.raises(StorageError):
        writer.finish()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_fsync_is_not_forgotten(tmp_path: Path, failing: int) -> None:
    class FailsOnce(Calls):
        count = -1000

        def fsync(self, fd: int) -> None:
            self.count += 1
            if self.count == failing:
                raise OSError(errno.EIO, "injected")
            super().fsync(fd)

    calls = FailsOnce()
    store = PosixStore(tmp_path, calls=calls)
    writer = store.writer("blob", 4)
    writer.write_at(memoryview(b"blob"), 0)
    calls.count = 0  # the next is the file's, and then the directory's
    for _ in range(2):
        with pytest.raises(StorageError):
            writer.finish()
    writer.abort()
    assert os.listdir(tmp_path) == ([] if failing == 1 else ["blob"])
    store.close()


def test_descriptors_do_not_add_up(tmp_path: Path) -> None:
    store = PosixStore(tmp_path, spare=SPARE)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        store.put(f"d{number}/x", b"x")
        Op(0, "write", f"d{number}/y", b"y" * 5000).perform(store)
        store.put_new(f"d{number}/x", b"other")
        store.delete([f"d{number}/y"])
    assert len(os.listdir("/proc/self/fd")) <= before + 16
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before


# --- descriptors -------------------------------------------------------------------------------


class FewDescriptors(Calls):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held: set[int] = set()

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        return self._hold(lambda: super(FewDescriptors, self).open(name, flags, dir_fd))

    def dup(self, fd: int) -> int:
        return self._hold(lambda: super(FewDescriptors, self).dup(fd))

    def close(self, fd: int) -> None:
        self.held.discard(fd)
        super().close(fd)

    def _hold(self, make: Callable[[], int]) -> int:
        if len(self.held) >= self._limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        fd = make()
        self.held.add(fd)
        return fd


def test_directories_that_are_held_open_for_speed_fail_no_write(tmp_path: Path) -> None:
    calls = FewDescriptors(5)
    store = PosixStore(tmp_path, calls=calls)
    for number in range(20):
        store.put(f"step-{number}/key", b"bytes")
        store.writer(f"step-{number}/blob", 5).finish()
    store.close()
    assert not calls.held


def test_a_store_that_nobody_has_any_more_holds_no_descriptors(tmp_path: Path) -> None:
    calls = FewDescriptors(100)
    PosixStore(tmp_path, calls=calls).put("step/key", b"bytes")
    gc.collect()
    assert not calls.held


def test_a_directory_that_is_gone_is_not_held_open(tmp_path: Path) -> None:
    calls = FewDescriptors(100)
    store = PosixStore(tmp_path, calls=calls)
    store.put("first/key", b"bytes")
    before = len(calls.held)
    for number in range(3):
        store.put(f"step-{number}/key", b"bytes")
        store.delete([f"step-{number}/key"])
    assert len(calls.held) == before


def test_many_heads_are_read_by_several_threads_in_order(tmp_path: Path) -> None:
    """On a network file system each is a round trip: one by one, those of 16,384 seals took 16 s."""

    class Noting(Calls):
        def __init__(self) -> None:
            self.threads: set[int] = set()
            self.meeting = threading.Barrier(2)

        def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
            if name in ("f0", "f64"):
                self.meeting.wait(20)  # the first of two turns: both are under way at once
            if name.startswith("f"):
                self.threads.add(threading.get_ident())
            return super().open(name, flags, dir_fd)

    names = [f"f{number}" for number in range(200)]
    (tmp_path / "d").mkdir()
    for name in names:
        (tmp_path / "d" / name).write_bytes(name.encode() * 100)
    calls = Noting()
    store = PosixStore(tmp_path, calls=calls)
    assert list(store.heads("d", names, 50)) == [(name, (name.encode() * 100)[:50]) for name in names]
    assert len(calls.threads) > 1
    with pytest.raises(Missing):
        list(PosixStore(tmp_path).heads("d", [*names, "gone"], 50))
    assert [name for name, _ in PosixStore(tmp_path).heads("d", names[:3], 50)] == names[:3]
