from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, good, label, loops, median, number, systems_in
from matplotlib.figure import Figure


class Interval(Question):
    """What does saving more often cost, end to end?"""

    name = "interval"
    title = "Interval: 50 iterations, a save at every k-th"
    asks = (
        "As in Figures 11 and 12 of the paper. End to end is from the first iteration until the last checkpoint is complete "
        "and on the disk, divided by the same iterations without saving; in brackets the seconds that training was blocked "
        "in all. One save of drain after the last iteration is part of it."
    )

    def cases(self, scope: Scope) -> list[Case]:
        every = (5, 1) if scope.is_short else (10, 5, 4, 3, 2, 1)
        iterations = 10 if scope.is_short else 50
        gib = scope.sizes(1 / 16)[0]
        return [
            Case(task="loop", system=system, gib=gib, iterations=iterations, every=every, compute_s=0.1)
            for system in (scope.few() if scope.is_short else scope.systems)
        ]

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        intervals = outcomes[0].case.every
        rows = []
        for system in systems_in(outcomes):
            cells = []
            for every in intervals:
                ratio = over_none(outcomes, system, every)
                if not ratio:
                    cells.append("—")
                    continue
                blocked = median(sum(each["blocked_s"]) for each in loops(good(outcomes, system=system), every))
                cells.append(f"{number(median(ratio))} ({number(blocked)} s)")
            rows.append([label(system), *cells])
        return [Table("End to end over not saving", ["system", *(f"every {each}" for each in intervals)], rows)]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        intervals = outcomes[0].case.every
        values = {
            system: [over_none(outcomes, system, every) for every in intervals]
            for system in systems_in(outcomes)
            if system != "none"
        }
        axes = figure.subplots()
        bars(axes, [f"every {each}" for each in intervals], values, is_labelled=False)
        axes.axhline(1, color="#000000", lw=0.8)
        axes.set_ylim(bottom=0.9)
        axes.set_ylabel("end to end ÷ not saving")


def over_none(outcomes: Sequence[Outcome], system: str, every: int) -> list[float]:
    """End to end, durable, over the median of not saving."""
    alone = [end_to_end(each) for each in loops(good(outcomes, system="none"), every)]
    mine = [end_to_end(each) for each in loops(good(outcomes, system=system), every)]
    return [each / median(alone) for each in mine] if alone else []


def end_to_end(loop: dict[str, float]) -> float:
    return loop["loop_s"] + loop["finish_s"] + loop["sync_s"]


QUESTION = Interval()
