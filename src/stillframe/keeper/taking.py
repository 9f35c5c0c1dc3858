"""Taking the root: reached, locked, and whatever has to begin then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stillframe.checkpoint.lock import RootLock
from stillframe.errors import StorageError
from stillframe.format import names
from stillframe.store.protocol import Store

_REMEMBERED_S = 30.0
"""So long a server that was not reached is not asked again for somebody who waits."""


class Taking:
    """``taken``: called when the root is ours; may be called again.  Thread: safe from any."""

    def __init__(self, store: Store, lock: RootLock, taken: Callable[[], None]) -> None:
        self._store = store
        self._lock = lock
        self._taken = taken
        self._taking = threading.Lock()
        self._failed: tuple[float, StorageError] | None = None

    def take(self, is_awaited: bool = False) -> None:
        """The root is there and ours; asked at each save: it may not have been writable before, or was removed.

        ``is_awaited``: a person waits for the answer.  Raises :class:`BusyError`, :class:`StorageError`.
        """
        with self._taking:  # asked by two threads: they must not meet each other's lock
            if self._lock.is_wanted:
                self._reach(is_awaited)
                self._lock.acquire()
                self._taken()

    def _reach(self, is_awaited: bool) -> None:
        """A server that is down is found out by one request, and not by each of many."""
        if not self._store.caps.lands_late:
            return  # a file system; its lock tells
        if is_awaited and self._failed is not None and time.monotonic() - self._failed[0] < _REMEMBERED_S:
            raise self._failed[1]
        try:
            list(self._store.list(names.RUN))
        except StorageError as error:
            self._failed = time.monotonic(), error
            raise
