"""Blobs in an object store, in the making: a part for every ``write_at``, then the index (:mod:`.objects`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from stillframe.errors import StillframeError, StorageError

if TYPE_CHECKING:
    from stillframe.store.objects import ObjectStore


class ObjectWriter:
    """A blob in the making.  ``left``: of a copy, the parts that others have put, by offset; no writer removes them."""

    def __init__(self, store: ObjectStore, key: str, size: int, nonce: str, left: dict[int, int] | None = None) -> None:
        self._store, self._key, self._size, self._nonce, self._left = store, key, size, nonce, left
        self._parts: dict[int, int] = {}
        self._is_over = False
        self._may_be_there = False
        """The index was put, and nobody knows whether it arrived: without its parts it would be a lie."""

    def write_at(self, data: memoryview, offset: int) -> None:
        self._check()
        kept = data[: max(self._size - offset, 0)]  # the last block may reach beyond the size
        if len(kept):
            self._store.put_part(self._key, self._nonce, offset, kept)
            self._parts[offset] = len(kept)

    def reuse(self, offset: int, nbytes: int) -> bool:
        length = min(nbytes, self._size - offset)
        is_there = length > 0 and self._left is not None and self._left.get(offset) == length
        if is_there:
            self._parts[offset] = length
        return is_there

    def finish(self) -> None:
        self._check()
        self._may_be_there = True
        parts, is_copy = sorted(self._parts.items()), self._left is not None
        self._store.put_index(self._key, self._nonce, self._size, parts, is_copy)
        self._is_over = True

    def abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            if not self._may_be_there and self._left is None:
                with contextlib.suppress(StillframeError):
                    self._store.remove_parts(self._key, self._nonce)

    def _check(self) -> None:
        if self._is_over:
            raise StorageError(f"{self._store.where(self._key)} was finished or given up")
