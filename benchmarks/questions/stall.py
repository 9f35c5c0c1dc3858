from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import (
    Question,
    Scope,
    Table,
    gather,
    good,
    label,
    loops,
    median,
    number,
    spread,
    systems_in,
)
from matplotlib.figure import Figure

_ALL_UP_TO = 2.0
"""GiB; beyond, one system of each kind is asked."""


class Stall(Question):
    """How long does one save hold training up?"""

    name = "stall"
    title = "Stall: a save at every iteration"
    asks = (
        "An iteration is 1 s (0.5 s in the short form) of emulated forward and backward (waiting: the CPU is free, as beside an accelerator) and an "
        "update that changes every page. Blocked is the time in save() and in the fence before the update: the median of "
        "saves that find the one before in flight, with the least and the most. Over 1 is the iteration's time "
        "divided by that without saving."
    )

    def cases(self, scope: Scope) -> list[Case]:
        sizes = scope.sizes(0.25) if scope.is_short else scope.sizes(0.25, 1.5, 4.0)
        return [
            Case(
                task="loop", system=system, gib=gib, iterations=3,
                compute_s=0.5 if scope.is_short else 1.0,
            )
            for gib in sizes
            for system in (scope.few() if gib > _ALL_UP_TO else scope.systems)
        ]  # fmt: skip

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        sizes = sorted({each.case.gib for each in outcomes})
        blocked, over = [], []
        for system in systems_in(outcomes):
            per_size = [gather(loops(good(outcomes, system=system, gib=gib)), "blocked_s") for gib in sizes]
            blocked.append([label(system), *(spread(each, 1e3) if each else "—" for each in per_size)])
            times = [gather(loops(good(outcomes, system=system, gib=gib)), "iteration_s") for gib in sizes]
            alone = [gather(loops(good(outcomes, system="none", gib=gib)), "iteration_s") for gib in sizes]
            over.append(
                [
                    label(system),
                    *(
                        number(median(each) / median(base)) if each and base else "—"
                        for each, base in zip(times, alone, strict=True)
                    ),
                ]
            )
        head = [f"{gib:g} GiB" for gib in sizes]
        return [
            Table("Blocked per save, ms", ["system", *head], blocked),
            Table("Iteration time over not saving", ["system", *head], over),
        ]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        sizes = sorted({each.case.gib for each in outcomes})
        systems = [each for each in systems_in(outcomes) if each != "none"]
        values = {
            system: [
                [each * 1e3 for each in gather(loops(good(outcomes, system=system, gib=gib)), "blocked_s")]
                for gib in sizes
            ]
            for system in systems
        }
        axes = figure.subplots()
        bars(axes, [f"{gib:g} GiB" for gib in sizes], values)
        axes.set_yscale("log")
        axes.set_ylabel("blocked per save, ms (log scale)")
        axes.set_xlabel("state")


QUESTION = Stall()
