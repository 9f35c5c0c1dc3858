"""The files of a root that tell what happened in a run (:mod:`stillframe.format.events`): which there are, and reading
them.  They decide nothing: what cannot be read is passed over."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from stillframe.format.events import Event, decode_lines
from stillframe.store import durable

DIRECTORY = "events"
MAX_BYTES = 32 << 20
_FILE = re.compile(r"rank-(\d{5})-([0-9a-f]{8})\.jsonl(\.1)?", re.ASCII)


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
