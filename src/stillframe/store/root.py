"""What a path of :mod:`.posix` may be: nothing outside the root, ever.

- Every directory on the way to a key is opened from the root's own descriptor, and no link is followed in any of them.
- Only regular files are opened, in a way that cannot block on a pipe or a device.
- A file that is changed in place (a lock, a log, a blob that is written over) has one name, and belongs to this user or
  to the root's owner.  A file that is only read may have more: ``put_new`` itself makes two for a moment, a backup made
  of hard links is worth reading, and a colleague's checkpoint, too.
- Names are removed, never what they lead to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from stillframe.store.calls import Calls
from stillframe.store.protocol import PARTIAL, check_key

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_PINNED: Final = 6
"""The root, and the directories of what is being written just now: each costs a descriptor."""


class Root:
    """Every method raises ``OSError``.  Thread: safe from any."""

    def __init__(self, path: str, calls: Calls) -> None:
        self.path = path
        self.calls = calls
        self._pinning = threading.Lock()
        self._pinned: dict[str, int] = {}
        """Directories whose own entry is durable, held open so that no other can have the same inode number."""

    def close(self) -> bool:
        """Let go of the descriptors; tells whether there were any.

        The next durable operation syncs the directories on its way again.
        """
        with self._pinning:
            pinned, self._pinned = self._pinned, {}
        for fd in pinned.values():
            self.calls.close(fd)
        return bool(pinned)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it may not have been made, or the interpreter is ending
            self.close()

    def unpin(self, path: str) -> None:
        """The directory is gone."""
        with self._pinning:
            fd = self._pinned.pop(path, -1)
        if fd >= 0:
            self.calls.close(fd)

    # --- directories -----------------------------------------------------------------------

    @contextlib.contextmanager
    def parent(self, key: str) -> Iterator[tuple[int, str]]:
        """The directory that holds a key, and the name in it."""
        *above, name = check_key(key)
        with self.directory(above) as fd:
            yield fd, name

    @contextlib.contextmanager
    def directory(self, parts: Sequence[str] = (), *, is_made: bool = False, is_durable: bool = False) -> Iterator[int]:
        """Opened component by component.  ``is_durable``: its entries, from the root's on, survive a crash."""
        fd = self._open_root(is_made, is_durable)
        try:
            for depth, name in enumerate(parts, 1):
                child = self._open_below(fd, name, is_made)
                try:
                    if is_durable:
                        self._make_entry_durable("/".join(parts[:depth]), fd, child)
                except BaseException:
                    self.calls.close(child)
                    raise
                above, fd = fd, child  # then closed: interrupted here, one stays open, and none is closed twice
                self.calls.close(above)
            yield fd
        finally:
            self.calls.close(fd)

    def _open_root(self, is_made: bool, is_durable: bool) -> int:
        """The root's own path is the user's word: links in it are followed."""
        try:
            fd = self.calls.open(self.path, _DIRECTORY)
        except FileNotFoundError:
            if not is_made:
                raise
            self._make_directories(self.path)
            fd = self.calls.open(self.path, _DIRECTORY)
        try:
            if is_durable and not self._is_pinned("", fd):
                self._sync_above(fd)
                self._pin("", fd)
        except BaseException:
            self.calls.close(fd)
            raise
        return fd

    def _sync_above(self, fd: int) -> None:
        """Every directory above the root, up to the mount: another client may have made any of them just now."""
        found = self.calls.fstat(fd)
        with contextlib.suppress(PermissionError):  # a directory that we may not open, we have not made either
            at = self.calls.open("..", _DIRECTORY, fd)
            try:
                while (upper := self.calls.fstat(at)).st_dev == found.st_dev and upper.st_ino != found.st_ino:
                    self.sync(at)
                    above = self.calls.open("..", _DIRECTORY, at)
                    below, at, found = at, above, upper
                    self.calls.close(below)
            finally:
                self.calls.close(at)

    def _make_directories(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            try:
                self.calls.mkdir(path)
            except FileNotFoundError:
                self._make_directories(os.path.dirname(path))
                self.calls.mkdir(path)

    def _open_below(self, fd: int, name: str, is_made: bool) -> int:
        flags = _DIRECTORY | os.O_NOFOLLOW
        try:
            return self.calls.open(name, flags, fd)
        except FileNotFoundError:
            if not is_made:
                raise
        with contextlib.suppress(FileExistsError):
            self.calls.mkdir(name, fd)
        return self.calls.open(name, flags, fd)

    def _make_entry_durable(self, path: str, above: int, fd: int) -> None:
        """The directory's entry in the one above, which another client may have made and not synced yet."""
        if not self._is_pinned(path, fd):
            self.sync(above)
            self._pin(path, fd)

    def _is_pinned(self, path: str, fd: int) -> bool:
        with self._pinning:
            pinned = self._pinned.get(path)
            return pinned is not None and os.path.samestat(self.calls.fstat(pinned), self.calls.fstat(fd))

    def _pin(self, path: str, fd: int) -> None:
        with self._pinning:
            dropped = [self._pinned.pop(path)] if path in self._pinned else []
            if len(self._pinned) >= _PINNED:
                dropped.append(self._pinned.pop(next(each for each in self._pinned if each)))
            for each in dropped:
                self.calls.close(each)
            with contextlib.suppress(OSError):  # no descriptor is left: the entry is synced again next time
                self._pinned[path] = self.calls.dup(fd)

    def sync(self, fd: int) -> None:
        """The entries of a directory are durable."""
        try:
            self.calls.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no fsync of directories
                raise

    def is_local(self) -> bool:
        """Whether the root, or the directory that it would be made in, is on a file system of this node."""
        path = self.path
        while True:
            try:
                fd = self.calls.open(path, _DIRECTORY)
            except FileNotFoundError:
                path = os.path.dirname(path)
                continue
            except OSError:
                return False
            try:
                return self.calls.is_local(fd)
            finally:
                self.calls.close(fd)

    # --- files -----------------------------------------------------------------------------

    def create_partial(self, fd: int, name: str, flags: int = 0) -> tuple[int, str]:
        """A new file under a name that no other client uses: a descriptor to write, and the name."""
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        while True:
            partial = partial_name(name)
            try:
                return self.calls.open(partial, flags, fd), partial
            except FileExistsError:
                continue
            except BaseException:  # some kernels make the file, and then refuse O_DIRECT; or Ctrl-C, with the file made
                with contextlib.suppress(OSError):
                    self.calls.unlink(partial, fd)
                raise

    def open_regular(self, fd: int, name: str, flags: int) -> int:
        file = self.calls.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, fd)
        if not stat.S_ISREG(self.calls.fstat(file).st_mode):
            self.calls.close(file)
            raise OSError(errno.ENXIO, "it is not a regular file", name)
        return file

    def open_in_place(self, fd: int, name: str, flags: int) -> int:
        """A descriptor of a file whose content may be changed."""
        file = self.open_regular(fd, name, flags)
        found = self.calls.fstat(file)
        if not self.is_changeable(found):
            self.calls.close(file)
            why = "it belongs to another user" if found.st_nlink == 1 else "it has another name as well (a hard link)"
            raise OSError(errno.ENXIO, why, name)
        return file

    def is_changeable(self, found: os.stat_result) -> bool:
        owners = {os.geteuid()}
        with contextlib.suppress(OSError), self.directory() as root:
            owners.add(self.calls.fstat(root).st_uid)  # where a mount shows all files as one user's, this is that one
        return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in owners


def partial_name(name: str) -> str:
    return f"{name}.{_nonce()}{PARTIAL}"


def _nonce() -> str:
    return os.urandom(4).hex()  # as ``secrets``, which loads much else
