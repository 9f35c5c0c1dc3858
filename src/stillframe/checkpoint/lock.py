"""Who is at work in a root: the keeper of a rank holds a lock for as long as it lives, and says in it what it does.

A run that is started again at once must not race with the keeper of the run before, which may still be committing what
that one had staged: it waits here until that keeper has finished, and so also resumes from the newest checkpoint.
"""

from __future__ import annotations

import enum
import os
import socket
import time
from typing import Literal

import msgspec

from stillframe.errors import BusyError, StorageError
from stillframe.format import names
from stillframe.store.lock import FileLock, NoLocks
from stillframe.store.protocol import Missing, Store

State = Literal["training", "finishing"]
GRACE_S = 5.0
FINISH_S = 240.0
"""Less than what a trainer waits for its keeper to be ready."""
_POLL_S = 0.05


class Owner(msgspec.Struct, frozen=True):
    """What the lock's file says of whoever holds the lock, or held it last."""

    pid: int
    host: str
    run: str
    state: State
    failure: str = ""
    """Why the last save could not be committed, when no trainer was left to be told."""

    @property
    def doing(self) -> str:
        """For people to read."""
        return "a run is active here" if self.state == "training" else "the run has ended; its keeper still writes"


class Life(enum.Enum):
    """What a rank's lock says of its keeper of a given run."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It never held the lock, as far as the file tells: it starts still, or somebody has taken its place."""


def life_of(store: Store, rank: int, run: str) -> Life:
    """Looked up without waiting."""
    try:
        with FileLock(store, names.lock(rank), is_shared=True) as lock:
            owner = _read(lock)
            if owner is None or owner.run != run:
                return Life.UNKNOWN
            return Life.GONE if lock.acquire() else Life.ALIVE
    except (StorageError, NoLocks):
        return Life.UNKNOWN


def is_held(store: Store, rank: int) -> bool:
    """Whether any keeper holds this rank's lock, as far as can be told; where there are no locks, nobody does."""
    try:
        with FileLock(store, names.lock(rank), is_shared=True) as lock:
            return not lock.acquire()
    except (Missing, NoLocks):
        return False
    except StorageError:
        return True


def owner_of(store: Store, rank: int) -> Owner | None:
    """Whoever holds this rank's lock, or held it last, as far as its file tells."""
    try:
        with FileLock(store, names.lock(rank), is_shared=True) as lock:
            return _read(lock)
    except (StorageError, NoLocks):
        return None


def _read(lock: FileLock) -> Owner | None:
    try:
        return msgspec.json.decode(lock.read(), type=Owner)
    except ValueError:  # msgspec's own errors, and text that is not UTF-8
        return None


class RootLock:
    """One rank's lock; it goes with the process, however that ends."""

    def __init__(self, store: Store, rank: int, run: str) -> None:
        self._store = store
        self._key = names.lock(rank)
        self._run = run
        self._lock: FileLock | None = None
        self.is_supported = True
        self.previous_failure = ""

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    @property
    def is_wanted(self) -> bool:
        """Not held yet, in a store that may have locks; or held no more, since somebody has removed the file."""
        return self.is_supported and (self._lock is None or not self._lock.is_current())

    def acquire(self) -> None:
        """Blocks while a keeper whose trainer is gone finishes.

        Raises: :class:`BusyError` if a living run has the root, or the finishing one takes too long;
        :class:`StorageError` if the root cannot be locked at all.
        """
        self.release()
        while self._lock is None:
            try:
                lock = FileLock(self._store, self._key, is_made=True)
                try:
                    self._take(lock)
                finally:
                    if self._lock is not lock:
                        lock.close()
            except NoLocks:
                self.is_supported = False
                return
        owner = _read(self._lock)
        self.previous_failure = owner.failure if owner else ""
        self.note("training")

    def _take(self, lock: FileLock) -> None:
        """Wait for the lock, and keep it if it is still the root's own.

        One that may not be written to (it has a second name in a copy made of hard links, or is another user's) is
        replaced by a fresh file while it is locked: whoever comes next finds that one.
        """
        self._wait(lock)
        if lock.is_current():
            if lock.is_changeable():
                self._lock = lock
            else:
                self._store.put(self._key, b"", durable=False)

    def _wait(self, lock: FileLock) -> None:
        began = time.monotonic()
        while not lock.acquire():
            owner = _read(lock)
            limit_s = FINISH_S if owner is not None and owner.state == "finishing" else GRACE_S
            if time.monotonic() - began > limit_s:
                who = f"pid {owner.pid} on {owner.host} ({owner.state})" if owner else "another process"
                raise BusyError(
                    f"{self._store.where()} is being written by another run: {who}. "
                    "One run writes to a root: stop the other one, or give this one its own root"
                )
            time.sleep(_POLL_S)

    def note(self, state: State, failure: str = "") -> None:
        """Say in the file what the holder is doing; best effort, it decides nothing but how long others wait."""
        if self._lock is not None:
            owner = Owner(os.getpid(), socket.gethostname(), self._run, state, failure[:2000])
            self._lock.write(msgspec.json.encode(owner))

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None
