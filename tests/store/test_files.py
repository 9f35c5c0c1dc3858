"""Blobs of every size, on disk and in memory; several processes at once; locks; and the user's own files."""

from __future__ import annotations

import ctypes
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillframe.errors import ExistsError, StorageError
from stillframe.link import memory
from stillframe.model import BLOCK_BYTES
from stillframe.store import files, infos
from stillframe.store.blob import aligned_buffer
from stillframe.store.calls import Calls
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Missing, NotOurs, read_all, read_range
from tests.support import start_child

SIZES = [0, 1, 4095, 4096, 4097, 3 * 4096 - 1, 3 * 4096, 1 << 20, (1 << 20) + 1]


@pytest.fixture(params=["disk", "tmpfs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PosixStore]:
    """On the file system of the tests, and in memory, which may refuse O_DIRECT."""
    if request.param == "disk":
        yield PosixStore(tmp_path / "root")
    elif os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield PosixStore(path)
    else:
        pytest.skip("there is no /dev/shm")


# --- blobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_blob_of_any_size_has_exactly_the_bytes_written(store: PosixStore, size: int) -> None:
    data = random.Random(size).randbytes(size)
    blocks = aligned_buffer(size + BLOCK_BYTES)
    blocks[:size] = data
    writer = store.writer("a/blob", size)
    for at in sorted(range(0, size, BLOCK_BYTES), key=lambda at: at % (3 * BLOCK_BYTES)):
        writer.write_at(memoryview(blocks)[at : at + BLOCK_BYTES], at)
    writer.finish()
    assert read_range(store, "a/blob", 0, size + 10) == data
    into = aligned_buffer(size + BLOCK_BYTES)
    assert store.read("a/blob", 0, memoryview(into)) == size
    assert into[:size] == data
    assert [name for name in store.list("a") if name.endswith(".partial")] == []


@pytest.mark.parametrize("size", [0, 1, 4096, 4097])
def test_a_buffer_is_zeroed_and_long_enough(size: int) -> None:
    buffer = aligned_buffer(size)
    assert len(buffer) >= max(size, 1)
    assert len(buffer) % BLOCK_BYTES == 0
    assert buffer[:] == bytes(len(buffer))


def test_a_buffer_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    buffer = aligned_buffer(64 << 20)
    start = f"{ctypes.addressof(ctypes.c_char.from_buffer(buffer)):x}-"
    mappings = Path("/proc/self/smaps").read_text()
    flags = mappings[mappings.index(f"\n{start}") :].split("VmFlags:")[1].splitlines()[0]
    assert "hg" in flags.split()


def test_a_full_device_is_found_before_any_byte_is_copied(tmp_path: Path) -> None:
    class Full(Calls):
        def reserve(self, fd: int, size: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="free some space"):
        PosixStore(tmp_path, calls=Full()).writer("a/blob", 10)
    assert list(PosixStore(tmp_path).list("a")) == []


def test_a_refused_read_leaves_no_descriptor_open(store: PosixStore) -> None:
    store.put("a/b", b"x")
    before = len(os.listdir("/proc/self/fd"))
    for key in ("a", "a/b/c", "nothing", "a/nothing"):
        with pytest.raises(StorageError):
            read_range(store, key, 0, 10)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_small_value_is_read_whole_up_to_the_limit(store: PosixStore) -> None:
    store.put("a", b"12345")
    assert read_all(store, "a", 5) == b"12345"
    with pytest.raises(NotOurs, match="5 bytes, more than the 4"):
        read_all(store, "a", 4)
    with pytest.raises(Missing):
        read_all(store, "b", 5)


def test_names_and_sizes_of_a_directory_come_in_one_look(store: PosixStore) -> None:
    store.put("a/one", b"1")
    store.put("a/below/two", b"22")
    assert {name: info.size for name, info in infos(store, "a").items()} == {"one": 1}
    assert infos(store, "nothing") == {}


# --- several processes -------------------------------------------------------------------------

_RACE = """
import sys
from stillframe.store.posix import PosixStore
store, name = PosixStore(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
print(*[number for number in range(50) if store.put_new(str(number), name.encode())])
"""


def test_of_many_processes_that_put_one_key_exactly_one_wins(tmp_path: Path) -> None:
    gate_read, gate_write = os.pipe()
    before = os.dup(0)
    os.dup2(gate_read, 0)  # the children's standard input: they start together when it closes
    try:
        children = {name: start_child(_RACE, tmp_path, name) for name in "abcd"}
    finally:
        os.dup2(before, 0)
        for fd in (before, gate_read):
            os.close(fd)
    for child in children.values():
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    os.close(gate_write)
    wins: dict[int, str] = {}
    for name, child in children.items():
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        for number in map(int, out.split()):
            assert number not in wins
            wins[number] = name
    assert sorted(wins) == list(range(50))
    assert all((tmp_path / str(number)).read_text() == name for number, name in wins.items())
    assert not list(tmp_path.glob("*.partial"))


# --- locks -------------------------------------------------------------------------------------


def test_a_lock_is_one_process_s_and_takes_a_note(store: PosixStore) -> None:
    with FileLock(store, "lock", is_made=True) as first, FileLock(store, "lock", is_made=True) as second:
        assert first.acquire()
        assert not second.acquire()
        first.write(b"a long note")
        first.write(b"mine")
        assert second.read().rstrip() == b"mine"
        first.close()
        assert second.acquire()
        assert second.is_current()
        store.delete(["lock"])
        assert not second.is_current()


def test_readers_share_a_lock_and_keep_a_writer_out(store: PosixStore) -> None:
    store.put("manifest", b"x")
    with FileLock(store, "manifest", is_shared=True) as one, FileLock(store, "manifest", is_shared=True) as other:
        assert one.acquire()
        assert other.acquire()
        with FileLock(store, "manifest") as writer:
            assert not writer.acquire()


def test_what_is_not_there_cannot_be_locked(store: PosixStore) -> None:
    with pytest.raises(Missing):
        FileLock(store, "nothing", is_shared=True)


def test_a_file_system_without_locks_says_so(tmp_path: Path) -> None:
    class Lockless(Calls):
        def lock(self, fd: int, is_shared: bool) -> None:
            raise OSError(37, "No locks available")

    with (
        FileLock(PosixStore(tmp_path, calls=Lockless()), "lock", is_made=True) as lock,
        pytest.raises(NoLocks),
    ):
        lock.acquire()


# --- the user's own files ----------------------------------------------------------------------


def test_a_file_is_written_whole_and_only_replaced_if_asked(tmp_path: Path) -> None:
    files.write_file(tmp_path / "page", b"first")
    with pytest.raises(ExistsError):
        files.write_file(tmp_path / "page", b"second")
    assert (tmp_path / "page").read_bytes() == b"first"
    files.write_file(tmp_path / "page", b"second", is_forced=True)
    assert (tmp_path / "page").read_bytes() == b"second"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ExistsError):
        files.write_file(tmp_path / "link", b"x")
    assert sorted(os.listdir(tmp_path)) == ["link", "page"]


@pytest.mark.parametrize("is_directory", [False, True])
def test_what_is_published_appears_complete_or_not_at_all(tmp_path: Path, is_directory: bool) -> None:
    def write(partial: Path) -> object:
        if is_directory:
            files.make_directory(partial)
        (partial / "inside" if is_directory else partial).write_bytes(b"x")
        return None

    with pytest.raises(ZeroDivisionError), files.publishing(tmp_path / "out") as partial:
        write(partial) or 1 // 0
    assert os.listdir(tmp_path) == []
    with files.publishing(tmp_path / "out") as partial:
        write(partial)
        assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(ExistsError), files.publishing(tmp_path / "out") as partial:
        write(partial)
    with files.replacing(tmp_path / "other") as partial:
        partial.write_bytes(b"y")
    assert (tmp_path / "other").read_bytes() == b"y"


def test_what_cannot_be_told_is_an_error(tmp_path: Path) -> None:
    assert files.kind_of(tmp_path) == "directory"
    assert files.kind_of(tmp_path / "nothing") == "nothing"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError):
        files.kind_of(tmp_path / "loop")


def test_available_memory_is_a_positive_count_of_bytes() -> None:
    assert memory.shared_room().nbytes > 0


def test_a_lock_with_a_second_name_takes_no_note(store: PosixStore) -> None:
    store.put("lock", b"theirs")
    os.link(store.where("lock"), store.where("other"))
    with FileLock(store, "lock", is_made=True) as lock:
        assert lock.acquire()
        lock.write(b"ours")
    assert read_all(store, "other", 10) == b"theirs"
