"""What the keeper tells about its work (:mod:`stillframe.format.events`): how far each save is, and when."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from stillframe import version
from stillframe.checkpoint.events import MAX_BYTES, event_files, event_key, read_events
from stillframe.format import events
from stillframe.format.events import InFlight
from stillframe.keeper.segment import SegmentWriter
from stillframe.keeper.terms import Terms
from stillframe.link import messages
from stillframe.retention import Keep
from stillframe.store.posix import PosixStore
from stillframe.store.protocol import Store

_PERIOD_S = 1.0
_CROWD = 64
"""With more ranks, each tells of its progress less often."""
_LEAST_BYTES = 256 << 10
MAX_RUNS = 20
"""Whose events are kept."""
_MAX_WAITING = 10_000
_CLOSE_S = 5.0


class Journal:
    """Thread: safe from any."""

    def __init__(
        self,
        terms: Terms,
        rank: int,
        keep: Keep | None,
        saves: Callable[[], Sequence[SegmentWriter]],
        is_wanted: bool = True,
    ) -> None:
        self._terms = terms
        self._rank = rank
        self._is_wanted = is_wanted
        self._period_s = _PERIOD_S * max(terms.world_size / _CROWD, 1.0)
        self._started = events.KeeperStarted(
            time.time(), rank, terms.world_size, terms.run, socket.gethostname(), os.getpid(),
            version.VERSION, "" if keep is None else repr(keep),
        )  # fmt: skip
        self._log: EventLog | None = None
        self._saves = saves
        self._unix_s = time.time() - time.monotonic()
        """The trainer's monotonic clock is ours: it is the machine's."""
        self._lock = threading.Lock()
        self._told_s = 0.0
        self.arena_bytes = 0

    def begin(self) -> None:
        """The root is ours; nothing is told before."""
        store = self._terms.store
        if self._log is None and self._is_wanted and isinstance(store, PosixStore):  # only a file can be added to
            self._log = EventLog(store, event_key(self._rank, self._terms.run), self._started)

    def write(self, event: events.Event) -> None:
        """No I/O: a thread of the log's own does that."""
        if self._log is not None:
            self._log.write(event)

    def updates(self, made: messages.Updates) -> None:
        if made:
            found = [events.Update(at_s + self._unix_s, waited_s, begins) for at_s, waited_s, begins in made]
            self.write(events.Updates(time.time(), found))

    def restored(self, message: messages.Restored) -> None:
        passed_over = list(message.passed_over)
        self.write(events.Restore(time.time(), message.step, message.bytes, message.seconds, passed_over))

    def ended(self, save: SegmentWriter, committed_s: float | None, error: str = "") -> None:
        """A save is committed, or has failed."""
        begin, sent = save.begin, save.begin.telemetry
        self.write(
            events.Save(
                time.time(), begin.step, "failed" if committed_s is None else "committed", begin.data_bytes,
                begin.requested_s + self._unix_s, self._unix(sent.returned_s), self._unix(sent.stage_begin_s),
                self._unix(save.staged_s), self._unix(save.flush_begin_s), self._unix(save.sealed_s),
                self._unix(committed_s), error,
            )
        )  # fmt: skip
        self.progress(is_news=True)

    def progress(self, is_news: bool = False) -> None:
        """Once a second while saves are in flight; at once if something has changed that people wait for."""
        now = time.monotonic()
        with self._lock:
            if now - self._told_s < self._period_s and not is_news:
                return
            self._told_s = now
        saves = [self._in_flight(save) for save in self._saves()]
        used = sum(save.staged_bytes - save.flushed_bytes for save in saves)
        self.write(events.SavesInFlight(time.time(), saves, self.arena_bytes, used))

    def close(self, is_orphan: bool) -> None:
        if self._log is not None:
            self._log.write(events.End(time.time(), not is_orphan))
            self._log.close()

    def _in_flight(self, save: SegmentWriter) -> InFlight:
        begin = save.begin
        requested_s = begin.requested_s + self._unix_s
        return InFlight(
            begin.step, save.state.value, requested_s, begin.data_bytes, save.received_bytes, save.flushed_bytes
        )

    def _unix(self, monotonic_s: float | None) -> float | None:
        return None if monotonic_s is None else monotonic_s + self._unix_s


class EventLog:
    """Where one rank's keeper writes.  Thread: safe from any.  Never raises, and never waits for the storage.

    A thread of its own writes; when its queue is full, further events are dropped.

    ``head``: the event that every file of the log begins with.
    """

    def __init__(self, store: PosixStore, key: str, head: events.KeeperStarted) -> None:
        self._store = store
        self._key = key
        self._head = head
        self._queue: queue.Queue[events.Event | None] = queue.Queue(_MAX_WAITING)
        self._max_bytes = max(MAX_BYTES // head.world_size, _LEAST_BYTES)
        self._bytes = self._max_bytes
        """In the file, as far as this log knows: at first it knows none."""
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
        if self._bytes + len(line) > self._max_bytes:
            info = self._store.head(self._key)
            if info is not None and info.size + len(line) > self._max_bytes:
                self._store.rename(self._key, f"{self._key}.1", durable=False)
            # The time makes the first line of each file unique: readers identify a file by it.
            line = msgspec.json.encode(msgspec.structs.replace(self._head, at_s=time.time())) + b"\n" + line
        self._bytes = self._store.append(self._key, line)


def forget(store: Store, present: str) -> None:
    """Remove the events of all but the newest runs, and of no run that is the ``present`` one.

    For one keeper of the root.  Raises :class:`StorageError`.
    """
    by_run: dict[str, list[str]] = {}
    for (_, run), keys in event_files(store).items():
        by_run.setdefault(run, []).extend(keys)
    if len(by_run) > MAX_RUNS:
        began_s = {run: next((e.at_s for e in read_events(store, keys[:1])), 0.0) for run, keys in by_run.items()}
        old = sorted((run for run in by_run if run != present), key=lambda run: began_s[run])[:-MAX_RUNS]
        store.delete([key for run in old for key in by_run[run]])
