"""The store on a file system.  What a path may be is decided in :mod:`.root`; large files are written in :mod:`.blob`.

Durability: a file is fsynced under a partial name, takes its key by ``rename`` or ``link``, and then its directory is
fsynced; before that, once, the entry of that directory in the one above, whoever made it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from stillframe.store.address import root_address
from stillframe.store.blob import BlobWriter, Spare, read_blob, read_whole
from stillframe.store.calls import CALLS, Calls
from stillframe.store.protocol import Capabilities, Data, Info, check_key, check_new_key
from stillframe.store.root import Root
from stillframe.store.trouble import translated, trouble

_T = TypeVar("_T")
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EMLINK}
_NO_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE}
_TRIES: Final = 3
"""A directory that is empty may be removed by another client while we are about to put something into it."""
_READERS, _FEW_HEADS = 16, 64
"""Threads that read the heads of files, so many files at a turn; up to that many are read without threads."""


class PosixStore:
    """``spare``: the name, in the root, of a removed blob that is kept for the next one to be written over it."""

    def __init__(self, root: str | os.PathLike[str], *, spare: str = "", calls: Calls = CALLS) -> None:
        self.calls = calls
        self._root = Root(root_address(root), calls)
        self._spare_name = spare
        self._spare = Spare(self._root, spare)

    @property
    def caps(self) -> Capabilities:
        is_local = self._root.is_local()
        return Capabilities(is_direct=hasattr(os, "O_DIRECT"), lands_late=not is_local, is_on_this_node=is_local)

    def where(self, key: str = "") -> str:
        return f"{self._root.path}/{key}" if key else self._root.path

    def close(self) -> None:
        """Let go of what is held for speed: open directories, and the spare blob.  Raises :class:`StorageError`."""
        self._root.close()
        if self._spare_name:
            self.delete([self._spare_name])

    # --- the seven verbs -------------------------------------------------------------------

    def put(self, key: str, data: Data, durable: bool = True) -> None:
        data = memoryview(data).cast("B")

        def work(fd: int, name: str) -> None:
            with self._partial_file(fd, name, data, durable) as partial:
                self.calls.rename(partial, name, fd, fd)
            if durable:
                self._root.sync(fd)

        self._write(key, work, durable)

    def put_new(self, key: str, data: Data) -> bool:
        data = memoryview(data).cast("B")

        def work(fd: int, name: str) -> bool:
            with self._partial_file(fd, name, data, durable=True) as partial:
                self._root.sync(fd)  # what other clients have put here
                holds = self._take_name(fd, partial, name) or self._holds(fd, name, data)
            self._root.sync(fd)  # also if it was there: who is told of it relies on it
            return holds

        return self._write(key, work, durable=True)

    def writer(self, key: str, size: int, *, copy_of: str = "") -> BlobWriter:  # one replaces the other whole
        def work(fd: int, name: str) -> BlobWriter:
            return BlobWriter(self._root, self._spare, fd, name, size, f"writing {self.where(key)}")

        return self._write(key, work, durable=True)

    def read(self, key: str, start: int, into: memoryview) -> int:
        with translated(f"reading {self.where(key)}"), self._root.parent(key) as (fd, name):
            return read_blob(self._root, fd, name, start, into)

    def head(self, key: str) -> Info | None:
        with translated(f"looking at {self.where(key)}"):
            try:
                with self._root.parent(key) as (fd, name):
                    found = self.calls.stat(name, fd)
            except FileNotFoundError:
                return None
        return Info(found.st_size, stat.S_ISREG(found.st_mode))

    def list(self, directory: str = "") -> Iterator[str]:
        with translated(f"listing {self.where(directory)}"):
            try:
                with self._root.directory(check_key(directory) if directory else ()) as fd:
                    found = self.calls.entries(fd)
            except FileNotFoundError:
                return iter(())
        return iter([f"{name}/" if is_directory else name for name, is_directory in found])

    def delete(self, keys: Sequence[str]) -> None:
        by_directory: dict[str, list[str]] = {}
        for key in keys:
            *above, name = check_key(key) if not key.endswith("/") else [*check_key(key[:-1]), ""]
            by_directory.setdefault("/".join(above), []).extend([name] if name else [])
        first: OSError | None = None
        for directory, names in by_directory.items():
            try:
                first = self._delete_in(directory, names) or first
            except FileNotFoundError:
                continue
            except OSError as error:
                error.filename = directory
                first = first or error
        if first is not None:
            raise trouble(f"removing {self.where(first.filename)}", first) from first

    # --- what only a file system has: hints and conveniences, which decide nothing ----------

    def append(self, key: str, data: bytes) -> int:
        """Add to the end of a log, which is not made durable; tells its size.  Raises :class:`StorageError`."""

        def work(fd: int, name: str) -> int:
            file = self._root.open_in_place(fd, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self.calls.append(file, rest) :]
                return self.calls.fstat(file).st_size
            finally:
                self.calls.close(file)

        return self._write(key, work, durable=False)

    def rename(self, source: str, target: str, durable: bool = True, *, into: PosixStore | None = None) -> None:
        """Rename a file or a directory, in the place of a file or of an empty directory; ``into``: of another store."""
        other = into or self
        doing = f"renaming {self.where(source)} to {other.where(target)}"
        *above, new = check_key(target)
        with (
            translated(doing),
            self._root.parent(source) as (old_fd, old),
            other._root.directory(above, is_made=other is not self, is_durable=durable) as new_fd,
        ):
            self.calls.rename(old, new, old_fd, new_fd)
            self._root.close()  # what is known of the directories' entries may be true no longer
            other._root.close()
            if durable:
                self._root.sync(new_fd)
                self._root.sync(old_fd)

    def link(self, source: str, target: str) -> None:
        """Give a durable file a second name, durably.  Raises :class:`StorageError`, also where there are no links."""
        *above, new = check_new_key(target)
        with (
            translated(f"linking {self.where(source)} to {self.where(target)}"),
            self._root.parent(source) as (old_fd, old),
            self._root.directory(above, is_made=True, is_durable=True) as new_fd,
        ):
            self.calls.link_to(old, new, old_fd, new_fd)
            self._root.sync(new_fd)

    def adopt(self, partial: str, key: str) -> bool:
        """Give the key to a durable file beside it, if the key is free.  Returns whether that file has it now."""
        with translated(f"writing {self.where(key)}"), self._root.parent(key) as (fd, name):
            if not self._take_name(fd, partial, name):
                return False
            with contextlib.suppress(FileNotFoundError):  # renamed, not linked
                self.calls.unlink(partial, fd)
            self._root.sync(fd)
            return True

    def heads(self, directory: str, names: Sequence[str], count: int) -> Iterator[tuple[str, bytes]]:
        """The first bytes of many files of one directory, which is opened once.  Raises :class:`StorageError`.

        Several at a time: on a network file system each is a round trip or two.
        """

        def read(some: Sequence[str]) -> list[tuple[str, bytes]]:
            buffer = memoryview(bytearray(count))
            for name in some:
                check_key(f"{directory}/{name}")
            return [(name, bytes(buffer[: read_blob(self._root, fd, name, 0, buffer)])) for name in some]

        with translated(f"reading {self.where(directory)}"), self._root.directory(check_key(directory)) as fd:
            if len(names) <= _FEW_HEADS:
                yield from read(names)
                return
            parts = [names[at : at + _FEW_HEADS] for at in range(0, len(names), _FEW_HEADS)]
            with ThreadPoolExecutor(_READERS, "stillframe-heads") as pool:
                for at in range(0, len(parts), _READERS):  # what nobody has taken yet has a bound
                    yield from itertools.chain.from_iterable(pool.map(read, parts[at : at + _READERS]))

    def infos(self, directory: str) -> dict[str, Info]:
        """The files in a directory, by name: what :meth:`head` tells of each, with one listing for all."""
        with translated(f"listing {self.where(directory)}"):
            try:
                with self._root.directory(check_key(directory)) as fd:
                    return dict(self._infos(fd))
            except FileNotFoundError:
                return {}

    def _infos(self, fd: int) -> Iterator[tuple[str, Info]]:
        for name, is_directory in self.calls.entries(fd):
            with contextlib.suppress(FileNotFoundError):
                if not is_directory:
                    found = self.calls.stat(name, fd)
                    yield name, Info(found.st_size, stat.S_ISREG(found.st_mode))

    def open_to_lock(self, key: str, flags: int) -> int:
        """A descriptor for :mod:`.lock`; with ``O_CREAT`` the file is made.  Raises :class:`StorageError`."""
        if flags & os.O_CREAT:
            return self._write(key, lambda fd, name: self._root.open_regular(fd, name, flags), durable=False)
        with translated(f"opening {self.where(key)}"), self._root.parent(key) as (fd, name):
            return self._root.open_regular(fd, name, flags)

    def is_changeable(self, file: int) -> bool:
        """Whether a file may be changed in place (:mod:`.root`)."""
        return self._root.is_changeable(self.calls.fstat(file))

    def is_same(self, key: str, file: int) -> bool:
        """Whether the file behind a descriptor has the key now."""
        try:
            with self._root.parent(key) as (fd, name):
                return os.path.samestat(self.calls.stat(name, fd), self.calls.fstat(file))
        except OSError:
            return False

    def space(self) -> os.statvfs_result:
        """Size and free space of the file system.  Raises :class:`StorageError`."""
        with translated(f"looking at {self.where()}"), self._root.directory() as fd:
            return self.calls.space(fd)

    # --- inside ----------------------------------------------------------------------------

    def _write(self, key: str, work: Callable[[int, str], _T], durable: bool) -> _T:
        """``work(directory, name)`` in the key's directory, made if need be; again if that is removed meanwhile."""
        *above, name = check_new_key(key)
        with translated(f"writing {self.where(key)}"):
            for attempt in range(1, _TRIES + 1):
                try:
                    with self._root.directory(above, is_made=True, is_durable=durable) as fd:
                        return work(fd, name)
                except FileNotFoundError:
                    if attempt == _TRIES:
                        raise
                except OSError as error:  # those that are held for speed go first
                    if error.errno not in _NO_DESCRIPTORS or attempt == _TRIES or not self._root.close():
                        raise
        raise AssertionError

    @contextlib.contextmanager
    def _partial_file(self, fd: int, name: str, data: Data, durable: bool) -> Iterator[str]:
        """A whole small file under a name of its own, which is gone at the end."""
        file, partial = self._root.create_partial(fd, name)
        try:
            try:
                rest, at = memoryview(data), 0
                while rest:
                    count = self.calls.pwrite(file, rest, at)
                    rest, at = rest[count:], at + count
                if durable:
                    self.calls.fsync(file)
            finally:
                self.calls.close(file)
            yield partial
        finally:
            with contextlib.suppress(OSError):  # as a rule it has its key by now
                self.calls.unlink(partial, fd)

    def _take_name(self, fd: int, partial: str, name: str) -> bool:
        """Whether the file has the name now; ``False``: the name is taken, perhaps by a try whose reply was lost."""
        try:
            self.calls.link(partial, name, fd)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        try:
            self.calls.rename_new(partial, name, fd)
            return True
        except FileExistsError:
            return False

    def _holds(self, fd: int, name: str, data: Data) -> bool:
        """Whether a name that is taken has exactly these bytes, and then durably.

        ``FileNotFoundError``: it has been removed meanwhile, and the caller tries again.
        """
        file = self._root.open_regular(fd, name, os.O_RDONLY)
        try:
            buffer = bytearray(len(data) + 1)
            if read_whole(self.calls, file, memoryview(buffer)) != len(data) or buffer[:-1] != data:
                return False
            self.calls.fsync(file)  # it may be another's, who did not ask for that
            return True
        finally:
            self.calls.close(file)

    def _delete_in(self, directory: str, names: Sequence[str]) -> OSError | None:
        """The first error met, after all names have been tried.  Raises ``OSError`` for the directory itself."""
        first: OSError | None = None
        aside = ""
        parts = directory.split("/") if directory else []
        with self._root.directory(parts) as fd:
            for name in names:
                try:
                    was_aside = aside
                    aside = aside or self._spare.set_aside(fd, name)
                    if was_aside or not aside:
                        self.calls.unlink(name, fd)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    error.filename = "/".join([*parts, name])
                    first = first or error
            self._root.sync(fd)
        if aside:
            self._spare.offer(aside)
        self._remove_empty(parts)
        return first

    def _remove_empty(self, parts: Sequence[str]) -> None:
        """A directory, and then those above it, unless others have files there."""
        with contextlib.suppress(OSError):
            for depth in range(len(parts) - 1, -1, -1):
                with self._root.directory(parts[:depth]) as above:
                    self.calls.rmdir(parts[depth], above)
                self._root.unpin("/".join(parts[: depth + 1]))
