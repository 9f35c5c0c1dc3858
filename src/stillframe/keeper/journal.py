"""What the keeper tells about its work (:mod:`stillframe.format.events`): how far each save is, and when."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stillframe import version
from stillframe.checkpoint.events import DIRECTORY, MAX_BYTES, event_files
from stillframe.format import events
from stillframe.format.events import InFlight
from stillframe.keeper.commit import Terms
from stillframe.keeper.segment import Flush
from stillframe.link import messages
from stillframe.retention import Keep
from stillframe.store import durable

_PERIOD_S = 1.0
_MAX_ATTEMPTS = 20
"""Of a rank, whose events are kept."""
_MAX_WAITING = 10_000
_CLOSE_S = 2.0


class Journal:
    """Thread: safe from any."""

    def __init__(self, terms: Terms, rank: int, keep: Keep, flushes: Callable[[], Sequence[Flush]]) -> None:
        self._terms = terms
        self._rank = rank
        self._run = events.KeeperStarted(
            time.time(), rank, terms.world_size, terms.attempt, socket.gethostname(), os.getpid(),
            version.VERSION, keep.last, keep.every,
        )  # fmt: skip
        self._log: EventLog | None = None
        self._flushes = flushes
        self._unix_s = time.time() - time.monotonic()
        """The trainer's monotonic clock is ours: it is the machine's."""
        self._lock = threading.Lock()
        self._told_s = 0.0
        self.arena_bytes = 0

    def begin(self) -> None:
        """The root is ours; nothing is told before."""
        if self._log is None:
            with contextlib.suppress(OSError):
                forget(self._terms.root, self._rank, _MAX_ATTEMPTS)
            self._log = EventLog(self._terms.root, self._rank, self._terms.attempt, self._run)

    def _write(self, event: events.Event) -> None:
        if self._log is not None:
            self._log.write(event)

    def updates(self, made: Sequence[tuple[float, float]]) -> None:
        if made:
            found = [events.Update(at_s + self._unix_s, waited_s) for at_s, waited_s in made]
            self._write(events.Updates(time.time(), found))

    def restored(self, message: messages.Restored) -> None:
        passed_over = list(message.passed_over)
        self._write(events.Restore(time.time(), message.step, message.bytes, message.seconds, passed_over))

    def ended(self, flush: Flush, committed_s: float | None, error: str = "") -> None:
        """A save is committed, or has failed."""
        begin, sent = flush.begin, flush.begin.telemetry
        self._write(
            events.Save(
                time.time(), begin.step, "failed" if committed_s is None else "committed", begin.data_bytes,
                begin.requested_s + self._unix_s, self._unix(sent.returned_s), self._unix(sent.stage_begin_s),
                self._unix(flush.staged_s), self._unix(flush.flush_begin_s), self._unix(flush.sealed_s),
                self._unix(committed_s), error,
            )
        )  # fmt: skip
        self.progress(is_news=True)

    def progress(self, is_news: bool = False) -> None:
        """Once a second while saves are in flight; at once if something has changed that people wait for."""
        now = time.monotonic()
        with self._lock:
            if now - self._told_s < _PERIOD_S and not is_news:
                return
            self._told_s = now
        saves = [self._in_flight(flush) for flush in self._flushes()]
        used = sum(save.staged_bytes - save.flushed_bytes for save in saves)
        self._write(events.SavesInFlight(time.time(), saves, self.arena_bytes, used))

    def close(self, is_orphan: bool) -> None:
        if self._log is not None:
            self._log.write(events.End(time.time(), not is_orphan))
            self._log.close()

    def _in_flight(self, flush: Flush) -> InFlight:
        phase = "sealed" if flush.sealed_s is not None else "staging" if flush.staged_s is None else "flushing"
        begin = flush.begin
        requested_s = begin.requested_s + self._unix_s
        return InFlight(begin.step, phase, requested_s, begin.data_bytes, flush.received_bytes, flush.flushed_bytes)

    def _unix(self, monotonic_s: float | None) -> float | None:
        return None if monotonic_s is None else monotonic_s + self._unix_s


class EventLog:
    """Where one rank's keeper writes.  Thread: safe from any.  Never raises, and never waits for the storage.

    A thread of its own writes; when very much is waiting for it, more is lost.

    ``head``: what every file of the log begins with.
    """

    def __init__(self, root: Path, rank: int, attempt: str, head: events.KeeperStarted) -> None:
        self._path = root / DIRECTORY / f"rank-{rank:05d}-{attempt}.jsonl"
        self._head = head
        self._queue: queue.Queue[events.Event | None] = queue.Queue(_MAX_WAITING)
        self._fd = -1
        self._thread = threading.Thread(target=self._run, name="stillframe-events", daemon=True)
        self._thread.start()

    def write(self, event: events.Event) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(event)

    def close(self) -> None:
        """What is waiting is written, if the storage answers."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            with contextlib.suppress(Exception):  # a full disk, text that is none: it only tells
                self._append(msgspec.json.encode(event) + b"\n")

    def _append(self, line: bytes) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_size + len(line) > MAX_BYTES:
            os.close(self._fd)
            self._fd = -1
            durable.move(self._path, self._path.with_name(self._path.name + ".1"))
        if self._fd < 0:
            self._path.parent.mkdir(exist_ok=True)
            self._fd = durable.open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            # Its time makes the first line of each file another one: that is what a file can be known by.
            line = msgspec.json.encode(msgspec.structs.replace(self._head, at_s=time.time())) + b"\n" + line
        os.write(self._fd, line)


def forget(root: Path, rank: int, attempts: int) -> None:
    """Remove a rank's files of all but so many of its attempts, the oldest first; raises ``OSError``."""
    own = [paths for key, paths in event_files(root).items() if key[0] == rank]
    own.sort(key=lambda paths: max(path.stat().st_mtime for path in paths))
    for paths in own[:-attempts]:
        for path in paths:
            durable.remove(path)
