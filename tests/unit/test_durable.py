"""Publishing and direct I/O on real file systems."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillframe.errors import ExistsError, StorageError
from stillframe.link import sizing
from stillframe.model import BLOCK_BYTES
from stillframe.store import direct, durable
from stillframe.units import round_up
from tests.support import start_child

SIZES = [0, 1, 4095, 4096, 4097, 3 * 4096 - 1, 3 * 4096, 1 << 20, (1 << 20) + 1]


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the file system of the tests, and one in memory, which may refuse O_DIRECT."""
    if request.param == "disk":
        yield tmp_path
    elif os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)
    else:
        pytest.skip("there is no /dev/shm")


# --- publishing ----------------------------------------------------------------------------


def test_a_new_file_takes_its_final_name(place: Path) -> None:
    durable.write_partial(place / "a.partial", b"content")
    durable.publish_new(place / "a.partial", place / "a")
    assert (place / "a").read_bytes() == b"content"
    assert os.listdir(place) == ["a"]


def test_a_new_file_never_replaces_another(place: Path) -> None:
    (place / "a").write_bytes(b"first")
    durable.write_partial(place / "a.partial", b"second")
    with pytest.raises(ExistsError, match="exists already"):
        durable.publish_new(place / "a.partial", place / "a")
    assert (place / "a").read_bytes() == b"first"


