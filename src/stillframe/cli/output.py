"""How the commands write: tables for people, one JSON document for programs, a progress bar on standard error, files.

``rich`` is imported only where a terminal needs it: its import takes longer than ``stillframe list`` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stillframe.errors import ExistsError, NotFoundError
from stillframe.store import files
from stillframe.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from stillframe.format.records import Manifest

_UNLIMITED = 100_000
"""The width of a pipe or a file: nothing is left out there."""


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def say(line: str, style: str = "") -> None:
    """Print one line, however long; ``style`` is for terminals only."""
    if style and sys.stdout.isatty():
        console().print(printable(line), style=style, soft_wrap=True)
    else:
        sys.stdout.write(printable(line) + "\n")


def printable(text: str) -> str:
    """Escape control characters: a name in a checkpoint must not control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def format_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Print a table without the columns that are empty in all rows.

    On a narrow terminal the ``optional`` columns are left out, one after the other, until the table fits.  No cell is
    cut: a table that still does not fit is printed in full.
    """
    from rich.cells import cell_len

    if not rows:
        return
    lines = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    sizes = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    shown = [at for at, _ in enumerate(columns) if any(row[at] for row in rows)]
    width = console().width if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNLIMITED
    for at in map(columns.index, optional):
        if at in shown and sum(sizes[each] + 2 for each in shown) - 2 > width:
            shown.remove(at)
    for line in lines:
        cells = []
        for at in shown:
            blank = " " * (sizes[at] - cell_len(line[at]))
            cells.append(blank + line[at] if columns[at] in right else line[at] + blank)
        say("  ".join(cells).rstrip(), "bold" if line is lines[0] else "")


def print_json(document: object) -> None:
    """Print one indented document, with no terminal codes in it."""
    data = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2)
    sys.stdout.write(data.decode() + "\n")


def manifest_json(manifest: Manifest | None) -> dict[str, object]:
    """What ``list --json`` and ``show --json`` tell of a manifest; all null if there is none."""
    names = ("parent", "world_size", "saved_unix_s", "metadata")
    return {name: getattr(manifest, name, None) for name in names}


def format_metadata(metadata: Mapping[str, Any]) -> str:
    """``loss=0.25, best=True``."""
    return ", ".join(
        f"{name}={f'{value:.6g}' if isinstance(value, float) else value}" for name, value in metadata.items()
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fsencode(value).decode(errors="replace")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(type(value).__name__)


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if standard error is a terminal.

    Yields a function to call with the number of bytes that were done since its last call.
    """
    if not sys.stderr.isatty() or not total_bytes:
        yield lambda _count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count: bar.advance(task, count)


def write_file(to: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a file that appears under its name whole or not at all, and say so.

    Raises: :class:`ExistsError` if it exists and ``overwrite`` is false.
    """
    if files.kind_of(to.parent) != "directory":
        raise NotFoundError(f"there is no directory {to.parent}")
    try:
        files.write_file(to, data, is_forced=overwrite)
    except ExistsError:
        raise ExistsError(f"{to} exists already; --force replaces it") from None
    say(f"wrote {to} ({format_bytes(len(data))})")
