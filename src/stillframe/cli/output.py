"""How the commands write: tables for people, one JSON document for programs, a progress bar on standard error, files.

``rich`` is imported only where a terminal needs it: its import takes longer than ``stillframe list`` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import textwrap
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
_WIDE = 100
_LEAST = 16
"""Text is not cut shorter."""
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?")
_UNIT = re.compile(r"(?<=\d) (?=(?:bytes|[KMGTPE]iB|µs|ms|s|min|h|d|%)(?:\b|/|$|\s))")


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def say(line: str, style: str = "", indent: int = 0) -> None:
    """Print one line.  A terminal gets it in ``style``, and broken between words, the rest indented.

    A word is never broken, nor a number parted from its unit: what is longer than the terminal stays as it is.
    """
    for part in broken(printable(line), indent):
        if style and sys.stdout.isatty():
            console().print(part, style=style, soft_wrap=True)
        else:
            sys.stdout.write(part + "\n")


def broken(line: str, indent: int) -> list[str]:
    """The lines that a terminal shows instead of a long one."""
    width = terminal_width()
    if len(line) <= width:
        return [line]
    joined = _UNIT.sub("\N{NO-BREAK SPACE}", line)
    parts = textwrap.wrap(
        joined, max(width, indent + _LEAST), subsequent_indent=" " * indent, drop_whitespace=True,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in parts]


def terminal_width() -> int:
    """Of the terminal; :data:`_UNLIMITED` where there is none."""
    return console().width if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNLIMITED


def is_narrow() -> bool:
    """So that values are told briefly."""
    return terminal_width() < _WIDE


def fit(column: Sequence[str], rest: int) -> int:
    """How wide a column may be for ``rest`` characters beside it; its longest cell, if there is room for that."""
    return min(max(map(len, column), default=0), max(terminal_width() - rest, _LEAST))


def printable(text: str) -> str:
    """Escape control characters: a name in a checkpoint must not control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def format_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
    text: Sequence[str] = (),
) -> None:
    """Print a table without the columns that are empty in all rows.

    On a narrow terminal the ``optional`` columns are left out, one after the other, until the table fits.  If it still
    does not, the ``text`` columns are cut in the middle, the first of them first.  Numbers are never cut: a table that
    still does not fit is printed as it is.
    """
    from rich.cells import cell_len

    if not rows:
        return
    lines = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    sizes = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    shown = [at for at, _ in enumerate(columns) if any(row[at] for row in rows)]
    width = terminal_width()

    def excess() -> int:
        return sum(sizes[each] + 2 for each in shown) - 2 - width

    for at in map(columns.index, optional):
        if at in shown and excess() > 0:
            shown.remove(at)
    for at in map(columns.index, text):
        if at in shown and excess() > 0:
            room = max(sizes[at] - excess(), _LEAST)
            for line in lines:
                line[at] = cut(line[at], room)
            sizes[at] = max(cell_len(line[at]) for line in lines)
    for line in lines:
        cells = []
        for at in shown:
            blank = " " * (sizes[at] - cell_len(line[at]))
            cells.append(blank + line[at] if columns[at] in right else line[at] + blank)
        _say_row("  ".join(cells).rstrip(), is_head=line is lines[0])


def _say_row(row: str, *, is_head: bool) -> None:
    """Never broken by us."""
    if is_head and sys.stdout.isatty():
        console().print(row, style="bold", soft_wrap=True)
    else:
        sys.stdout.write(row + "\n")


def cut(cell: str, room: int) -> str:
    """A text with its middle left out; a number as it is."""
    if len(cell) <= room or _NUMBER.fullmatch(cell):
        return cell
    return f"{cell[: (room - 1) // 2]}…{cell[-(room // 2) :]}"


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
