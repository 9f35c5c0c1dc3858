"""``OSError`` → what the caller can act on: absence, something that is not ours, or trouble with the storage."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from stillframe.errors import StorageError
from stillframe.store.protocol import Missing, NotOurs

_HINTS = {
    errno.ENOSPC: "free some space there, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: free some space there, or raise it",
    errno.EROFS: "the file system is read-only: remount it, or use another place",
    errno.EACCES: "check the permissions of the directory",
    errno.EIO: "the device reports an I/O error: check the disk or the network mount",
}
_NOT_OURS = {errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO}


def trouble(doing: str, error: OSError) -> StorageError:
    text = f"{doing}: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        return Missing(f"{text}; it was never there, or something removed the directory while it was in use")
    if error.errno in _NOT_OURS:
        return NotOurs(f"{text}; stillframe made no such thing: remove it, or use another place")
    return StorageError(f"{text}; {_HINTS.get(error.errno or 0, 'check the storage, then try again')}")


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """An ``OSError`` inside becomes a :class:`StorageError` that says what was being done; it stays as its cause."""
    try:
        yield
    except OSError as error:
        raise trouble(doing, error) from error
