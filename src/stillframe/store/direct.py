"""Files read and written in place, past the page cache where the file system allows it (O_DIRECT).

Direct I/O reaches the disk's own rate from one thread, costs little CPU and leaves the page
cache to the training data; its price is that addresses, lengths and offsets are multiples of
4096.  Where it is refused (tmpfs, some network file systems) the same calls go through the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

from stillframe.model import BLOCK_BYTES
from stillframe.store.durable import open_file
from stillframe.units import round_up

O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_libc = ctypes.CDLL(None, use_errno=True)


def aligned_buffer(size: int) -> mmap.mmap:
    """Zeroed memory that direct I/O accepts, in huge pages where the kernel has them: a transfer into 4 KiB pages is
    thousands of pieces for the device, which reads them at half the rate."""
    buffer = mmap.mmap(-1, max(round_up(size, BLOCK_BYTES), BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor, and whether it is direct."""
    if O_DIRECT:
        try:
            return open_file(path, flags | O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return open_file(path, flags), False


def _stop_being_direct(fd: int, error: OSError) -> bool:
    """Some file systems take O_DIRECT at open and refuse it later: use the cache; tells whether it was that."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
    return True


def reserve(fd: int, size: int) -> None:
    """Room for so many bytes: a full disk is found before any of them is copied, and the extents stay together.

    fallocate(2), not posix_fallocate(3): glibc emulates the latter by writing zeros.  Raises ``OSError``.
    """
    if size and _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


class WriteFile:
    """A file of known size, written at block-aligned places in any order, from any thread.

    ``is_reused``: the file is there already, and is written over.  Its blocks are allocated and written to, and none is
    given back to the device: where that is told of every removed block, removing a file can take as long as writing it.

    Durability: nothing is promised before :meth:`finish` returns.
    """

    def __init__(self, path: Path, size: int, *, is_reused: bool = False) -> None:
        self._size = size
        self._fd, self.is_direct = _open(path, os.O_WRONLY | (0 if is_reused else os.O_CREAT | os.O_TRUNC))
        try:
            reserve(self._fd, round_up(size, BLOCK_BYTES))
        except OSError:
            self.close()
            raise

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write ``data``, whose address and length are block-aligned, at a block-aligned offset."""
        while data:
            try:
                written = os.pwrite(self._fd, data, offset)
            except OSError as error:
                if not _stop_being_direct(self._fd, error):
                    raise
                written = 0
            data, offset = data[written:], offset + written

    def finish(self) -> None:
        """Cut the last block's padding and make everything durable.  Blocks until the device has it."""
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ReadFile:
    """An existing file, read at block-aligned places, from any thread.  Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._fd, self.is_direct = _open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def read_at(self, into: memoryview, offset: int) -> int:
        """Fill ``into`` (block-aligned, as is the offset) and tell how much came; less at the end of the file."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                if not _stop_being_direct(self._fd, error):
                    raise
                continue
            done += count
            if count == 0 or count % BLOCK_BYTES:
                break
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
