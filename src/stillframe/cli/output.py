"""How answers look: tables for people, one JSON document for programs, progress on the terminal's error stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 100_000
"""Columns where nobody looks: a pipe or a file gets whole lines."""


@functools.cache
def console() -> Console:
    """Of standard output; colours only on a terminal that has them."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDE
    return Console(width=width, highlight=False, emoji=False, markup=False)


def say(line: str) -> None:
    """One line, however long."""
    console().print(printable(line), soft_wrap=True)


def printable(text: str) -> str:
    """A checkpoint's names may hold anything; a terminal must not obey it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def errors() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False, markup=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Columns that are empty in all rows are left out; a table that is wider than the terminal stays so."""
    from rich.table import Table

    rows = [[printable(cell) for cell in row] for row in rows]
    shown = [at for at, _ in enumerate(columns) if any(row[at] for row in rows)]
    width = sum(max(len(columns[at]), *(len(row[at]) for row in rows)) + 2 for at in shown)
    made = Table(box=None, pad_edge=False, header_style="bold")
    for at in shown:
        is_right = columns[at] in right
        made.add_column(columns[at], justify="right" if is_right else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(row[at] for at in shown))
    console().print(made, width=max(width, console().width), crop=False, soft_wrap=True)


def print_json(document: object) -> None:
    """One document, indented; bytes as they are, so that it can be piped."""
    data = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2)
    sys.stdout.write(data.decode() + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fsencode(value).decode(errors="replace")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(type(value).__name__)


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left, on a terminal; nothing elsewhere.  What it gives is told of bytes done."""
    if not sys.stderr.isatty() or not total_bytes:
        yield lambda _count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors(), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count: bar.advance(task, count)
