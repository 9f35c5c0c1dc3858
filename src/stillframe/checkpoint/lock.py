"""One writer per root: the keeper of a rank holds an exclusive lock for as long as it lives.

A run that is started again at once must not race with the keeper of the run before, which may
still be committing what that one had staged: it waits here until that keeper has finished, and
so also resumes from the newest checkpoint there is.  The lock's file says who holds it.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Literal

import msgspec

from stillframe.errors import BusyError
from stillframe.format import names

State = Literal["training", "finishing"]
GRACE_S = 5.0
FINISH_S = 240.0
"""Less than what a trainer waits for its keeper (link.process.STALL_S)."""
_POLL_S = 0.05
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


class Holder(msgspec.Struct, frozen=True):
    """What the lock's file says of whoever holds the lock, or held it last."""

    pid: int
    host: str
    attempt: str
    state: State
    failure: str = ""
    """Why the last save could not be committed, when no trainer was left to be told."""


class Life(enum.Enum):
    """What a rank's lock says of its keeper of a given attempt."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It never held the lock, as far as the file tells: it starts still, or somebody has taken its place."""


def life_of(root: Path, rank: int, attempt: str) -> Life:
    """Looked up without waiting."""
    try:
        fd = os.open(root / names.lock(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return Life.UNKNOWN
    try:
        holder = _read(fd)
        if holder is None or holder.attempt != attempt:
            return Life.UNKNOWN
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Life.ALIVE
    except OSError:
        return Life.UNKNOWN
    finally:
        os.close(fd)
    return Life.GONE


def is_held(root: Path, rank: int) -> bool:
    """Whether any keeper holds this rank's lock, as far as can be told; where there are no locks, nobody does."""
    try:
        fd = os.open(root / names.lock(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    finally:
        os.close(fd)
    return False


def holder_of(root: Path, rank: int) -> Holder | None:
    """Whoever holds this rank's lock, or held it last, as far as its file tells."""
    try:
        fd = os.open(root / names.lock(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(fd)
    finally:
        os.close(fd)


def _read(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None


class RootLock:
    """Durability: the lock dies with the process, however that ends."""

    def __init__(self, root: Path, rank: int, attempt: str) -> None:
        self._path = root / names.lock(rank)
        self._attempt = attempt
        self._fd = -1
        self._is_unsupported = False
        self.previous_failure = ""

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    @property
    def is_supported(self) -> bool:
        return not self._is_unsupported

    @property
    def is_wanted(self) -> bool:
        """Not held yet, on a file system that may have locks."""
        return self._fd < 0 and not self._is_unsupported

    def acquire(self) -> None:
        """Blocks while a keeper whose trainer is gone finishes.

        Raises: :class:`BusyError` if a living run has the root, or the finishing one takes too long;
        ``OSError`` if the root cannot be locked at all.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _read(fd)
                waited_s = time.monotonic() - began
                limit_s = FINISH_S if holder is not None and holder.state == "finishing" else GRACE_S
                if waited_s > limit_s:
                    os.close(fd)
                    raise BusyError(self._refusal(holder)) from None
                time.sleep(_POLL_S)
            except OSError as error:
                os.close(fd)
                if error.errno in NO_LOCKS:
                    self._is_unsupported = True
                    return
                raise
            else:
                break
        holder = _read(fd)
        self.previous_failure = holder.failure if holder else ""
        self._fd = fd
        self.note("training")

    def note(self, state: State, failure: str = "") -> None:
        """Say in the file what the holder is doing; best effort, it decides nothing but how long others wait."""
        if self._fd < 0:
            return
        data = msgspec.json.encode(Holder(os.getpid(), socket.gethostname(), self._attempt, state, failure[:2000]))
        try:
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
        except OSError:
            pass  # a full disk; the lock itself holds

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _refusal(self, holder: Holder | None) -> str:
        who = f"pid {holder.pid} on {holder.host} ({holder.state})" if holder else "another process"
        return (
            f"{self._path.parent} is being written by another run: {who}. "
            "One run writes to a root: stop the other one, or give this one its own root"
        )
