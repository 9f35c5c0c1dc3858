"""The evaluation, in one command: ``python -m benchmarks``; ``make bench`` is its short form.

Asks the questions of :mod:`benchmarks.questions` of every system in :mod:`benchmarks.systems` that runs here, and
writes results (JSON), plots and a report to a directory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.case import Outcome
from benchmarks.harness import Cannot, Harness
from benchmarks.questions import QUESTIONS
from benchmarks.questions.base import Scope
from benchmarks.report import Results, read_results, write_report
from benchmarks.systems import SYSTEMS
from rich.console import Console

_RUNS = Path(__file__).resolve().parent.parent / "runs"
_INTERRUPTED = 130


def main() -> int:
    options = parse()
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    out: Path = options.out or _RUNS / f"bench-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    out.mkdir(parents=True, exist_ok=True)
    parent: Path = options.root or _RUNS
    parent.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(dir=parent, prefix="bench-data-"))
    try:
        ask(options, root, out, console)
    except Cannot as cannot:
        console.print(f"{cannot}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # once is enough: what follows is short
        console.print(f"\ninterrupted; {out} keeps what was measured so far", soft_wrap=True)
        if read_results(out):
            console.print(f"{write_report(out)}", markup=False, highlight=False, soft_wrap=True)
        return _INTERRUPTED
    finally:
        shutil.rmtree(root, ignore_errors=True)
    console.print(f"{write_report(out)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def ask(options: argparse.Namespace, root: Path, out: Path, console: Console) -> None:
    """Ask every question; each one's results are kept after every run."""
    harness = Harness(root, out / "log.txt", console)
    systems = options.system or list(SYSTEMS)
    scope = Scope(options.short, systems, options.max_gib, harness)
    questions = [QUESTIONS[name] for name in options.question or QUESTIONS]
    everything = [case for question in questions for case in question.cases(replace(scope, harness=None))]
    if not everything:
        raise Cannot("nothing to measure: none of these questions concerns these systems")
    harness.check_room(everything)
    for question in questions:
        cases = question.cases(scope)
        turns = options.turns or question.turns(options.short)
        console.print(
            f"[bold]{question.title}[/bold] ({len(cases)} cases, {turns} turns)"
            if turns > 1
            else f"[bold]{question.title}[/bold]"
        )
        results = Results.new(question.name, options.short, turns, root, command_of(options))
        outcomes: list[Outcome] = results.outcomes
        for outcome in harness.turns(cases, turns):
            outcomes.append(outcome)
            results.write(out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[1])
    parser.add_argument("--short", action="store_true", help="smaller and fewer: the whole in ten minutes")
    parser.add_argument("--question", action="append", type=one_of("question", list(QUESTIONS)), metavar="NAME", help=f"only this one (again for more): {', '.join(QUESTIONS)}")  # fmt: skip
    parser.add_argument("--system", action="append", type=one_of("system", list(SYSTEMS)), metavar="NAME", help=f"only this one (again for more): {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--turns", type=int, help="how often every case is run (default: as each question needs)")
    parser.add_argument("--max-gib", type=float, default=64.0, help="leave out larger states")
    parser.add_argument("--root", type=Path, help="a directory on the disk to measure (default: runs/)")
    parser.add_argument("--out", type=Path, help="where results go (default: runs/bench-DATE-TIME)")
    options = parser.parse_args()
    if options.turns is not None and options.turns < 1:
        parser.error("--turns: at least 1")
    if options.max_gib <= 0:
        parser.error("--max-gib: more than 0")
    return options


def command_of(options: argparse.Namespace) -> list[str]:
    """What was asked, without where things lay."""
    command = ["python -m benchmarks", *(["--short"] if options.short else [])]
    command += [f"--system {name}" for name in options.system or ()]
    return command + ([f"--turns {options.turns}"] if options.turns else [])


def one_of(what: str, names: Sequence[str]) -> Any:
    def check(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"no {what} is called {name!r}; there are {', '.join(names)}")
        return name

    return check


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
