"""Every system call of :mod:`.posix`, through one object, so that a test can record, fail, delay or replay them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)
_RENAME_NOREPLACE: Final = 1
_LOCAL_FILE_SYSTEMS: Final = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0x01021994,  # tmpfs
    0xF2F52010,  # f2fs
    0x2FC12FC1,  # zfs
    0xCA451A4E,  # bcachefs
}
"""Magic numbers of statfs(2).  Any other may have readers on other nodes, whatever its leases and locks say."""


class Calls:
    """Thin: each method is one call, and raises ``OSError``."""

    def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
        return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def dup(self, fd: int) -> int:
        return os.dup(fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        """Of the name itself: links are not followed."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def entries(self, fd: int) -> list[tuple[str, bool]]:
        """(name, whether it is a directory itself)."""
        with os.scandir(fd) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]

    def mkdir(self, name: str, dir_fd: int | None = None) -> None:
        os.mkdir(name, dir_fd=dir_fd)

    def rmdir(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rename(self, old: str, new: str, old_fd: int, new_fd: int) -> None:
        os.rename(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd)

    def rename_new(self, old: str, new: str, dir_fd: int) -> None:
        """``FileExistsError`` if the new name is taken; ``EINVAL`` if the file system cannot promise that."""
        if _libc.renameat2(dir_fd, os.fsencode(old), dir_fd, os.fsencode(new), _RENAME_NOREPLACE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), new)

    def link(self, old: str, new: str, dir_fd: int) -> None:
        os.link(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)

    def link_to(self, old: str, new: str, old_fd: int, new_fd: int) -> None:
        os.link(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def append(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def reserve(self, fd: int, size: int) -> None:
        """Room for so many bytes.  fallocate(2), not posix_fallocate(3): glibc emulates the latter by writing zeros."""
        if size and _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code))

    def set_buffered(self, fd: int) -> None:
        """Stop going past the page cache."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))

    def lock(self, fd: int, is_shared: bool) -> None:
        """``BlockingIOError`` if somebody else has it."""
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def lease(self, fd: int) -> None:
        """Raises if anybody else has the file open or mapped on this machine.

        The kernel sends SIGIO if somebody opens it while the probe lease is held: the process must ignore that signal.
        """
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def is_local(self, fd: int) -> bool:
        """Whether the file system is known to have no readers or writers on other nodes."""
        buffer = ctypes.create_string_buffer(256)
        if _libc.fstatfs(fd, buffer) != 0:
            return False
        return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF in _LOCAL_FILE_SYSTEMS

    def space(self, fd: int) -> os.statvfs_result:
        return os.fstatvfs(fd)


CALLS: Final = Calls()
