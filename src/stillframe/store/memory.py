"""The store in memory: the whole contract of :mod:`.protocol`, and faults on request.

Several :class:`MemoryStore` clients share one :class:`MemoryBackend`.  A fault is chosen for each operation by a
function that is given the verb and the key; the verbs are ``put``, ``put_new``, ``write_at``, ``finish``, ``read``,
``head``, ``list`` and ``delete`` (which is asked once for each key).  No names that end in ``.partial`` exist here.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from stillframe.errors import StorageError
from stillframe.store.protocol import Capabilities, Data, Info, Missing, check_key, check_new_key

_T = TypeVar("_T")


class Fault(enum.Enum):
    """What becomes of an operation that raises."""

    REFUSED = "it did not happen"
    REPLY_LOST = "it happened"
    LATE = "it happens later"


Inject: TypeAlias = "Callable[[str, str], Fault | None]"
"""(verb, key) → the fault of this operation; ``None``: it succeeds."""


class MemoryBackend:
    """What the clients share.  ``lands_late``: whether :attr:`Fault.LATE` may be asked for.  Thread: safe from any."""

    def __init__(self, lands_late: bool = False) -> None:
        self.lands_late = lands_late
        self.lock = threading.RLock()
        self.blobs: dict[str, bytes] = {}
        self._late: list[Callable[[], object]] = []

    def land(self) -> None:
        """Every operation that raised and was to happen later happens now, in the order of the calls."""
        with self.lock:
            late, self._late = self._late, []
            for work in late:
                with contextlib.suppress(Missing):  # the answer to a read: nobody hears it
                    work()

    def perform(self, work: Callable[[], _T], fault: Fault | None, doing: str) -> _T:
        with self.lock:
            if fault is Fault.LATE:
                if not self.lands_late:
                    raise ValueError("a fault that lands late, in a store that says it has none")
                self._late.append(work)
            elif fault is not Fault.REFUSED:
                answer = work()
                if fault is None:
                    return answer
        raise StorageError(f"{doing}: an injected fault; try again")


class MemoryStore:
    """One client.  Implements :class:`~stillframe.store.protocol.Store`."""

    def __init__(self, backend: MemoryBackend | None = None, inject: Inject | None = None) -> None:
        self.backend = backend or MemoryBackend()
        self._inject = inject

    @property
    def caps(self) -> Capabilities:
        return Capabilities(is_memory=True, is_on_this_node=True, lands_late=self.backend.lands_late)

    def where(self, key: str = "") -> str:
        return f"memory:{key}"

    def perform(self, verb: str, key: str, work: Callable[[], _T]) -> _T:
        fault = self._inject(verb, key) if self._inject else None
        return self.backend.perform(work, fault, f"{verb} of {self.where(key)}")

    def put(self, key: str, data: Data, durable: bool = True) -> None:
        check_new_key(key)
        value = bytes(data)
        self.perform("put", key, lambda: self.backend.blobs.update({key: value}))

    def put_new(self, key: str, data: Data) -> bool:
        check_new_key(key)
        value = bytes(data)
        return self.perform("put_new", key, lambda: self.backend.blobs.setdefault(key, value) == value)

    def writer(self, key: str, size: int, *, copy_of: str = "") -> MemoryWriter:
        check_new_key(key)
        return MemoryWriter(self, key, size)

    def read(self, key: str, start: int, into: memoryview) -> int:
        check_key(key)

        def work() -> int:
            blob = self.backend.blobs.get(key)
            if blob is None:
                raise Missing(f"{self.where(key)} is not there")
            part = blob[start : start + len(into)]
            into[: len(part)] = part
            return len(part)

        return self.perform("read", key, work)

    def head(self, key: str) -> Info | None:
        check_key(key)

        def work() -> Info | None:
            blob = self.backend.blobs.get(key)
            return None if blob is None else Info(len(blob))

        return self.perform("head", key, work)

    def list(self, directory: str = "") -> Iterator[str]:
        prefix = "/".join(check_key(directory)) + "/" if directory else ""

        def work() -> set[str]:
            below = [key.removeprefix(prefix).partition("/") for key in self.backend.blobs if key.startswith(prefix)]
            return {name + slash for name, slash, _ in below}

        return iter(self.perform("list", directory, work))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key.removesuffix("/"))
        failure: StorageError | None = None
        for key in (each for each in keys if not each.endswith("/")):  # directories are made of keys alone
            try:
                self._remove(key)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _remove(self, key: str) -> None:
        self.perform("delete", key, lambda: self.backend.blobs.pop(key, None))


class MemoryWriter:
    """A blob in the making.  Implements :class:`~stillframe.store.protocol.Writer`."""

    def __init__(self, store: MemoryStore, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self._bytes: bytearray | None = bytearray(size)

    def write_at(self, data: memoryview, offset: int) -> None:
        kept = bytes(data[: max(self._size - offset, 0)])  # the last block may reach beyond the size
        content = self._content()

        def work() -> None:
            content[offset : offset + len(kept)] = kept

        self._store.perform("write_at", self._key, work)

    def reuse(self, offset: int, nbytes: int) -> bool:
        return False

    def finish(self) -> None:
        value = bytes(self._content())
        self._store.perform("finish", self._key, lambda: self._store.backend.blobs.update({self._key: value}))
        self.abort()

    def abort(self) -> None:
        self._bytes = None

    def _content(self) -> bytearray:
        if self._bytes is None:
            raise StorageError(f"{self._store.where(self._key)} was finished or given up")
        return self._bytes
