"""The only module that renames, links, fsyncs and deletes.

After a function here returns, what it did survives a power failure, as far as the file
system and the device keep their word about fsync.

Invariants: a file appears under its final name whole or not at all; nothing is overwritten
by :func:`publish_new`; deleting never follows a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stillframe.errors import ExistsError, IntegrityError, StillframeError, StorageError

_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_HINTS = {
    errno.ENOSPC: "free some space (or keep fewer checkpoints), then save again",
    errno.EDQUOT: "the quota is used up: free some space, then save again",
    errno.EROFS: "the file system is read-only: remount it or choose another root",
    errno.EACCES: "check the permissions of the directory",
    errno.EIO: "the device reports an I/O error: check the disk or the network mount",
    errno.ENOENT: "something removed the directory while it was in use",
}


_DAMAGE = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EFBIG, errno.EIO, errno.EUCLEAN, errno.EBADMSG,
}  # fmt: skip


def read_error(doing: str, error: OSError) -> StillframeError:
    """What a failed read means: damage, or a trouble of the moment (no descriptors, no permission) that is none."""
    if error.errno in _DAMAGE:
        return IntegrityError(f"{doing}: {error.strerror}")
    return StorageError(f"{doing}: {error.strerror}; the checkpoint itself may be whole")


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an ``OSError`` inside into a :class:`StorageError` that says what was being done."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check the storage, then save again")
        raise StorageError(f"{doing}: {error.strerror or error}; {hint}") from error


def make_dir(path: Path) -> None:
    """The directory exists, and so does its entry in the parent, durably."""
    try:
        path.mkdir(parents=False)
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is there, but no directory of its own", str(path)) from None
        return
    sync_dir(path.parent)


def make_dirs(path: Path) -> None:
    """The same of a directory and of every one above it."""
    if not path.is_dir():
        if path.parent != path:
            make_dirs(path.parent)
        make_dir(path)


def sync_file(path: Path) -> None:
    """What was written to it, through whatever descriptor or mapping, is durable."""
    fd = open_file(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no fsync of directories
            raise
    finally:
        os.close(fd)


def publish(partial: Path, final: Path) -> None:
    """A finished, fsynced file takes its final name, replacing what was there."""
    os.rename(partial, final)
    sync_dir(final.parent)


def write_partial(partial: Path, data: bytes) -> None:
    """Write and fsync a small file under its partial name."""
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def publish_new(partial: Path, final: Path) -> None:
    """A finished file takes its final name only if nobody has it: :class:`ExistsError` otherwise.

    A hard link is the atomic "create if absent".  Where the file system has none, a check and a
    rename stand in; the root's lock then is what keeps two writers apart.
    """
    try:
        os.link(partial, final)
    except FileExistsError:
        raise ExistsError(f"{final} exists already") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(final):
            raise ExistsError(f"{final} exists already") from None
        os.rename(partial, final)
    else:
        os.unlink(partial)
    try:
        sync_dir(final.parent)
    except OSError:
        # It may or may not survive: take it back, so that a failure is a failure for everybody.
        remove(final)
        raise


def move(source: Path, target: Path) -> None:
    """Rename without any promise of durability: a crash may leave it under either name."""
    os.rename(source, target)


def is_nobody_elses(path: Path) -> bool:
    """Whether a file can be written over without anybody noticing: it has one name, and nobody has it open or mapped.

    The kernel tells by granting a write lease, which a file system that cannot know (one over the network) does not.
    A process that asks must ignore SIGIO: that is what it gets if somebody opens the file just then.
    """
    try:
        fd = open_file(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return os.fstat(fd).st_nlink == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """The file, or the link itself, is gone; not being there is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_dir(path: Path) -> bool:
    """The directory is gone if it was empty; tells whether it is gone."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    sync_dir(path.parent)
    return True


def publish_whole(partial: Path, final: Path) -> None:
    """A file, or a directory of files, that is complete takes its final name, durably, if nobody has it."""
    if not partial.is_dir():
        sync_file(partial)
        publish_new(partial, final)
        return
    for name in os.listdir(partial):
        sync_file(partial / name)
    sync_dir(partial)
    if os.path.lexists(final):
        raise ExistsError(f"{final} exists already")
    os.rename(partial, final)  # fails if a directory that is not empty has come meanwhile
    sync_dir(final.parent)


def remove_whole(partial: Path) -> None:
    """The file, or the directory and the files in it, is gone."""
    if partial.is_dir():
        for name in os.listdir(partial):
            remove(partial / name)
        remove_dir(partial)
    else:
        remove(partial)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; a link, a directory or a pipe is refused, and none of them can make it hang."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EISDIR, "it is not a regular file", str(path))
    return fd


def read_small(path: Path, limit: int) -> bytes:
    """A whole small file, refusing links and more than ``limit`` bytes; raises ``OSError``."""
    fd = open_file(path)
    try:
        return read_open(fd, limit)
    finally:
        os.close(fd)


def read_head(path: Path, count: int) -> bytes:
    """The first bytes of a file; raises ``OSError``."""
    fd = open_file(path)
    try:
        return os.pread(fd, count, 0)
    finally:
        os.close(fd)


def read_open(fd: int, limit: int) -> bytes:
    """The same of a file that is open already, from its start."""
    size = os.fstat(fd).st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"{size} bytes are more than the {limit} allowed")
    with open(fd, "rb", closefd=False) as file:
        return file.read(limit)
