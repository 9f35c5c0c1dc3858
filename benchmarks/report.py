"""Results on disk, and the report made from them: ``python -m benchmarks.report DIRECTORY [--to DIRECTORY]``."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from benchmarks import plots
from benchmarks.case import Outcome
from benchmarks.questions import QUESTIONS
from benchmarks.questions.base import Question, Table
from benchmarks.systems import SYSTEMS
from benchmarks.targets import targets
from matplotlib.figure import Figure

_SIZE = (11.0, 4.6)


class Results(msgspec.Struct, kw_only=True):
    """What one question gave, and where and when."""

    question: str
    is_short: bool
    turns: int
    command: str
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    outcomes: list[Outcome] = msgspec.field(default_factory=list)

    @classmethod
    def new(cls, question: str, is_short: bool, turns: int, root: Path, command: Sequence[str]) -> Results:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return cls(
            question=question,
            is_short=is_short,
            turns=turns,
            command=" ".join(command),
            date=now,
            machine=machine(root),
            versions=versions(),
        )

    def write(self, directory: Path) -> None:
        path = directory / f"{self.question}.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(self))), indent=1))
        partial.replace(path)


def rounded(value: Any) -> Any:
    """Six digits are more than any of these figures has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def read_results(directory: Path) -> list[Results]:
    """In the order of the questions."""
    paths = [directory / f"{name}.json" for name in QUESTIONS]
    return [msgspec.json.decode(path.read_bytes(), type=Results) for path in paths if path.exists()]


def machine(root: Path) -> dict[str, str]:
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda each: len(each.mountpoint), reverse=True)
    mount = next(each for each in mounts if root.is_relative_to(each.mountpoint))
    return {
        "cpu": f"{psutil.cpu_count()} × {model[0] if model else platform.machine()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "disk": f"{mount.fstype} on {mount.device}",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for package in sorted({package for system in SYSTEMS.values() for package in system.packages}):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_report(results: Path, to: Path | None = None, plots_in: str = "") -> str:
    """Write ``BENCHMARKS.md`` and the plots; returns what to tell the person.

    What somebody wrote about a question's results, in a file of its name beside the plot, comes after its tables.
    """
    to = to or results
    pictures = to / plots_in
    pictures.mkdir(parents=True, exist_ok=True)
    everything = read_results(results)
    drawn = {each.question for each in everything if draw(QUESTIONS[each.question], each.outcomes, pictures)}
    path = to / "BENCHMARKS.md"
    path.write_text(text(everything, pictures, drawn, plots_in))
    return f"{path} has the tables, with a plot for each question beside it"


def text(everything: Sequence[Results], notes: Path, drawn: Container[str], plots_in: str) -> str:
    """The report itself; ``notes``: where somebody's words are."""
    parts = [head(everything)]
    table = targets({each.question: each.outcomes for each in everything if not each.is_short})
    if table:
        parts.append(markdown(table))
    for each in everything:
        question = QUESTIONS[each.question]
        note = notes / f"{question.name}.md"
        written = note.read_text() if note.exists() else ""
        parts.append(section(question, each, question.name in drawn, plots_in) + written)
    parts.append(systems_section(everything))
    return "\n".join(parts)


def head(everything: Sequence[Results]) -> str:
    machine_ = everything[0].machine
    versions_ = ", ".join(f"{name} {version}" for name, version in everything[0].versions.items())
    dates = " to ".join(sorted({min(each.date for each in everything), max(each.date for each in everything)}))
    return (
        "# Benchmarks\n\n"
        f"{dates}. {machine_['cpu']}, {machine_['memory']}, {machine_['disk']}, "
        f"{machine_['kernel']}, Python {machine_['python']}; {versions_}.\n\n"
        "Every run is a process of its own with a fresh directory; the systems take turns, in another order each time. After "
        "each run the last two checkpoints (of real training: one, made while training goes on) are restored through the "
        "system's own restore and compared bit for bit; a case that once does not come back is marked wrong and has no "
        "figures. Figures are medians, with the least and the most in brackets. Everything is kept by everybody: no old "
        "checkpoint is removed during a run.\n"
    )


def section(question: Question, results: Results, is_drawn: bool, plots_in: str) -> str:
    lines = [f"## {question.title}\n", f"{question.asks}\n"]
    try:
        lines += [markdown(table) for table in question.tables(results.outcomes)]
    except (LookupError, ValueError, ZeroDivisionError, StopIteration) as error:  # of an interrupted run
        lines.append(f"Too little was measured for a table ({type(error).__name__}).\n")
    if is_drawn:
        path = f"{plots_in}/{question.name}.png" if plots_in else f"{question.name}.png"
        lines.append(f"![{question.title}]({path})\n")
    lines += [f"- {line}" for line in failures(results.outcomes)]
    turns = f"{results.turns} turns" if results.turns > 1 else "1 turn"
    lines.append(f"\n`{results.command} --question {question.name}`, {turns}, {results.date}.\n")
    return "\n".join(lines)


def draw(question: Question, outcomes: Sequence[Outcome], directory: Path) -> bool:
    figure = Figure(figsize=_SIZE, layout="constrained")
    try:
        question.draw(outcomes, figure)
    except (LookupError, ValueError, ZeroDivisionError, StopIteration):  # of an interrupted run
        return False
    plots.legend(figure)
    plots.save(figure, directory / question.name)
    return True


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Each system that could not, or was wrong, with the reason that it printed."""
    found: dict[str, None] = {}
    for outcome in outcomes:
        name = (
            SYSTEMS[outcome.case.system].label.replace("\n", ", ")
            if outcome.case.system in SYSTEMS
            else outcome.case.system
        )
        if outcome.error:
            found[f"**{name}** cannot: `{outcome.error}`"] = None
        elif not outcome.is_good:
            found[f"**{name}** is WRONG: what it wrote did not restore bit for bit ({outcome.case.gib:g} GiB)"] = None
    return list(found)


def markdown(table: Table) -> str:
    lines = [f"**{table.title}**\n", row(table.head), row(["---", *("---:" for _ in table.head[1:])])]
    lines += [row([f"**{cell}**" for cell in cells] if cells[0] == "stillframe" else cells) for cells in table.rows]
    return "\n".join([*lines, ""])


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("\n", ", ") for cell in cells) + " |"


def systems_section(everything: Sequence[Results]) -> str:
    """How each is used, and for those that cannot run here, why."""
    reasons: dict[str, str] = {}
    ran = set()
    for results in everything:
        for outcome in results.outcomes:
            if outcome.error:
                reasons.setdefault(outcome.case.system, outcome.error)
            else:
                ran.add(outcome.case.system)
    rows = []
    for system in SYSTEMS.values():
        state = (
            "runs"
            if system.name in ran
            else "not asked"
            if system.name not in reasons
            else f"cannot: {reasons[system.name]}"
        )
        rows.append([system.label, system.how, "yes" if system.is_async else "no", state])
    return "## How each system is used\n\n" + markdown(
        Table("Systems", ["system", "how", "in the background", "here"], rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description="Make the report again from results."
    )
    parser.add_argument("results", type=Path, help="a directory with results of python -m benchmarks")
    parser.add_argument("--to", type=Path, help="where the report goes (default: the same directory)")
    parser.add_argument("--plots", default="", help="a directory beside the report for the plots")
    options = parser.parse_args()
    if not read_results(options.results):
        sys.stderr.write(f"{options.results} has no results; run python -m benchmarks --out {options.results} first\n")
        return 2
    print(write_report(options.results, options.to, options.plots))
    return 0


if __name__ == "__main__":
    sys.exit(main())