def test_a_new_file_does_not_replace_a_dangling_link(place: Path) -> None:
    (place / "a").symlink_to(place / "nowhere")
    durable.write_partial(place / "a.partial", b"second")
    with pytest.raises(ExistsError):
        durable.publish_new(place / "a.partial", place / "a")
    assert os.readlink(place / "a") == str(place / "nowhere")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_a_new_file_is_renamed_and_still_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    durable.write_partial(tmp_path / "1", b"first")
    durable.publish_new(tmp_path / "1", tmp_path / "a")
    durable.write_partial(tmp_path / "2", b"second")
    with pytest.raises(ExistsError):
        durable.publish_new(tmp_path / "2", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"first"


def test_without_hard_links_a_dangling_link_is_not_replaced_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    durable.write_partial(tmp_path / "1", b"first")
    with pytest.raises(ExistsError):
        durable.publish_new(tmp_path / "1", tmp_path / "a")


_RACE = """
import sys
from pathlib import Path
from stillframe.errors import ExistsError
from stillframe.store import durable
root, name = Path(sys.argv[1]), sys.argv[2]
durable.write_partial(root / f"{name}.partial", name.encode())
print("ready", flush=True)
sys.stdin.readline()
wins = []
for number in range(50):
    durable.write_partial(root / f"{name}.partial", name.encode())
    try:
        durable.publish_new(root / f"{name}.partial", root / str(number))
        wins.append(number)
    except ExistsError:
        pass
print(*wins)
"""


def test_of_many_processes_that_publish_one_name_exactly_one_wins(tmp_path: Path) -> None:
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


def test_publishing_replaces_what_was_there(place: Path) -> None:
    (place / "a").write_bytes(b"first")
    durable.write_partial(place / "b", b"second")
    durable.publish(place / "b", place / "a")
    assert (place / "a").read_bytes() == b"second"
    assert os.listdir(place) == ["a"]


def test_a_partial_file_is_written_anew(place: Path) -> None:
    durable.write_partial(place / "a", b"a long first version")
    durable.write_partial(place / "a", b"short")
    assert (place / "a").read_bytes() == b"short"


def test_a_partial_file_is_never_written_through_a_link(place: Path) -> None:
    (place / "victim").write_bytes(b"precious")
    (place / "a").symlink_to(place / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        durable.write_partial(place / "a", b"x")
    assert (place / "victim").read_bytes() == b"precious"


# --- directories and removal ---------------------------------------------------------------


def test_making_a_directory_that_exists_is_fine(place: Path) -> None:
    durable.make_dir(place / "d")
    durable.make_dir(place / "d")
    assert (place / "d").is_dir()


def test_removing_takes_the_link_and_leaves_its_target(place: Path) -> None:
    (place / "target").write_bytes(b"x")
    (place / "link").symlink_to(place / "target")
    durable.remove(place / "link")
    durable.remove(place / "link")
    assert os.listdir(place) == ["target"]


def test_only_an_empty_directory_is_removed(place: Path) -> None:
    (place / "d").mkdir()
    (place / "d" / "file").touch()
    assert durable.remove_dir(place / "d") is False
    (place / "d" / "file").unlink()
    assert durable.remove_dir(place / "d") is True
    assert durable.remove_dir(place / "d") is True
    assert not (place / "d").exists()


def test_a_foreign_error_says_what_was_done_and_what_to_do(tmp_path: Path) -> None:
    expected = pytest.raises(StorageError, match=r"making room.*No space left.*free some space")
    with expected as caught, durable.storage_errors("making room"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert isinstance(caught.value.__cause__, OSError)


# --- reading small files -------------------------------------------------------------------


def test_a_small_file_is_read_whole_up_to_the_limit(place: Path) -> None:
    (place / "a").write_bytes(b"12345")
    assert durable.read_small(place / "a", 5) == b"12345"


def test_a_file_above_the_limit_is_refused(place: Path) -> None:
    (place / "a").write_bytes(b"123456")
    with pytest.raises(OSError, match="more than the 5 allowed") as caught:
        durable.read_small(place / "a", 5)
    assert caught.value.errno == errno.EFBIG


def test_a_link_is_not_followed_when_reading(place: Path) -> None:
    (place / "a").write_bytes(b"x")
    (place / "link").symlink_to(place / "a")
    with pytest.raises(OSError, match="symbolic link") as caught:
        durable.read_small(place / "link", 5)
    assert caught.value.errno == errno.ELOOP


def test_a_refused_read_leaves_no_descriptor_open(place: Path) -> None:
    (place / "large").write_bytes(b"123456")
    (place / "directory").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("large", "directory", "absent"):
        with pytest.raises(OSError, match=r".+"):
            durable.read_small(place / name, 5)
    assert len(os.listdir("/proc/self/fd")) == before


# --- direct I/O ----------------------------------------------------------------------------


def filled(size: int) -> mmap.mmap:
    buffer = direct.aligned_buffer(size)
    for start in range(0, size, 251):
        buffer[start : min(start + 251, size)] = bytes(range(251))[: min(251, size - start)]
    return buffer


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def write(path: Path, size: int) -> None:
    file = direct.WriteFile(path, size)
    with memoryview(filled(size)) as memory:
        file.write_at(memory[: round_up(size, BLOCK_BYTES)], 0)
    file.finish()


def test_a_buffer_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    buffer = direct.aligned_buffer(64 << 20)
    start = f"{ctypes.addressof(ctypes.c_char.from_buffer(buffer)):x}-"
    mappings = Path("/proc/self/smaps").read_text()
    flags = mappings[mappings.index(f"\n{start}") :].split("VmFlags:")[1].splitlines()[0]
    assert "hg" in flags.split()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_has_exactly_the_bytes_written(place: Path, size: int) -> None:
    write(place / "a", size)
    assert (place / "a").read_bytes() == content(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_is_read_to_its_end(place: Path, size: int) -> None:
    (place / "a").write_bytes(content(size))
    file = direct.ReadFile(place / "a")
    buffer = direct.aligned_buffer(size)
    with memoryview(buffer) as memory:
        assert file.size == size
        assert file.read_at(memory[: round_up(size, BLOCK_BYTES)], 0) == size
        assert bytes(memory[:size]) == content(size)
    file.close()


def test_parts_are_written_in_any_order(place: Path) -> None:
    size = 2 * BLOCK_BYTES + 7
    file = direct.WriteFile(place / "a", size)
    with memoryview(filled(size)) as memory:
        for block in (2, 0, 1):
            at = block * BLOCK_BYTES
            file.write_at(memory[at : at + BLOCK_BYTES], at)
    file.finish()
    assert (place / "a").read_bytes() == content(size)


def test_a_part_is_read_from_the_middle(place: Path) -> None:
    write(place / "a", 3 * BLOCK_BYTES)
    file = direct.ReadFile(place / "a")
    with memoryview(direct.aligned_buffer(BLOCK_BYTES)) as memory:
        assert file.read_at(memory, BLOCK_BYTES) == BLOCK_BYTES
        assert bytes(memory) == content(3 * BLOCK_BYTES)[BLOCK_BYTES : 2 * BLOCK_BYTES]
    file.close()


def test_reading_behind_the_end_gives_nothing(place: Path) -> None:
    write(place / "a", 10)
    file = direct.ReadFile(place / "a")
    with memoryview(direct.aligned_buffer(BLOCK_BYTES)) as memory:
        assert file.read_at(memory, BLOCK_BYTES) == 0
    file.close()


def test_what_an_older_file_held_is_gone(place: Path) -> None:
    write(place / "a", 4 * BLOCK_BYTES)
    write(place / "a", 5)
    assert (place / "a").read_bytes() == content(5)


def test_a_link_is_neither_written_nor_read_through(place: Path) -> None:
    (place / "victim").write_bytes(b"precious")
    (place / "a").symlink_to(place / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        direct.WriteFile(place / "a", 1)
    with pytest.raises(OSError, match="symbolic link"):
        direct.ReadFile(place / "a")
    assert (place / "victim").read_bytes() == b"precious"


def test_where_direct_io_is_refused_the_cache_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & direct.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    file = direct.WriteFile(tmp_path / "a", 10)
    assert not file.is_direct
    with memoryview(filled(10)) as memory:
        file.write_at(memory, 0)
    file.finish()
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == content(10)


class RefusingLibc:
    """A C library whose ``fallocate`` fails."""

    def __init__(self, code: int) -> None:
        self.code = code

    def fallocate(self, *_: object) -> int:
        ctypes.set_errno(self.code)
        return -1


def test_a_full_device_is_found_before_any_byte_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_libc", RefusingLibc(errno.ENOSPC))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left") as caught:
        direct.WriteFile(tmp_path / "a", 10)
    assert caught.value.errno == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_that_cannot_reserve_space_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_libc", RefusingLibc(errno.EOPNOTSUPP))
    write(tmp_path / "a", 4097)
    assert (tmp_path / "a").read_bytes() == content(4097)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    file = direct.ReadFile(tmp_path / "a")
    file.close()
    file.close()


@pytest.mark.parametrize("size", [0, 1, 4096, 4097])
def test_a_buffer_is_zeroed_and_long_enough(size: int) -> None:
    buffer = direct.aligned_buffer(size)
    assert len(buffer) >= max(size, 1)
    assert len(buffer) % BLOCK_BYTES == 0
    assert buffer[:] == bytes(len(buffer))


def test_available_memory_is_a_positive_count_of_bytes() -> None:
    assert sizing.memory_available_bytes() > 0
