"""Advisory locks on files of a root: hints about who is at work.  They decide how long to wait, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
from types import TracebackType

from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Store
from stillframe.store.trouble import trouble

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
NOTE_BYTES = 4096
"""Of every note: one page, written and read by one call; a disk that is full later has room for the next one."""


class NoLocks(Exception):
    """The store, or its file system, has none."""


class FileLock:
    """A file that is open to be locked.  The lock goes when it is closed, or with the process, however that ends.

    A shared lock opens the file for reading, an exclusive one for writing: NFS asks for that.  ``is_made``: the file is
    made if it is missing.
    Raises: :class:`NoLocks`; :class:`Missing`; :class:`StorageError`.
    """

    def __init__(self, store: Store, key: str, *, is_shared: bool = False, is_made: bool = False) -> None:
        if not isinstance(store, PosixStore):
            raise NoLocks(store.where())
        self._store = store
        self._key = key
        self._is_shared = is_shared
        flags = os.O_RDONLY if is_shared else os.O_RDWR
        self._fd = store.open_to_lock(key, flags | (os.O_CREAT if is_made else 0))

    def acquire(self) -> bool:
        """Returns whether the lock is ours now; never waits.  Raises: :class:`NoLocks`; :class:`StorageError`."""
        try:
            self._store.calls.lock(self._fd, self._is_shared)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise NoLocks(self._store.where()) from error
            raise trouble(f"locking {self._store.where(self._key)}", error) from error

    def is_current(self) -> bool:
        """Whether the file still has its name: it may have been removed or replaced before the lock was ours."""
        return self._store.is_same(self._key, self._fd)

    def read(self) -> bytes:
        """The note, as far as it can be read, with the blanks that fill it up."""
        buffer = bytearray(NOTE_BYTES)
        with contextlib.suppress(OSError):
            return bytes(buffer[: self._store.calls.pread(self._fd, memoryview(buffer), 0)])
        return b""

    def is_changeable(self) -> bool:
        """Whether it can take a note: it has no other name, and is no other user's."""
        return self._store.is_changeable(self._fd)

    def write(self, note: bytes) -> None:
        """Best effort: a full disk takes no note, and the lock holds all the same."""
        assert len(note) <= NOTE_BYTES
        with contextlib.suppress(OSError):
            if self.is_changeable():
                self._store.calls.pwrite(self._fd, memoryview(note.ljust(NOTE_BYTES)), 0)

    def close(self) -> None:
        """May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
