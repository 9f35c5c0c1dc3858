from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, gather, good, label, loops, median, number, systems_in
from benchmarks.states import SHAPES
from matplotlib.figure import Figure


class Shapes(Question):
    """Does it matter how the bytes are cut?"""

    name = "shapes"
    title = "Shapes: few and many tensors, mixed dtypes, Python values"
    asks = (
        "The same amount of bytes in tensors of different number and kind, and a state that is mostly Python values; 0.3 s "
        "of emulated compute. Blocked per save (median), and in brackets the very first save, in which some plan and "
        "allocate; others do so when they are made, which is not counted. In milliseconds."
    )

    def cases(self, scope: Scope) -> list[Case]:
        shapes = ("medium",) if scope.is_short else tuple(SHAPES)[1:]
        return [
            Case(
                task="loop", system=system, gib=scope.sizes(1 / 16 if scope.is_short else 0.25)[0], shape=shape,
                iterations=2,
                limit=300, compute_s=0.3,
            )
            for shape in shapes
            for system in (scope.few() if scope.is_short else scope.systems)
            if system != "none"
        ]  # fmt: skip

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        shapes = shapes_in(outcomes)
        rows = []
        for system in systems_in(outcomes):
            cells = []
            for shape in shapes:
                mine = loops(good(outcomes, system=system, shape=shape))
                first = median(each["first_s"] for each in mine) * 1e3 if mine else 0
                blocked = gather(mine, "blocked_s")
                cells.append(f"{number(median(blocked) * 1e3)} ({number(first)})" if mine else "—")
            rows.append([label(system), *cells])
        size = outcomes[0].case.gib
        return [
            Table(
                f"Blocked per save (first save), ms; {size:g} GiB", ["system", *(SHAPES[each] for each in shapes)], rows
            )
        ]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        shapes = shapes_in(outcomes)
        values = {
            system: [
                [each * 1e3 for each in gather(loops(good(outcomes, system=system, shape=shape)), "blocked_s")]
                for shape in shapes
            ]
            for system in systems_in(outcomes)
        }
        axes = figure.subplots()
        bars(axes, [SHAPES[each].replace(" of ", "\nof ").replace(" and ", "\nand ") for each in shapes], values)
        axes.set_yscale("log")
        axes.set_ylabel("blocked per save, ms (log scale)")


def shapes_in(outcomes: Sequence[Outcome]) -> list[str]:
    there = {each.case.shape for each in outcomes}
    return [shape for shape in SHAPES if shape in there]


QUESTION = Shapes()
