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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stillframe.errors import StorageError

Data: TypeAlias = "bytes | bytearray | memoryview"

PARTIAL = ".partial"


class Missing(StorageError):
    """The key is not there."""


class NotOurs(StorageError):
    """Something is there that no store of ours has made: a link, a pipe, a device, a directory, a stranger's file."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store is like; it changes how bytes are moved, never what is promised."""

    is_direct: bool = False
    """Block-aligned buffers go straight to the device."""
    lands_late: bool = False
    """An operation that raised may still happen."""
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

    def finish(self) -> None:
        """The blob has its key, whole and durable.  Blocks.  Raises :class:`StorageError`: then write it all again."""

    def abort(self) -> None:
        """Give it up; may be called at any time, again, and after :meth:`finish`.  Never raises."""


class Store(Protocol):
    """Thread: every method is safe from any."""

    @property
    def caps(self) -> Capabilities: ...

    def where(self, key: str = "") -> str:
        """The key as a person would write it: a path or a URL, for messages."""

    def put(self, key: str, data: Data, durable: bool = True) -> None:
        """The key holds these bytes, whatever it held."""

    def put_new(self, key: str, data: Data) -> bool:
        """Whether the key holds these bytes now; ``False``: it holds other bytes, that were there before.

        Of several clients one wins.  Clients that put *equal* bytes are all told ``True`` (that is how a client whose
        reply was lost recognises its own): put something of your own into them.  The key never survives a crash without
        what its directory held when this was called, whoever had put that: so a manifest can name others' seals.
        """

    def writer(self, key: str, size: int) -> Writer:
        """A blob of this size that is to become the key."""

    def read(self, key: str, start: int, into: memoryview) -> int:
        """Fill ``into`` from byte ``start`` on; fewer bytes come only at the end.  Raises :class:`Missing`."""

    def head(self, key: str) -> Info | None:
        """What is there; ``None``: nothing is."""

    def list(self, directory: str = "") -> Iterator[str]:
        """The names below a directory (``""``: the root), in any order; of those with names below them, with ``/``.

        A directory may still be listed when its last key is gone.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """None of them is there; what was gone already is fine.  All of them are tried before it raises.

        A directory's name with ``/`` removes what is left of the directory itself, if nothing is below it.
        """


def read_all(store: Store, key: str, limit: int) -> bytes:
    """A whole small value.  Raises :class:`Missing`; :class:`NotOurs`, also if it exceeds the limit."""
    info = store.head(key)
    if info is None:
        raise Missing(f"{store.where(key)} is not there")
    if info.size > limit:
        raise NotOurs(f"{store.where(key)} has {info.size} bytes, more than the {limit} allowed")
    return read_part(store, key, 0, info.size)


def read_part(store: Store, key: str, start: int, count: int) -> bytes:
    """So many bytes from there on, or as many as there are.  Raises :class:`Missing`."""
    buffer = bytearray(count)
    return bytes(memoryview(buffer)[: store.read(key, start, memoryview(buffer))])


def check_key(key: str) -> list[str]:
    """Its names; a key that could lead anywhere else is refused."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or not _is_encodable(key):
        raise StorageError(f"{key!r} is not a key: give plain names, separated by '/'")
    return parts


def check_new_key(key: str) -> list[str]:
    """The names of a key that is to be written."""
    if key.endswith(PARTIAL):
        raise StorageError(f"{key!r} ends in {PARTIAL!r}: such names belong to the store")
    return check_key(key)


def _is_encodable(key: str) -> bool:
    try:
        key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
