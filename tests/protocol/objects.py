"""The real :class:`ObjectStore` over objects in memory: what happens, happens to single requests."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from obstore.store import MemoryStore as Nowhere

from stillframe.store.memory import MemoryBackend
from stillframe.store.objects import ObjectStore
from stillframe.store.protocol import Data, Missing
from stillframe.store.server import Found

Perform = Callable[[str, str, Callable[[], Any]], Any]


class Object(bytes):
    """What is stored under a path, with its attributes."""

    attributes: Mapping[str, str] = {}

    @classmethod
    def of(cls, data: Data, attributes: Mapping[str, str] | None) -> Object:
        found = cls(data)
        found.attributes = attributes or {}
        return found

    @property
    def tag(self) -> str:
        return f"{zlib.crc32(self):08x}"


class Requests:
    """Stands for :class:`stillframe.store.server.Server`: every request is one operation of the replay."""

    def __init__(self, backend: Callable[[], MemoryBackend], perform: Perform) -> None:
        self._backend, self._perform = backend, perform

    @property
    def _blobs(self) -> dict[str, bytes]:
        return self._backend().blobs

    def hastily(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _find(self, path: str) -> Object:
        found = self._blobs.get(path)
        if found is None:
            raise Missing(f"{path} is not there")
        return found if isinstance(found, Object) else Object.of(found, None)

    def put(self, path: str, data: Data, attributes: dict[str, str] | None = None) -> None:
        value = Object.of(data, attributes)
        self._perform("put", path, lambda: self._blobs.update({path: value}))

    def put_if_free(self, path: str, data: Data, attributes: dict[str, str] | None = None) -> bool:
        value = Object.of(data, attributes)
        return bool(self._perform("put_new", path, lambda: self._blobs.setdefault(path, value) is value))

    def get(
        self, path: str, start: int = 0, end: int | None = None, unless: str = "", limit: int | None = None
    ) -> Found | None:
        def work() -> Found | None:
            found = self._find(path)
            if found.tag == unless:
                return None
            data = found[start:end] if limit is None or len(found) <= limit else b""
            return Found(memoryview(data), found.attributes, len(found), found.tag)

        answer: Found | None = self._perform("read", path, work)
        return answer

    def read(self, path: str, start: int, into: memoryview) -> int:
        found = self.get(path, start, start + len(into))
        assert found is not None
        into[: len(found.data)] = found.data
        return len(found.data)

    def head(self, path: str) -> Found | None:
        def work() -> Found | None:
            if path not in self._blobs:
                return None
            found = self._find(path)
            return Found(memoryview(b""), found.attributes, len(found), found.tag)

        answer: Found | None = self._perform("head", path, work)
        return answer

    def list(self, prefix: str) -> tuple[dict[str, int], Sequence[str]]:
        above = f"{prefix}/" if prefix else ""

        def work() -> tuple[dict[str, int], list[str]]:
            below = {path.removeprefix(above): data for path, data in self._blobs.items() if path.startswith(above)}
            values = {name: len(data) for name, data in sorted(below.items()) if "/" not in name}
            return values, sorted({name.partition("/")[0] for name in below if "/" in name})

        answer: tuple[dict[str, int], Sequence[str]] = self._perform("list", prefix, work)
        return answer

    def list_below(self, prefix: str) -> Sequence[str]:
        answer: Sequence[str] = self._perform(
            "list", prefix, lambda: sorted(path for path in self._blobs if path.startswith(f"{prefix}/"))
        )
        return answer

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._perform("delete", path, partial(self._blobs.pop, path, None))


class MemoryObjects(ObjectStore):
    """One client that nothing happens to."""

    def __init__(self, backend: MemoryBackend, perform: Perform | None = None) -> None:
        super().__init__(Nowhere(), "memory:")
        self.backend = backend
        requests: Any = Requests(lambda: self.backend, perform or (lambda _verb, _path, work: work()))
        self.server = requests


def token_hexes() -> Callable[[int], str]:
    """In place of ``secrets.token_hex``: the same in every replay."""
    numbers = itertools.count(1)
    return lambda size: f"{next(numbers):0{2 * size}x}"
