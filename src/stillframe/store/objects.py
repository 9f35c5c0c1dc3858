"""Object stores: S3 and what speaks it, Google Cloud Storage, Azure.  Implements :class:`.protocol.Store`.

A small value is one object.  A blob of an :class:`ObjectWriter` is a few: every ``write_at`` is one plain PUT of
its own, straight from the caller's memory, so parts come in any order, are repeated alone, and never wait for one
another; ``finish`` puts the index, an object under the key itself that names them.  No multipart uploads: one that was
interrupted stays, hidden and paid for, until somebody aborts it.

    d/rank-00000.safetensors                               the index
    d/rank-00000.safetensors.1f2e3d4c.parts/0000000004096  the bytes from 4096 on

Parts of a blob that was never finished are listed as ``rank-00000.safetensors.1f2e3d4c.partial``.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
import secrets
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from stillframe.errors import StorageError
from stillframe.store.activity import Activity
from stillframe.store.address import without_secrets
from stillframe.store.clouds import again_s, cloud_of, endpoint_of
from stillframe.store.object_writer import ObjectWriter
from stillframe.store.protocol import (
    PARTIAL,
    Capabilities,
    Data,
    Info,
    Missing,
    NotOurs,
    Opened,
    check_key,
    check_new_key,
)
from stillframe.store.server import Server, open_backend
from stillframe.untrusted import decode_json

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

_PARTS = ".parts"
_NONCE = re.compile(r"[0-9a-f]{8}")
_MARK = "stillframeindex"
"""The attribute that tells an index from a value; it holds the size of the blob."""
_SIZE = re.compile(r"[0-9]{1,18}")
_MAX_INDEX_BYTES = 64 << 20
_REMEMBERED = 256
_AT_ONCE = 32
"""Small requests, which mostly wait."""
_TRIES = 8


class _Index(msgspec.Struct, frozen=True):
    """Where the bytes of a blob are; what no part holds is zero."""

    size: int
    nonce: str
    parts: list[tuple[int, int]]
    """(offset, length), rising, apart, and within the size."""

    @property
    def is_right(self) -> bool:
        ends = itertools.chain([0], (offset + length for offset, length in self.parts))
        is_apart = all(end <= offset and length > 0 for end, (offset, length) in zip(ends, self.parts, strict=False))
        last = sum(self.parts[-1]) if self.parts else 0
        return is_apart and last <= self.size and _NONCE.fullmatch(self.nonce) is not None


def open_objects(url: str, options: Mapping[str, Any] | None = None, activity: Activity | None = None) -> ObjectStore:
    """``activity``: of a keeper, told of every request; it waits longer for a server that does not answer.

    Raises :class:`ConfigError`.
    """
    at, hasty = without_secrets(endpoint_of(url, options or {})), (open_backend(url, options), again_s(options))
    chosen = hasty if activity is None else (open_backend(url, options, True), again_s(options, True))
    return ObjectStore(chosen[0], url, activity, chosen[1], at, hasty)


class ObjectStore:
    """One client.  ``url``: for messages.  Thread: safe from any."""

    def __init__(self, backend: Backend, url: str, *how: Any) -> None:  # how: as Server takes it
        self._url = url.rstrip("/")
        self.server = Server(backend, self._url, *how)
        self._indexes: OrderedDict[str, tuple[str, _Index]] = OrderedDict()
        """By key, the last used last: the tag that it was read with, and the index."""
        self._remembering = threading.Lock()
        self._is_probed = False
        self._probing = threading.Lock()

    @property
    def caps(self) -> Capabilities:
        return Capabilities(lands_late=True, lists_fresh=True)

    def where(self, key: str = "") -> str:
        return f"{self._url}/{key}" if key else self._url

    # --- values ----------------------------------------------------------------------------

    def put(self, key: str, data: Data, durable: bool = True) -> None:
        check_new_key(key)
        with self._replacing(key):
            self.server.put(key, data)

    def put_new(self, key: str, data: Data) -> bool:
        check_new_key(key)
        self._probe()
        if self.server.put_if_free(key, data):
            return True
        found = bytearray(len(data) + 1)
        with contextlib.suppress(Missing):  # it was removed meanwhile
            return bytes(found[: self.read(key, 0, memoryview(found))]) == bytes(data)
        return False

    def _probe(self) -> None:
        """Once: a server that ignores the condition would let two runs commit.  Raises :class:`StorageError`."""
        with self._probing:
            if self._is_probed:
                return
            key = f"run/probe-{secrets.token_hex(8)}"
            try:
                self.server.put_if_free(key, b"1")  # "it is there" may be the answer to a request that was repeated
                if self.server.put_if_free(key, b"2"):
                    condition = cloud_of(self._url).condition
                    raise StorageError(
                        f"the server of {self._url} ignores the condition of a write ({condition}), so two runs could "
                        "overwrite each other's checkpoints: use a server that honours it"
                    )
            finally:
                with contextlib.suppress(StorageError):
                    self.server.delete([key])
            self._is_probed = True

    @contextlib.contextmanager
    def _replacing(self, key: str) -> Iterator[None]:
        """Around a write: afterwards the parts of the blob that the key held before are not needed."""
        there = self.server.head(key)
        before: _Index | None = None
        if there is not None and _MARK in there.attributes:
            with contextlib.suppress(Missing, NotOurs):
                before = self._index(key)
        self._forget([key])
        yield
        if before is not None:
            self.remove_parts(key, before.nonce)

    def head(self, key: str) -> Info | None:
        check_key(key)
        there = self.server.head(key)
        if there is None:
            return None
        mark = str(there.attributes.get(_MARK, there.size))
        return Info(int(mark)) if _SIZE.fullmatch(mark) else Info(there.size, is_ours=False)

    def read(self, key: str, start: int, into: memoryview) -> int:
        check_key(key)
        before: _Index | None = None
        for _ in range(_TRIES):
            if key not in self._indexes:
                found = self.server.get(key, start, start + len(into)) if len(into) else self.server.head(key)
                if found is None:
                    raise Missing(f"{self.where(key)} is not there")
                if _MARK not in found.attributes:
                    into[: len(found.data)] = found.data
                    return len(found.data)
            index = self._index(key)
            if index is not None and index == before:
                break  # the index is unchanged, and still names a part that is gone
            if index is not None:
                before = index
                with contextlib.suppress(Missing):  # perhaps it was replaced meanwhile
                    return self._read_parts(key, index, start, into)
        raise NotOurs(f"reading {self.where(key)}: parts of it are not there")

    def opened(self, key: str) -> Opened:
        """What the key holds now, and how to read it without asking for its index each time."""
        check_key(key)
        try:
            index = self._index(key)
        except Missing:
            return Opened(None, partial(self.read, key))
        if index is None:
            return Opened(self.head(key), partial(self.read, key))

        def read(start: int, into: memoryview) -> int:
            with contextlib.suppress(Missing):
                return self._read_parts(key, index, start, into)
            return self.read(key, start, into)  # it was replaced meanwhile, or removed

        def lend(start: int, length: int) -> memoryview | None:
            at = bisect.bisect_right(index.parts, (start, index.size)) - 1
            if at < 0 or start + length > sum(index.parts[at]):
                return None  # it lies in several
            offset = index.parts[at][0]
            with contextlib.suppress(Missing):
                found = self.server.get(_part(key, index.nonce, offset), start - offset, start - offset + length)
                return None if found is None else found.data
            return None

        return Opened(Info(index.size), read, lend)

    def heads(self, directory: str, names: Sequence[str], count: int) -> Iterator[tuple[str, bytes]]:
        """(name, first bytes) of many values of one directory.  Raises :class:`Missing`, :class:`StorageError`."""

        def first(name: str) -> tuple[str, bytes]:
            buffer = bytearray(count)
            return name, bytes(buffer[: self.read(f"{directory}/{name}", 0, memoryview(buffer))])

        with ThreadPoolExecutor(min(_AT_ONCE, len(names) or 1), "stillframe-heads") as pool:
            return iter([*pool.map(first, names)])

    # --- names -----------------------------------------------------------------------------

    def list(self, directory: str = "") -> Iterator[str]:
        values, parts, below = self._names(directory)
        unfinished = [(name, nonce) for name, nonce in parts if name not in values]
        times = Counter(name for name, _ in parts if name in values)
        for name in (name for name, count in times.items() if count > 1):  # somebody else has written it, too
            unfinished += self._superfluous(directory, name, [nonce for each, nonce in parts if each == name])
        return iter([*values, *below, *(f"{name}.{nonce}{PARTIAL}" for name, nonce in unfinished)])

    def _superfluous(self, directory: str, name: str, nonces: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Parts beside those of a finished blob; none if it has just gone."""
        try:
            index = self._index(f"{directory}/{name}" if directory else name)
        except (Missing, NotOurs):
            return []
        return [(name, nonce) for nonce in nonces if index is not None and nonce != index.nonce]

    def infos(self, directory: str) -> dict[str, Info]:
        """Of the files in a directory: sizes come with the listing, but for blobs."""
        values, parts, _ = self._names(directory)
        blobs = {name for name, _ in parts}
        found = {
            name: self.head(f"{directory}/{name}") if name in blobs else Info(size) for name, size in values.items()
        }
        return {name: info for name, info in found.items() if info is not None}

    def _names(self, directory: str) -> tuple[dict[str, int], Sequence[tuple[str, str]], Sequence[str]]:
        """(objects with their sizes; (name, nonce) of blobs' parts; directories)."""
        values, prefixes = self.server.list("/".join(check_key(directory)) if directory else "")
        parts, below = [], []
        for each in prefixes:
            name, _, nonce = each.removesuffix(_PARTS).rpartition(".")
            if each.endswith(_PARTS) and name and _NONCE.fullmatch(nonce):
                parts.append((name, nonce))
            else:
                below.append(f"{each}/")
        return values, parts, below

    def delete(self, keys: Sequence[str]) -> None:
        by_directory: dict[str, set[str]] = {}
        for key in keys:
            check_key(key.removesuffix("/"))
            if not key.endswith("/"):  # directories are made of keys alone
                above, _, name = key.rpartition("/")
                by_directory.setdefault(above, set()).add(name)
        first: StorageError | None = None
        for directory, names in by_directory.items():
            try:
                self._delete_in(directory, names)
            except StorageError as error:
                first = first or error
        if first is not None:
            raise first

    def _delete_in(self, directory: str, names: set[str]) -> None:
        """The keys, then the parts that they had, so that no key ever lacks one.

        Not the parts of somebody who is writing the same key anew: they are listed as unfinished from then on.
        """
        above = f"{directory}/" if directory else ""
        _, parts, _ = self._names(directory)
        going = {(name, nonce) for name, nonce in parts if f"{name}.{nonce}{PARTIAL}" in names}
        for name in names & {name for name, _ in parts}:
            with contextlib.suppress(Missing, NotOurs):
                if (index := self._index(above + name)) is not None:
                    going.add((name, index.nonce))
        keys = [above + name for name in names if not name.endswith(PARTIAL)]
        self._forget(keys)
        self.server.delete(keys)
        for name, nonce in going:
            self.remove_parts(above + name, nonce)

    # --- blobs -----------------------------------------------------------------------------

    def writer(self, key: str, size: int, *, copy_of: str = "") -> ObjectWriter:
        check_new_key(key)
        if not copy_of:
            return ObjectWriter(self, key, size, secrets.token_hex(4))
        self._probe()
        nonce = f"{zlib.crc32(copy_of.encode()):08x}"
        found, _ = self.server.list(f"{key}.{nonce}{_PARTS}")
        left = {int(name): length for name, length in found.items() if _SIZE.fullmatch(name)}
        return ObjectWriter(self, key, size, nonce, left)

    def put_part(self, key: str, nonce: str, offset: int, data: memoryview) -> None:
        self.server.put(_part(key, nonce, offset), data)

    def put_index(self, key: str, nonce: str, size: int, parts: Sequence[tuple[int, int]], is_copy: bool) -> None:
        index = _Index(size, nonce, [*parts])
        if not index.is_right:
            raise StorageError(f"{self.where(key)}: what was written overlaps")
        data, mark = msgspec.json.encode(index), {_MARK: str(size)}
        if not is_copy:
            with self._replacing(key):
                self.server.put(key, data, mark)
        elif not self.server.put_if_free(key, data, mark):
            found = self._index(key)
            if found is None or found.nonce != nonce:  # else a request of ours was repeated
                self.remove_parts(key, nonce)

    def _index(self, key: str) -> _Index | None:
        """As it is now; ``None`` if it is a value.  Raises :class:`Missing`, :class:`NotOurs`."""
        tag, known = self._indexes.get(key, ("", None))
        try:
            found = self.server.get(key, unless=tag, limit=_MAX_INDEX_BYTES)
        except Missing:
            self._forget([key])
            raise
        if found is None:
            with self._remembering:
                if key in self._indexes:
                    self._indexes.move_to_end(key)
            return known
        self._forget([key])
        if _MARK not in found.attributes:
            return None
        try:
            index = decode_json(bytes(found.data), _Index)
            if not index.is_right or str(index.size) != found.attributes[_MARK]:
                raise ValueError("its parts cannot be")
        except ValueError:
            raise NotOurs(f"{self.where(key)} is no index that stillframe has written") from None
        with self._remembering:
            self._indexes[key] = found.tag, index
            while len(self._indexes) > _REMEMBERED:
                self._indexes.popitem(last=False)
        return index

    def _forget(self, keys: Sequence[str]) -> None:
        with self._remembering:
            for key in keys:
                self._indexes.pop(key, None)

    def _read_parts(self, key: str, index: _Index, start: int, into: memoryview) -> int:
        end = min(start + len(into), index.size)
        done = start
        for offset, length in index.parts:
            first, last = max(offset, done), min(offset + length, end)
            if first >= last:
                continue
            into[done - start : first - start] = bytes(first - done)
            piece = into[first - start : last - start]
            if self.server.read(_part(key, index.nonce, offset), first - offset, piece) != len(piece):
                raise NotOurs(f"reading {self.where(key)}: a part of it is too short")
            done = last
        if end > done:
            into[done - start : end - start] = bytes(end - done)
        return max(end - start, 0)

    def remove_parts(self, key: str, nonce: str) -> None:
        """Of a blob that was removed, replaced or given up."""
        self.server.delete(self.server.list_below(f"{key}.{nonce}{_PARTS}"))


def _part(key: str, nonce: str, offset: int) -> str:
    return f"{key}.{nonce}{_PARTS}/{offset:013d}"
