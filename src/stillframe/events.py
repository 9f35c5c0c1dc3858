"""What happened in a run: typed events, one JSON object a line, one file for each rank and attempt.

    <root>/events/rank-00000-<attempt>.jsonl

Written by the keeper, beside its work: a line for each save when it is over, one for the updates since the save
before, one a second while bytes are on their way.  Times are seconds of the Unix epoch by the writer's clock.

Promise: events tell about checkpoints and decide nothing.  They are not made durable, a line that cannot be written
is lost, and one that cannot be read is passed over.  A file that has grown to ``MAX_BYTES`` makes room for a new one,
and the one before that goes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Union

import msgspec

from stillframe.storage import durable

DIRECTORY = "events"
MAX_BYTES = 32 << 20
_MAX_WAITING = 10_000
_CLOSE_S = 2.0
_FILE = re.compile(r"rank-(\d{5})-([0-9a-f]{8})\.jsonl(\.1)?", re.ASCII)


class _Event(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    at_s: float
    """When it was written."""


class Run(_Event, frozen=True):
    """A keeper began to work."""

    rank: int
    world_size: int
    attempt: str
    host: str
    pid: int
    version: str
    keep_last: int | None = None
    keep_every: int | None = None


class Save(_Event, frozen=True):
    """A save is over."""

    step: int
    outcome: str
    """``committed`` or ``failed``."""
    bytes: int
    requested_s: float
    returned_s: float | None = None
    stage_begin_s: float | None = None
    staged_s: float | None = None
    flush_begin_s: float | None = None
    sealed_s: float | None = None
    committed_s: float | None = None
    error: str = ""


class Update(msgspec.Struct, frozen=True, array_like=True):
    """An update of the state: when it was about to begin, and how long the fence held it back."""

    at_s: float
    waited_s: float


class Updates(_Event, frozen=True):
    """The updates since the last such event, or the newest of them if they were very many."""

    updates: list[Update]


class Restore(_Event, frozen=True):
    """A restore ended."""

    step: int | None
    bytes: int
    seconds: float
    passed_over: list[int] = []
    """Damaged steps."""


class InFlight(msgspec.Struct, frozen=True):
    """A save on its way."""

    step: int
    phase: str
    """``staging``, ``flushing`` or ``sealed``."""
    requested_s: float
    total_bytes: int
    staged_bytes: int
    flushed_bytes: int


class Progress(_Event, frozen=True):
    """How far the saves in flight have come."""

    saves: list[InFlight]
    arena_bytes: int
    arena_used_bytes: int


class End(_Event, frozen=True):
    """The keeper has finished and goes."""

    is_closed: bool
    """The trainer said so; else it was gone."""


Event = Union[Run, Save, Updates, Restore, Progress, End]  # noqa: UP007
_decoder = msgspec.json.Decoder(Event)


class EventLog:
    """Where one rank's keeper writes.  Thread: safe from any.  Never raises, and never waits for the storage.

    A thread of its own writes; when very much is waiting for it, more is lost.

    ``head``: what every file of the log begins with.
    """

    def __init__(self, root: Path, rank: int, attempt: str, head: Run) -> None:
        self._path = root / DIRECTORY / f"rank-{rank:05d}-{attempt}.jsonl"
        self._head = head
        self._queue: queue.Queue[Event | None] = queue.Queue(_MAX_WAITING)
        self._fd = -1
        self._thread = threading.Thread(target=self._run, name="stillframe-events", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
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


def event_files(root: Path) -> dict[tuple[int, str], list[Path]]:
    """The files of each rank and attempt, older part first."""
    found: dict[tuple[int, str], list[Path]] = {}
    try:
        names = os.listdir(root / DIRECTORY)
    except OSError:
        return {}
    for name in sorted(names, reverse=True):  # "….jsonl.1" before "….jsonl"
        match = _FILE.fullmatch(name)
        if match:
            found.setdefault((int(match[1]), match[2]), []).append(root / DIRECTORY / name)
    return dict(sorted(found.items()))


def read_events(paths: Iterable[Path]) -> Iterator[Event]:
    """Every event of these files that can be read."""
    for path in paths:
        try:
            data = durable.read_small(path, 2 * MAX_BYTES)
        except OSError:
            continue
        yield from decode_lines(data)


def decode_lines(data: bytes) -> Iterator[Event]:
    """Lines that are cut off, or of kinds that this version does not know, are passed over."""
    for line in data.splitlines():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            yield _decoder.decode(line)
