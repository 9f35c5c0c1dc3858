"""What the benchmarks share: figures with a median, a spread and a target, and the raw writer they are set beside."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stillframe.model import CHUNK_BYTES
from stillframe.storage.direct import WriteFile


@dataclass
class Figure:
    """One measured line: the median, its spread, what it is compared with, and the target, if there is one."""

    name: str
    value: float
    unit: str
    target: str
    is_met: bool | None
    samples: list[float] = field(default_factory=list)
    beside: str = ""


class Figures:
    """Gathers the lines of one run, each shown as it comes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.all: list[Figure] = []

    def add(
        self,
        name: str,
        samples: list[float],
        unit: str,
        target: str = "",
        met: Callable[[float], bool] | None = None,
        beside: str = "",
    ) -> None:
        value = statistics.median(samples)
        is_met = met(value) if met else None
        self.all.append(Figure(name, value, unit, target, is_met, samples, beside))
        mark = {True: "✓", False: "✗", None: "·"}[is_met]
        aim = f"(target {target})" if target else ""
        self.console.print(f"  {mark} {name}: {value:.3g} {unit}  {aim} {beside}".rstrip())

    def table(self, title: str) -> Table:
        table = Table(title=title)
        for column in ("figure", "median", "spread", "target", ""):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for figure in self.all:
            spread = f"{min(figure.samples):.3g} – {max(figure.samples):.3g}"
            met = {True: "met", False: "missed", None: ""}[figure.is_met]
            table.add_row(figure.name, f"{figure.value:.3g} {figure.unit}", spread, figure.target, met)
        return table

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(figure) for figure in self.all], indent=1))


def write_raw(path: Path, size: int, buffer: memoryview) -> tuple[float, float]:
    """A plain O_DIRECT writer of one thread, fsync included: when it began and ended, in ``time.monotonic()``."""
    path.unlink(missing_ok=True)
    began = time.monotonic()
    file = WriteFile(path, size)
    for at in range(0, size, CHUNK_BYTES):
        file.write_at(buffer[: min(CHUNK_BYTES, size - at)], at)
    file.finish()
    return began, time.monotonic()


def drop_caches() -> None:
    """Cold reads, where we may; O_DIRECT does not use the page cache in any case."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        pass
