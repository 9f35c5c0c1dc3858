"""Large files of :mod:`.posix`: written past the page cache (O_DIRECT), and over blocks that are allocated already.

Direct I/O reaches the disk's own rate from one thread, costs little CPU and leaves the page cache to the training data;
its price is that addresses, lengths and offsets are multiples of 4096.  Where it is refused (tmpfs, some network file
systems) the same calls go through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final

from stillframe.model import BLOCK_BYTES
from stillframe.store.calls import Calls
from stillframe.store.root import Root, partial_name
from stillframe.store.trouble import translated
from stillframe.units import KIB, MIB, round_up

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_DIRECT_BYTES: Final = 64 * KIB
"""Smaller reads go through the page cache: they are heads of files, into buffers that need not be aligned."""
_REUSED_BYTES: Final = MIB
"""Blobs from this size on are worth writing over."""


def aligned_buffer(size: int) -> mmap.mmap:
    """Zeroed memory that direct I/O accepts, in huge pages where the kernel has them: a transfer into 4 KiB pages is
    thousands of pieces for the device, which reads them at half the rate."""
    buffer = mmap.mmap(-1, max(round_up(size, BLOCK_BYTES), BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def read_blob(root: Root, fd: int, name: str, start: int, into: memoryview) -> int:
    """Fill ``into``.  A short read is not the end of the file: only zero bytes are.  Raises ``OSError``."""
    is_worth_it = len(into) >= _DIRECT_BYTES and start % BLOCK_BYTES == len(into) % BLOCK_BYTES == 0
    file, is_direct = _open(root, fd, name, is_worth_it)
    try:
        return read_whole(root.calls, file, into, start, is_direct)
    finally:
        root.calls.close(file)


def read_whole(calls: Calls, file: int, into: memoryview, start: int = 0, is_direct: bool = False) -> int:
    done = 0
    while done < len(into):
        if is_direct and done % BLOCK_BYTES:
            if start + done >= calls.fstat(file).st_size:
                break  # the last block of the file is not a whole one
            is_direct = False
            calls.set_buffered(file)
        try:
            count = calls.pread(file, into[done:], start + done)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            is_direct = False  # it took O_DIRECT at open, and refuses it now
            calls.set_buffered(file)
            continue
        if count == 0:
            break
        done += count
    return done


def _open(root: Root, fd: int, name: str, is_worth_it: bool) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache."""
    if _O_DIRECT and is_worth_it:
        try:
            return root.open_regular(fd, name, os.O_RDONLY | _O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without direct I/O
                raise
    return root.open_regular(fd, name, os.O_RDONLY), False


class Spare:
    """One removed blob, kept under a name in the root to be written over by the next.

    Writing over blocks that are allocated is faster than writing to fresh ones, and removing a large file can take as
    long as writing it.  Only where the file system is known to be local: elsewhere a reader on another node would see
    the bytes change, whatever the kernel's leases say here.

    A blob is set aside under a partial name, which no writer takes, until the removal of its key is durable: if a
    writer changed it before, a crash could bring the key back with the writer's bytes.
    """

    def __init__(self, root: Root, name: str) -> None:
        self._root = root
        self._name = name

    def set_aside(self, fd: int, name: str) -> str:
        """Move a blob that is to go to a partial name in the root.  Returns that name; ``""``: it was not moved."""
        calls = self._root.calls
        if not self._name or name == self._name:
            return ""
        with contextlib.suppress(OSError):
            found = calls.stat(name, fd)
            if found.st_size < _REUSED_BYTES or not self._root.is_changeable(found) or not calls.is_local(fd):
                return ""
            with self._root.directory() as above:
                if self._is_there(above):
                    return ""
                partial = partial_name(self._name)
                calls.rename(name, partial, fd, above)
                return partial
        return ""

    def offer(self, partial: str) -> None:
        """Make a blob that was set aside, and whose key is gone for good, the spare.  Never raises."""
        with contextlib.suppress(OSError), self._root.directory() as above:
            try:
                self._root.calls.rename(partial, self._name, above, above)
            except OSError:
                self._root.calls.unlink(partial, above)

    def _is_there(self, above: int) -> bool:
        try:
            self._root.calls.stat(self._name, above)
        except FileNotFoundError:
            return False
        return True

    def take(self, fd: int, name: str) -> tuple[int, str] | None:
        """The blob, open for writing under a partial name; ``None`` if there is none that may be written over."""
        if not self._name:
            return None
        calls, partial = self._root.calls, partial_name(name)
        try:
            with self._root.directory() as above:
                if not self._root.is_changeable(calls.stat(self._name, above)):
                    return None
                calls.rename(self._name, partial, above, fd)
        except OSError:
            return None
        file = -1
        with contextlib.suppress(OSError):  # another's file, or somebody reads it still
            file = self._root.open_in_place(fd, partial, os.O_WRONLY | _O_DIRECT)
            if calls.is_local(file):
                calls.lease(file)
                return file, partial
        if file >= 0:
            calls.close(file)
        with contextlib.suppress(OSError):
            calls.unlink(partial, fd)
        return None


class BlobWriter:
    """A file of known size in the making.  Until it is finished or given up, its directory is not empty, and stays."""

    _directory = -1

    def __init__(self, root: Root, spare: Spare, directory: int, name: str, size: int, doing: str) -> None:
        self._root, self._calls, self._doing = root, root.calls, doing
        self._name, self._size = name, size
        self._closing = threading.Lock()
        self._users, self._was_tried, self._is_over = 0, False, False
        self._owner_pid = os.getpid()
        self._file, self._partial = -1, ""
        try:
            self._directory = self._calls.dup(directory)
            self._file, self._partial, self._is_direct = self._create(spare)
            self._calls.reserve(self._file, round_up(size, BLOCK_BYTES))  # a full disk is found before the bytes come
        except BaseException:
            self.abort()
            raise

    def _create(self, spare: Spare) -> tuple[int, str, bool]:
        reused = spare.take(self._directory, self._name)
        if reused is not None:
            return *reused, bool(_O_DIRECT)
        if _O_DIRECT:
            try:
                return *self._root.create_partial(self._directory, self._name, _O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return *self._root.create_partial(self._directory, self._name), False

    def write_at(self, data: memoryview, offset: int) -> None:
        with translated(self._doing), self._in_use() as file:
            while data:
                was_direct = self._is_direct
                try:
                    written = self._calls.pwrite(file, data, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not was_direct:
                        raise
                    self._is_direct = False  # refused after all, or not aligned; another thread may know already
                    self._calls.set_buffered(file)
                    continue
                data, offset = data[written:], offset + written

    def reuse(self, offset: int, nbytes: int) -> bool:
        return False  # each attempt has a file of its own

    def finish(self) -> None:
        with translated(self._doing), self._in_use() as file:
            if self._was_tried:  # after an fsync that failed the next one says nothing: the pages count as clean
                raise OSError(errno.EIO, "an earlier try to finish it failed, write it again")
            self._was_tried = True
            self._calls.truncate(file, self._size)  # the padding of the last block
            self._calls.fsync(file)
            self._calls.rename(self._partial, self._name, self._directory, self._directory)
            self._partial = ""
            self._root.sync(self._directory)
        self.abort()

    def abort(self) -> None:
        with self._closing:
            self._is_over = True
            if self._partial:
                with contextlib.suppress(OSError):
                    self._calls.unlink(self._partial, self._directory)
                self._partial = ""
        self._close_unused()

    def __del__(self) -> None:
        # Ctrl-C came before the caller had it, or in the midst of abort().  In a forked child the file is the parent's.
        if self._directory >= 0 and self._owner_pid == os.getpid():
            self.abort()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[int]:
        """The file's descriptor.  It stays open meanwhile: closed, its number could become that of another file."""
        with self._closing:
            if self._is_over:
                raise OSError(errno.EBADF, "it was finished or given up")
            self._users += 1
        try:
            yield self._file
        finally:
            with self._closing:
                self._users -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        with self._closing:
            if self._users or not self._is_over:
                return
            fds = [self._file, self._directory]
            self._file = self._directory = -1
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._calls.close(fd)
