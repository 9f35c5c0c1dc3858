"""The user's own files, outside any root: what is exported, imported, and written by request.

What is written appears under its name whole and durable, or not at all; what is there already is left alone, unless the
caller says otherwise.  What is read is whatever the user names: here links are followed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from stillframe.errors import ExistsError
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import PARTIAL
from stillframe.store.root import partial_name
from stillframe.store.trouble import translated
from stillframe.untrusted import decode_json

_T = TypeVar("_T")
Kind = Literal["file", "directory", "other", "nothing"]
_UNFINISHED = re.compile(rf"(.+)\.[0-9a-f]{{8}}{re.escape(PARTIAL)}", re.ASCII | re.DOTALL)
"""As :func:`partial_name` makes them."""


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """What a path leads to.  Raises :class:`StorageError` if that cannot be determined."""
    place = Path(path)
    with translated(f"looking at {place}"):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "nothing"
        return "directory" if place.is_dir() else "file" if place.is_file() else "other"


def is_taken(path: str | os.PathLike[str]) -> bool:
    """Whether anything has the name, also a link that leads nowhere."""
    return os.path.lexists(path)


def real_path(path: str | os.PathLike[str]) -> str:
    """Where a path leads, as far as it exists."""
    return os.path.realpath(path)


def is_below(inner: str, outer: str) -> bool:
    """Whether a path, or a URL, lies inside another one."""
    return inner.startswith(outer.rstrip("/") + "/") and inner != outer


def is_writable(path: str | os.PathLike[str]) -> bool:
    """As far as permissions tell."""
    return os.access(path, os.W_OK)


def names_in(path: str | os.PathLike[str]) -> list[str]:
    with translated(f"listing {path}"):
        return sorted(os.listdir(path))


def size_of(path: Path) -> int:
    """Of a file, or of the files in a directory."""
    with translated(f"looking at {path}"):
        files = path.iterdir() if path.is_dir() else [path]
        return sum(each.stat().st_size for each in files if each.is_file())


def read_file(path: str | os.PathLike[str], limit: int = -1) -> bytes:
    """All of it, or its first bytes."""
    with translated(f"reading {path}"), Path(path).open("rb") as file:
        return file.read(limit)


def read_json(path: str | os.PathLike[str], into: type[_T], limit: int = -1) -> _T:
    """Raises :class:`ValueError` for what is not that."""
    return decode_json(read_file(path, limit), into)


def write_file(path: str | os.PathLike[str], data: bytes, *, is_forced: bool = False) -> None:
    """A small file.  ``is_forced``: in the place of what is there; else raises :class:`ExistsError`."""
    directory, name = os.path.split(os.path.abspath(path))
    store = PosixStore(directory)
    try:
        if is_forced:
            store.put(name, data)
        elif is_taken(path) or not store.put_new(name, data):
            raise ExistsError(f"{path} exists already, and was not changed")
    finally:
        store.close()


def remove_unfinished(directory: str | os.PathLike[str], names: Collection[str]) -> None:
    """What a process that was killed has left of writing files with these names.

    For whoever knows that nobody writes there.  Other files stay, whatever they are called.
    """
    with translated(f"tidying {directory}"):
        for name in os.listdir(directory):
            found = _UNFINISHED.fullmatch(name)
            if found is not None and found[1] in names:
                _remove(Path(directory, name))


@contextlib.contextmanager
def publishing(to: Path) -> Iterator[Path]:
    """Yields a partial name to write a file or a flat directory under.

    It takes the name ``to``, durable, when the block ends; it is removed if the block raises.
    Raises :class:`ExistsError` if anything has that name.
    """
    if is_taken(to):
        raise ExistsError(f"{to} exists already, and was not changed; choose another name or remove it")
    with _partial(to) as partial:
        yield partial
        _publish(partial, to)


@contextlib.contextmanager
def replacing(to: Path) -> Iterator[Path]:
    """Yields a partial name to write a file under.  When the block ends, it replaces ``to``, durable."""
    with _partial(to) as partial:
        yield partial
        _sync(partial)
        PosixStore(to.parent).rename(partial.name, to.name)


@contextlib.contextmanager
def _partial(to: Path) -> Iterator[Path]:
    partial = to.with_name(partial_name(to.name))
    with translated(f"writing {to}"):
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
        except BaseException:
            _remove(partial)
            raise


def _publish(partial: Path, to: Path) -> None:
    for each in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
        _sync(each)
    if partial.is_dir():
        if is_taken(to):
            raise ExistsError(f"{to} exists already")
        partial.rename(to)  # fails if a directory that is not empty has come meanwhile
        _sync(to.parent)
    elif not PosixStore(to.parent).adopt(partial.name, to.name):
        raise ExistsError(f"{to} exists already")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(partial: Path) -> None:
    if partial.is_dir() and not partial.is_symlink():
        for each in partial.iterdir():
            each.unlink()
        partial.rmdir()
    else:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[str]:
    """An empty directory where the system keeps such things; it goes when the block ends."""
    import tempfile  # loads much else, and a keeper needs none of it

    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as directory:
        yield directory


def links_in(directory: str | os.PathLike[str]) -> dict[str, str]:
    """The symbolic links in a directory, by name, and what they hold; none if it is not there."""
    with translated(f"listing {directory}"):
        try:
            with os.scandir(directory) as entries:
                return {each.name: os.readlink(each) for each in entries if each.is_symlink()}
        except (FileNotFoundError, NotADirectoryError):
            return {}


def point(link: str | os.PathLike[str], to: str) -> None:
    """Make a symbolic link, in the place of what is there, unless that is a directory."""
    place = Path(link)
    partial = place.with_name(partial_name(place.name))
    with translated(f"linking {place}"):
        partial.symlink_to(to)
        partial.replace(place)
        _sync(place.parent)


def remove_link(link: str | os.PathLike[str]) -> None:
    """Nothing else: what is no link stays."""
    with translated(f"removing {link}"):
        if os.path.islink(link):
            os.unlink(link)


def make_directory(path: Path) -> None:
    path.mkdir()


def mapped(path: Path, size: int | None = None) -> mmap.mmap:
    """A file mapped for writing: a new one of this size, or one that is there.

    Its room is reserved: a full disk is found now, and is not a SIGBUS in the middle of filling the memory.
    posix_fallocate(3) writes zeros where the file system cannot reserve.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if size is not None else 0)
    fd = os.open(path, flags, 0o666)
    try:
        length = os.fstat(fd).st_size if size is None else size
        os.posix_fallocate(fd, 0, length)
        return mmap.mmap(fd, length)
    finally:
        os.close(fd)


def is_open_at(file: Any, path: str | os.PathLike[str]) -> bool:
    """Whether this open file is the one that is at this path now; not if that cannot be determined."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (AttributeError, OSError, TypeError, ValueError):
        return False
