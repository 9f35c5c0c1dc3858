"""Names ↔ immutable bytes: the narrow waist.  The only room that touches a file.

protocol   the seven verbs, and their contract
posix      a file system (root: what a path may be, blob: large files, calls: every system call, trouble: errors)
objects    object stores: S3, Google Cloud Storage, Azure (object_writer: large ones in the making, server: every
           request, and its errors; clouds: what differs between them, profile: keys of an AWS profile)
memory     the whole contract in memory, with faults
address    where a root is: a directory, or a URL
lock       advisory locks, as hints
files      the user's own files, outside any root
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stillframe.errors import ConfigError
from stillframe.store.address import directory_address as directory_address
from stillframe.store.address import is_url as is_url
from stillframe.store.address import root_address as root_address
from stillframe.store.address import root_text as root_text
from stillframe.store.address import without_secrets as without_secrets
from stillframe.store.clouds import again_s as again_s
from stillframe.store.clouds import endpoint_of as endpoint_of
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Info, Opened, Store, read_range

if TYPE_CHECKING:  # most roots are directories: a keeper is there some 8 ms earlier without it
    from stillframe.store.objects import ObjectStore


def open_store(root: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store of a root; a store is returned as it is.  Raises :class:`ConfigError`."""
    if not isinstance(root, str | os.PathLike):
        return root
    address = root_address(root)
    if is_url(address):
        from stillframe.store.objects import open_objects

        return open_objects(address, storage_options)
    if storage_options:
        raise ConfigError(f"storage_options= are for object stores; {address} is a directory")
    return PosixStore(address)


def _as_objects(store: Store) -> ObjectStore | None:
    """The store, if it is one of objects."""
    module = sys.modules.get("stillframe.store.objects")
    return store if module is not None and isinstance(store, module.ObjectStore) else None


def hastily(store: Store) -> contextlib.AbstractContextManager[None]:
    """What this thread asks of a keeper's store in here somebody waits for: minutes of patience are for saves."""
    objects = _as_objects(store)
    return contextlib.nullcontext() if objects is None else objects.server.hastily()


def silence(store: Store, seconds: float) -> str:
    """That nobody has answered for so long, and where: a part of a sentence."""
    objects = _as_objects(store)
    at = f" at {objects.server.at}" if objects is not None and objects.server.at else ""
    where = "is it mounted?" if objects is None else "does it run, and can it be reached from here?"
    return f"nobody has answered{at} for {seconds:g} s: {where}"


def heads(store: Store, directory: str, names: Sequence[str], count: int) -> Iterator[tuple[str, bytes]]:
    """(name, first bytes) of many files of one directory.  Raises :class:`Missing`; :class:`StorageError`."""
    able = store if isinstance(store, PosixStore) else _as_objects(store)
    if able is not None:
        return able.heads(directory, names, count)
    return ((name, read_range(store, f"{directory}/{name}", 0, count)) for name in names)


def opened(store: Store, key: str) -> Opened:
    """A key, for somebody who will read often."""
    objects = _as_objects(store)
    return Opened(store.head(key), partial(store.read, key)) if objects is None else objects.opened(key)


def infos(store: Store, directory: str) -> dict[str, Info]:
    """The files in a directory, by name: what :meth:`Store.head` tells of each."""
    able = store if isinstance(store, PosixStore) else _as_objects(store)
    if able is not None:
        return able.infos(directory)
    found = {name: store.head(f"{directory}/{name}") for name in store.list(directory) if not name.endswith("/")}
    return {name: info for name, info in found.items() if info is not None}
