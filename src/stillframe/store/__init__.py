"""Names ↔ immutable bytes: the narrow waist.  The only room that touches a file.

protocol   the seven verbs, and their contract
posix      a file system (root: what a path may be, blob: large files, calls: every system call, trouble: errors)
memory     the whole contract in memory, with faults
lock       advisory locks, as hints
files      the user's own files, outside any root
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Info, Store, read_range


def open_store(root: str | os.PathLike[str] | Store) -> Store:
    """The store of a root; a store is returned as it is."""
    return PosixStore(root) if isinstance(root, str | os.PathLike) else root


def heads(store: Store, directory: str, names: Sequence[str], count: int) -> Iterator[tuple[str, bytes]]:
    """(name, first bytes) of many files of one directory.  Raises :class:`Missing`; :class:`StorageError`."""
    if isinstance(store, PosixStore):
        return store.heads(directory, names, count)
    return ((name, read_range(store, f"{directory}/{name}", 0, count)) for name in names)


def infos(store: Store, directory: str) -> dict[str, Info]:
    """The files in a directory, by name: what :meth:`Store.head` tells of each."""
    if isinstance(store, PosixStore):
        return store.infos(directory)
    found = {name: store.head(f"{directory}/{name}") for name in store.list(directory) if not name.endswith("/")}
    return {name: info for name, info in found.items() if info is not None}
