"""The files of a root that tell what happened in a run (:mod:`stillframe.format.events`): which there are, and reading
them.  They decide nothing: what cannot be read is skipped."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from stillframe.errors import StorageError
from stillframe.format.events import Event, decode_lines
from stillframe.format.names import RUN
from stillframe.store.protocol import Store, read_all

DIRECTORY = f"{RUN}/events"
MAX_BYTES = 32 << 20
"""At this size a file of a single rank is renamed to ``.1``, in the place of the ``.1`` before."""
_FILE = re.compile(r"rank-(\d{5})-([0-9a-f]{8})\.jsonl(\.1)?", re.ASCII)


def event_key(rank: int, run: str) -> str:
    return f"{DIRECTORY}/rank-{rank:05d}-{run}.jsonl"


def event_files(store: Store) -> dict[tuple[int, str], list[str]]:
    """The keys of each rank and run, the older file first."""
    found: dict[tuple[int, str], list[str]] = {}
    names: list[str] = []
    with contextlib.suppress(StorageError):
        names = sorted(store.list(DIRECTORY), reverse=True)  # "….jsonl.1" before "….jsonl"
    for name in names:
        match = _FILE.fullmatch(name)
        if match:
            found.setdefault((int(match[1]), match[2]), []).append(f"{DIRECTORY}/{name}")
    return dict(sorted(found.items()))


def read_events(store: Store, keys: Iterable[str]) -> Iterator[Event]:
    """Every event of these files that can be read."""
    for key in keys:
        with contextlib.suppress(StorageError):
            yield from decode_lines(read_all(store, key, 2 * MAX_BYTES))
