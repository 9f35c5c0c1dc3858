from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.case import Case, Outcome
from benchmarks.plots import colour
from benchmarks.questions.base import Question, Scope, Table, good, median, number, spread
from matplotlib.figure import Figure

Points = list[tuple[float, list[float]]]
"""Where, and the samples there in milliseconds."""


class Growth(Question):
    """How do stillframe's own costs grow?"""

    name = "growth"
    title = "Growth: what save() and the commit cost as things get larger"
    asks = (
        "stillframe alone. save() of more tensors (64 MiB; with AdamW, each weight brings three more) and "
        "of more bytes (96 tensors), not counting the first, which plans (it is shown by itself where it was measured). The commit: from the last rank's seal to the "
        "manifest, with so many real keepers in one directory on this machine; and rank 0's own work to take and check so "
        "many real seals, the last of which comes late. The lines are least squares through the medians, a + b·n."
    )

    def cases(self, scope: Scope) -> list[Case]:
        counts = (100, 10_000) if scope.is_short else (100, 1_000, 3_000, 10_000, 30_000)
        sizes = scope.sizes(0.125, 0.5) if scope.is_short else scope.sizes(0.125, 0.5, 1.0, 2.0, 4.0)
        keepers = (1, 8) if scope.is_short else (1, 4, 16, 64)
        seals = (1024,) if scope.is_short else (1024, 4096, 16384)
        saves = 6 if scope.is_short else 12
        found = [
            Case(task="save-cost", system="stillframe", gib=1 / 16, iterations=saves, detail=f"{kind} {count}")
            for kind in ("dict", "module")
            for count in counts
        ]
        found += [
            Case(task="save-cost", system="stillframe", gib=gib, iterations=saves // 2, detail="dict 96")
            for gib in sizes
        ]
        found += [
            Case(task="commit-cost", system="stillframe", gib=0.01, iterations=saves, detail=str(count))
            for count in keepers
        ]
        found += [Case(task="collect-cost", system="stillframe", gib=0.4, detail=str(count)) for count in seals]
        return found if "stillframe" in scope.systems else []

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        rows = []
        for name, unit, points in series(outcomes):
            cells = ", ".join(f"{place(at)}: {spread(samples)}" for at, samples in points)
            rows.append([name, cells, law(points, unit)])
        tables = [Table("In milliseconds: median (least–most)", ["cost", "measured at", "fitted"], rows)]
        counted = [each for each in good(outcomes, task="commit-cost") if each.figures["member"]]
        if counted:
            calls = [
                [str(int(count_of(each))), calls_of(each, "member"), calls_of(each, "coordinator")] for each in counted
            ]
            head = ["ranks", "any other rank", "rank 0"]
            tables.append(Table("File-system calls per step, counted with strace", head, calls))
        return tables

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        found = series(outcomes)
        panels = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (name, unit, points) in zip(panels, found, strict=True):
            places = [at for at, _ in points]
            middles = [median(samples) for _, samples in points]
            least = [middle - min(samples) for middle, (_, samples) in zip(middles, points, strict=True)]
            most = [max(samples) - middle for middle, (_, samples) in zip(middles, points, strict=True)]
            axes.errorbar(places, middles, [least, most], fmt="o", ms=4, color=colour("stillframe"), capsize=2, lw=0.8)
            base, each = fit(points)
            steps = [places[0] * (places[-1] / places[0]) ** (step / 50) for step in range(51)]
            axes.plot(steps, [base + each * at for at in steps], color="#333333", lw=0.8)
            axes.set_xscale("log")
            if unit == "GiB":  # less than two decades: matplotlib would write a label at every tenth
                axes.set_xticks(places, [f"{place:g}" for place in places])
                axes.minorticks_off()
            if max(middles) > 10 * min(middles):
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set_title(name.replace(": ", ":\n"), fontsize=8)
            axes.set_xlabel(unit)
        panels[0].set_ylabel("milliseconds")


def series(outcomes: Sequence[Outcome]) -> list[tuple[str, str, Points]]:
    """What grows, in what, and its points."""
    saves = good(outcomes, task="save-cost")
    flat = [each for each in saves if each.case.detail.startswith("dict ") and each.case.gib == 1 / 16]
    modules = [each for each in saves if each.case.detail.startswith("module ")]
    sized = [each for each in saves if each.case.detail == "dict 96"]
    found = [
        ("save(): flat dict", "tensors", points(flat, count_of, "save_s")),
        ("save(): module, AdamW", "tensors", points(modules, count_of, "save_s")),
        ("first save(): module, AdamW", "tensors", points(modules, count_of, "first_s")),
        ("save(): bytes", "GiB", points(sized, lambda outcome: outcome.case.gib, "save_s")),
        ("commit: keepers", "ranks", points(good(outcomes, task="commit-cost"), count_of, "commit_s")),
        ("commit: a late seal", "ranks", points(good(outcomes, task="collect-cost"), count_of, "late_s")),
    ]
    return [each for each in found if each[2]]


def calls_of(outcome: Outcome, who: str) -> str:
    return f"{sum(outcome.figures[who]['by_name'].values()):.0f}"


def count_of(outcome: Outcome) -> float:
    return float(outcome.case.detail.split()[-1])


def points(outcomes: Sequence[Outcome], where: Any, name: str) -> Points:
    """Of results that are older than the figure: none."""
    found: dict[float, list[float]] = {}
    for outcome in outcomes:
        value = outcome.figures.get(name, [])
        samples = value if isinstance(value, list) else [value]
        if samples:
            found.setdefault(where(outcome), []).extend(each * 1e3 for each in samples)
    return sorted(found.items())


def fit(points: Points) -> tuple[float, float]:
    """Least squares through the medians: the cost at nothing, and of each."""
    if len(points) < 2:
        return median(points[0][1]), 0.0
    line = statistics.linear_regression([at for at, _ in points], [median(samples) for _, samples in points])
    return line.intercept, line.slope


def law(points: Points, unit: str) -> str:
    base, each = fit(points)
    scale, word = (1000.0, f"1,000 {unit}") if unit != "GiB" else (1.0, unit)
    return f"{base:.2f} ms + {number(each * scale)} ms per {word}"


def place(at: float) -> str:
    return f"{at:g}" if at < 1000 else f"{at:,.0f}"


QUESTION = Growth()
