"""What the demo shows while it runs and when it is done.  Owns the wording; measures nothing itself."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from demo.record import Record, Started, Step
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from stillframe.units import format_bytes

_EVERY = 10
"""Without a terminal, one line for so many steps, and one for the last."""
_QUIET_CORES = 0.15
"""If other programs used more, the difference of two runs says nothing of what saving costs."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What the SIGKILL hit, and what it cost."""

    last_step: int
    """The last step that was told as done."""
    resumed_step: int
    restore_s: float

    @property
    def lost_steps(self) -> int:
        return self.last_step - self.resumed_step


class Pace:
    """How long the steps of a run took."""

    def __init__(self, steps: Sequence[Step]) -> None:
        seconds = [step.seconds for step in steps]
        self._low_s, self.median_s, self._high_s = statistics.quantiles(seconds, n=4)

    @property
    def spread(self) -> str:
        return f"{self._low_s * 1e3:.0f}–{self._high_s * 1e3:.0f} ms"


class Bar:
    """How far a run is: a live bar, or a line now and then where there is no terminal."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = f"{title:<21}"
        self._total = total
        self._seconds: list[float] = []
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task(self._title, total=total, note="starting")

    def show(self, line: Started | Step) -> None:
        if not isinstance(line, Step):
            return
        self._seconds.append(line.seconds)
        note = f"loss {line.loss:.3f}  {ms(statistics.median(self._seconds))}/step"
        self._progress.update(self._task, completed=line.step, note=note)
        if not self._console.is_terminal and (line.step % _EVERY == 0 or line.step == self._total):
            self._console.print(f"{self._title} {line.step:>3}/{self._total}  {note}", highlight=False)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def table(alone: Record, saving: Sequence[Step], resumed: Record, kill: Kill, others: float) -> Table:
    """The figures.

    ``saving`` are the steps of both parts of the run with saves, ``resumed`` is its second part; ``others`` is how
    many cores other programs used during ``alone`` or ``resumed``, whichever was more.
    """
    blocked_s = statistics.median(step.blocked_s for step in saving)
    worst = max(saving, key=lambda step: step.blocked_s)
    is_first = worst.step in (1, resumed.steps[0].step)
    commits_s = [save.times.committed_s - save.times.requested_s for save in resumed.saves if save.times.committed_s]
    without, within = Pace(alone.steps), Pace(resumed.steps)
    cores = len(os.sched_getaffinity(0))

    rows = Table(title="a checkpoint at every step", title_justify="left", show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column()
    rows.add_row("blocked per save, median", ms(blocked_s), "in save() and at the fence")
    rows.add_row(
        "blocked per save, max", ms(worst.blocked_s), f"step {worst.step}" + ", the first of its run" * is_first
    )
    rows.add_row("time to commit, median", ms(statistics.median(commits_s)), "from save() until it is durable")
    rows.add_row("size of a checkpoint", format_bytes(resumed.saves[-1].bytes), "parameters, AdamW and the rest")
    rows.add_section()
    rows.add_row("a step without saving", ms(without.median_s), f"median; half took {without.spread}")
    rows.add_row("a step with saving", ms(within.median_s), f"median; half took {within.spread}")
    if others <= _QUIET_CORES:
        rows.add_row("overhead", f"{within.median_s / without.median_s - 1:+.1%}", "of the medians")
    else:
        rows.add_row("overhead", "unclear", f"other programs used {others:.1f} cores")
    rows.add_section()
    rows.add_row("finished steps lost", str(kill.lost_steps), f"killed in step {kill.last_step + 1}")
    rows.add_row("time to restore", ms(kill.restore_s), "read, verified, in place")
    rows.caption = (
        f"Not blocked is not free: {alone.started.threads} training threads share {cores} cores with copying and "
        f"writing, {format_bytes(resumed.saves[-1].bytes)} a step."
    )
    rows.caption_justify = "left"
    return rows


def differences(left: dict[str, str], right: dict[str, str]) -> list[str]:
    """The paths where two fingerprints are not the same."""
    return [path for path in dict.fromkeys([*left, *right]) if left.get(path) != right.get(path)]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
