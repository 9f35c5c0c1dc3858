"""What the demo shows while it runs and when it is done.  Owns the wording; measures nothing itself."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from demo.record import Record, Started, Step
from demo.turns import Overhead
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from stillframe.units import format_bytes

_EVERY = 10
"""Without a terminal, one line for so many steps, and one for the last."""
_QUIET_CORES = 0.5
"""If other programs used more, that is told beside the overhead."""
_MOST_DIFFERENCES = 10


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


@dataclass(frozen=True, slots=True)
class Cost:
    """What saving costs, and how many cores other programs used while that was measured."""

    overhead: Overhead
    other_cores: float


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


def table(alone: Record, saving: Sequence[Step], resumed: Record, kill: Kill, cost: Cost) -> Table:
    """The figures.

    ``saving`` are the steps of both parts of the run with saves, ``resumed`` is its second part.
    """
    blocked_s = statistics.median(step.blocked_s for step in saving)
    worst = max(saving, key=lambda step: step.blocked_s)
    is_first = worst.step in (1, resumed.steps[0].step)
    commits_s = [save.times.committed_s - save.times.requested_s for save in resumed.saves if save.times.committed_s]
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
    overhead = cost.overhead
    if overhead.is_clear:
        rows.add_row("a step without saving", ms(overhead.plain_s), "in turns with the next")
        rows.add_row("a step with saving", ms(overhead.saving_s), "until the last of its turn is durable")
    busy = f"; other programs used {cost.other_cores:.1f} cores" if cost.other_cores > _QUIET_CORES else ""
    found = f"{overhead.median:+.1%}" if overhead.is_clear else "unclear"
    rows.add_row("overhead, median", found, f"{overhead.spread}{busy}")
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


def wrong_losses(alone: Record, steps: Sequence[Step]) -> list[str]:
    """The steps whose loss is not that of the run left alone."""
    losses = {step.step: step.loss for step in alone.steps}
    return [f"the loss of step {step.step}" for step in steps if step.loss != losses[step.step]]


def verdict(console: Console, runs: Sequence[str], alone: Record, wrong: Sequence[str]) -> bool:
    """Tells whether the runs ended with the same bits; ``wrong`` names the places where they did not."""
    if wrong:
        console.print(f"[bold red]{', '.join(runs)} differ[/] in {len(wrong)} places:")
        console.print(*wrong[:_MOST_DIFFERENCES], sep="\n", markup=False, highlight=False)
        return False
    state = alone.fingerprint
    is_ranked = any(path.startswith("rank 0/") for path in state)
    beginning = "rank 0/optimizer/" if is_ranked else "optimizer/"
    moments = sum(path.startswith(beginning) and leaf.startswith("tensor") for path, leaf in state.items())
    whose = "each rank's " if is_ranked else ""
    console.print(
        f"[bold green]{' = '.join(runs)}, bit for bit[/]: {alone.started.parameters / 1e6:.1f} M parameters, {moments} "
        f"optimizer tensors, scheduler,\ndata position, {whose}random number generators, and the loss of every step",
        highlight=False,
    )
    return True


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
