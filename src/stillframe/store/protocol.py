"""The narrow waist: seven verbs that map names to immutable bytes.  Everything above knows only these.

A key is a path of plain names, ``step-000000001000/manifest.json``; no key is the directory of another.  The contract,
which :mod:`stillframe.testing.store_contract` checks for every store:

- A key holds all the bytes of one operation, or nothing.  No reader ever sees a part of them.
- An operation that returned is visible to every client, and survives a crash (``durable=False`` promises neither
  order nor survival: after a crash such a key may hold anything).
- **An operation that raised may have happened, may not have happened, or, where ``caps.lands_late``, may happen
  later.**  Repeating it is safe: every verb is idempotent.
- Absence is an answer (``None``, ``False``, :class:`Missing`); "cannot tell" is a :class:`StorageError`.
- Names that end in ``.partial`` belong to the store: what an operation that did not finish has left.  ``list`` shows
  them, so that their owner can delete them; a key that ends so is refused by every verb that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from stillframe.errors import StorageError

Data: TypeAlias = "bytes | bytearray | memoryview"

PARTIAL = ".partial"

_SMALL_BYTES = 128 << 10
"""Of nearly all values, seals of a few hundred tensors included."""


class Missing(StorageError):
    """The key is not there."""


class NotOurs(StorageError):
    """Something is there that no store of ours has made: a link, a pipe, a device, a directory, a stranger's file."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do.  It changes how bytes are moved, never what is promised."""

    is_direct: bool = False
    """Block-aligned buffers go straight to the device."""
    lands_late: bool = False
    """An operation that raised may still happen."""
    lists_fresh: bool = False
    """No client's listing comes from a cache of its own."""
    is_memory: bool = False
    is_on_this_node: bool = False
    """No other node writes to it."""


@dataclass(frozen=True, slots=True)
class Info:
    """What :meth:`Store.head` tells."""

    size: int
    is_ours: bool = True
    """``False``: reading it raises :class:`NotOurs`."""


class Writer(Protocol):
    """One blob in the making; invisible until :meth:`finish` returns.  Thread: :meth:`write_at` from any."""

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write at any offset, in any order.  Where ``caps.is_direct``, address, length and offset that are multiples
        of 4096 are fastest; the last block may reach beyond the size.  Raises :class:`StorageError`."""

    def reuse(self, offset: int, nbytes: int) -> bool:
        """Whether an earlier attempt at this copy has written just these bytes: then they are taken as they are."""

    def finish(self) -> None:
        """Give the blob its key, complete and durable.  Blocks.

        Raises :class:`StorageError`: then write it all again, with a new writer.
        """

    def abort(self) -> None:
        """Give the blob up.  Does nothing after :meth:`finish`; may be called at any time, and again.  Never raises."""


def _lends_nothing(_start: int, _length: int) -> None:
    return None


class Opened(NamedTuple):
    """What a key holds: as it was when it was opened, as long as that is there; after that, as it is then."""

    info: Info | None
    """As :meth:`Store.head` tells it."""
    read: Callable[[int, memoryview], int]
    """As :meth:`Store.read`."""
    lend: Callable[[int, int], memoryview | None] = _lends_nothing
    """``lend(start, length)``: these bytes, or as many as there are, in memory of the store's own, which lasts as long
    as the view: what comes by requests is there before anybody can say where it should go.  ``None``: read them."""


class Store(Protocol):
    """Thread: every method is safe from any."""

    @property
    def caps(self) -> Capabilities: ...

    def where(self, key: str = "") -> str:
        """The path or URL of a key, for messages; of the root if the key is empty."""

    def put(self, key: str, data: Data, durable: bool = True) -> None:
        """Store the bytes under the key, in the place of what it held."""

    def put_new(self, key: str, data: Data) -> bool:
        """Store the bytes if the key is free.  Returns whether the key holds these bytes now.

        ``False``: it held other bytes before, and still does.  Of several clients that put different bytes, one wins.
        Clients that put *equal* bytes are all told ``True``, because a client whose reply was lost asks again: to win
        alone, put something unique into the bytes.

        The key never survives a crash without what its directory held when this was called, whoever had put that: so
        a manifest can name the seals of other ranks.
        """

    def writer(self, key: str, size: int, *, copy_of: str = "") -> Writer:
        """Begin a blob of ``size`` bytes, which gets the key when it is finished.

        ``copy_of``: a digest of the bytes.  Others may be writing the same under this key, and one of them may have
        finished: none of them takes from the key what another has given it.  What an attempt before has left may be
        used (:meth:`Writer.reuse`).
        """

    def read(self, key: str, start: int, into: memoryview) -> int:
        """Fill ``into`` from byte ``start`` on; fewer bytes come only at the end.  Raises :class:`Missing`."""

    def head(self, key: str) -> Info | None:
        """The size of what the key holds; ``None`` if it holds nothing."""

    def list(self, directory: str = "") -> Iterator[str]:
        """The names directly below a directory (``""``: the root), in any order; those of directories end with ``/``.

        A directory may still be listed when its last key is gone.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Remove the keys; one that is gone already is no error.  All of them are tried before it raises.

        A name that ends with ``/`` is a directory: it is removed if nothing is below it.
        """


def read_all(store: Store, key: str, limit: int) -> bytes:
    """All bytes of a small value.  Raises :class:`Missing`; :class:`NotOurs`, also if it exceeds ``limit`` bytes."""
    small = min(limit, _SMALL_BYTES)
    data = read_range(store, key, 0, small + 1)
    if len(data) <= small:
        return data  # in one request
    info = store.head(key)
    if info is None:
        raise Missing(f"{store.where(key)} is not there")
    if info.size > limit:
        raise NotOurs(f"{store.where(key)} has {info.size} bytes, more than the {limit} allowed")
    return read_range(store, key, 0, info.size)


def read_range(store: Store, key: str, start: int, count: int) -> bytes:
    """``count`` bytes from byte ``start`` on, or as many as there are.  Raises :class:`Missing`."""
    buffer = bytearray(count)
    return bytes(memoryview(buffer)[: store.read(key, start, memoryview(buffer))])


def check_key(key: str) -> list[str]:
    """The names that a key consists of.  Raises :class:`StorageError` for one that could lead out of the root."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or not _is_encodable(key):
        raise StorageError(f"{key!r} is not a key: give plain names, separated by '/'")
    return parts


def check_new_key(key: str) -> list[str]:
    """As :func:`check_key`, for a key that is to be written: names of the store's own are refused, too."""
    if key.endswith(PARTIAL):
        raise StorageError(f"{key!r} ends in {PARTIAL!r}: such names belong to the store")
    return check_key(key)


def _is_encodable(key: str) -> bool:
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
