"""Who is at work in a root: the keeper of a rank holds a lock for as long as it lives, and says in it what it does.

A run that is started again at once must not race with the keeper of the run before, which may still be committing what
that one had staged: it waits here until that keeper has finished, and so also resumes from the newest checkpoint.  It
waits as long as that keeper says, in the note that is the lock's file, that it lives and gets on.
"""

from __future__ import annotations

import enum
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from stillframe.errors import BusyError, StorageError
from stillframe.format import names
from stillframe.link.liveness import Patience, Pulse
from stillframe.store.lock import NOTE_BYTES, FileLock, NoLocks
from stillframe.store.protocol import Missing, Store
from stillframe.untrusted import decode_json
from stillframe.waits import Wait

State = Literal["training", "finishing"]
GRACE_S = 5.0
"""So long a living run may take to notice that it has ended."""
_POLL_S, _LONGEST_S = 0.05, 0.5
_SLOWER = 1.5
_TELL_FIRST_S, _TELL_S = 2.0, 10.0
_READS = 3


class Note(msgspec.Struct, frozen=True):
    """What a keeper says of itself."""

    state: State = "training"
    failure: str = ""
    """Why the last save could not be committed, when no trainer was left to be told."""
    pulse: Pulse = Pulse()


class Owner(msgspec.Struct, frozen=True):
    """What the lock's file says of whoever holds the lock, or held it last."""

    pid: int
    host: str
    run: str
    state: State
    failure: str = ""
    """As in :class:`Note`."""
    pulse: Pulse = Pulse()
    trainer: int = 0
    """The pid of the process that it keeps for; 0 if it does not say."""

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


def wait_finished(store: Store) -> bool:
    """Block until no keeper whose trainer is gone is at work here.  Whether nobody is: else a run trains here.

    Writes nothing.  Waits as long as such a keeper gets on; where there are no locks, for nobody.
    Raises: :class:`BusyError` if one hangs; :class:`StorageError` if the root cannot be read.
    """
    ranks = [rank for name in store.list(names.RUN) if (rank := names.parse_lock(name)) is not None]
    return all(_wait_for_end(store, rank) for rank in sorted(ranks))


def _wait_for_end(store: Store, rank: int) -> bool:
    wait = Wait(f"the keeper of a run that has ended, in {store.where()}", None)
    patience, waited_s = Patience(), 0.0
    while is_held(store, rank):
        owner = owner_of(store, rank)
        if owner is None or owner.state == "training":
            if waited_s > GRACE_S:  # a keeper may take a moment to notice that its trainer is gone
                return False
        else:
            patience.heard(owner.pulse)
            if patience.verdict:
                raise _stuck(store, owner, patience.verdict)
            wait.turn(owner.pulse.doing)
        time.sleep(_POLL_S)
        patience.waited(_POLL_S)
        waited_s += _POLL_S
    return True


def _read(lock: FileLock) -> Owner | None:
    for _ in range(_READS):  # one that is being written may be seen in part
        note = lock.read()
        try:
            return decode_json(note, Owner)
        except ValueError:
            if not note.strip():
                break
    return None


def _encode(owner: Owner) -> bytes:
    """With as much of the failure as fits into a note."""
    while len(data := msgspec.json.encode(owner)) > NOTE_BYTES:
        owner = msgspec.structs.replace(owner, failure=owner.failure[: len(owner.failure) * 3 // 4])
    return data


class RootLock:
    """One rank's lock; it goes with the process, however that ends.

    ``says``: what the holder has to say of itself, asked when the note is written.  ``tell``: told now and then what is
    being waited for.  ``trainer``: the pid of the process that this is for.
    Thread: :meth:`note` from any; the rest from one at a time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        run: str,
        says: Callable[[], Note] = Note,
        tell: Callable[[str], None] = lambda _text: None,
        trainer: int = 0,
    ) -> None:
        self._store = store
        self._key = names.lock(rank)
        self._run = run
        self._says = says
        self._tell = tell
        self._trainer = trainer
        self._lock: FileLock | None = None
        self._noting = threading.Lock()
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

        Raises: :class:`BusyError` if a living run has the root, or the finishing one says nothing more, or hangs;
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
        self.note()

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
        waited_s, pause_s, told_s = 0.0, _POLL_S, _TELL_FIRST_S - _TELL_S
        holder, since_s, patience = None, 0.0, Patience()
        while not lock.acquire():
            owner = _read(lock)
            if owner is not None and (owner.pid, owner.host, owner.state) != holder:
                holder, since_s, patience = (owner.pid, owner.host, owner.state), waited_s, Patience()
            if owner is None or owner.state == "training":
                if waited_s - since_s > GRACE_S:
                    raise self._busy(owner)
            else:
                patience.heard(owner.pulse)
                if patience.verdict:
                    raise _stuck(self._store, owner, patience.verdict)
                if waited_s - told_s >= _TELL_S:
                    told_s = waited_s
                    self._tell(f"waiting for {_who(owner)}: it is {owner.pulse.doing or 'at work'} ({waited_s:.0f} s)")
            time.sleep(pause_s)
            patience.waited(pause_s)
            waited_s += pause_s
            pause_s = min(pause_s * _SLOWER, _LONGEST_S)

    def _busy(self, owner: Owner | None) -> BusyError:
        if owner and owner.trainer and (owner.trainer, owner.host) == (self._trainer, socket.gethostname()):
            return BusyError(
                f"{self._store.where()} is open in another Checkpointer of this same process (pid {owner.trainer}): "
                "use that one, or close() it before this one saves or restores"
            )
        who = "another process" if owner is None else f"its keeper is process {owner.pid} on {owner.host}"
        if owner is not None and owner.trainer:
            who = f"process {owner.trainer} trains there, and {who}"
        return BusyError(
            f"{self._store.where()} is being written by another run: {who}. "
            "One run writes to a root: stop the other one, or give this one its own root. To read only, use "
            "stillframe.restore() or stillframe.load()"
        )

    def note(self) -> None:
        """Say in the file what the holder is doing; best effort, it decides nothing but how long others wait."""
        with self._noting:  # asked and written as one: a later word never gets under an earlier one
            if self._lock is not None:
                said = self._says()
                owner = Owner(
                    os.getpid(), socket.gethostname(), self._run, said.state, said.failure[:2000], said.pulse,
                    self._trainer,
                )  # fmt: skip
                self._lock.write(_encode(owner))

    def release(self) -> None:
        with self._noting:
            if self._lock is not None:
                self._lock.close()
            self._lock = None


def _stuck(store: Store, owner: Owner, verdict: str) -> BusyError:
    return BusyError(
        f"{store.where()} is held by {_who(owner)}, which {verdict} What it has not committed by now is lost "
        "if you end it; then start this run again"
    )


def _who(owner: Owner) -> str:
    return f"the keeper of the run before (pid {owner.pid} on {owner.host})"
