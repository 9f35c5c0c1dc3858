from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Ranks(Question):
    """What do several ranks cost one another?"""

    name = "ranks"
    title = "Ranks: FSDP2 shards under torchrun"
    asks = (
        "Each rank holds its shards of an FSDP2 model and two moments of each (DTensors), and saves at every iteration of "
        "1 s of emulated compute (0.5 s in the short form); all share this machine's cores and disk. Blocked is over all ranks. The aggregate rate "
        "counts the bytes of all ranks from the first iteration until all is complete and on the disk: where the loop is "
        "longer than the writing, it is the loop's. Those without a way of their own for shards save one file a rank."
    )

    def cases(self, scope: Scope) -> list[Case]:
        return [
            Case(
                task="loop", system=system, gib=scope.sizes(1 / 16 if scope.is_short else 0.5)[0], is_sharded=True,
                ranks=ranks, iterations=2 if scope.is_short else 3, compute_s=0.5 if scope.is_short else 1.0,
            )
            for ranks in ((2,) if scope.is_short else (1, 2, 4))
            for system in (scope.few() if scope.is_short else scope.systems)
        ]  # fmt: skip

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        numbers = sorted({each.case.ranks for each in outcomes})
        blocked, rates = [], []
        for system in systems_in(outcomes):
            mine = [good(outcomes, system=system, ranks=ranks) for ranks in numbers]
            samples = [gather(loops(each), "blocked_s") for each in mine]
            blocked.append([label(system), *(spread(each, 1e3) if each else "—" for each in samples)])
            if system != "none":
                rates.append([label(system), *(number(median(map(rate, each))) if each else "—" for each in mine)])
        head = ["system", *(f"{ranks} ranks" if ranks > 1 else "1 rank" for ranks in numbers)]
        size = outcomes[0].case.gib
        return [
            Table(f"Blocked per save and rank, ms; {size:g} GiB a rank", head, blocked),
            Table("All ranks' bytes over the time until durable, GB/s", head, rates),
        ]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        numbers = sorted({each.case.ranks for each in outcomes})
        systems = [each for each in systems_in(outcomes) if each != "none" and good(outcomes, system=each)]
        values = {
            system: [
                [each * 1e3 for each in gather(loops(good(outcomes, system=system, ranks=ranks)), "blocked_s")]
                for ranks in numbers
            ]
            for system in systems
        }
        axes = figure.subplots()
        bars(axes, [f"{ranks} ranks" if ranks > 1 else "1 rank" for ranks in numbers], values)
        axes.set_yscale("log")
        axes.set_ylabel("blocked per save and rank, ms (log scale)")


def rate(outcome: Outcome) -> float:
    """GB/s of all ranks together."""
    all_loops: list[dict[str, Any]] = loops([outcome])
    total = sum(each["bytes"] * each["saves"] for each in all_loops)
    return float(total / max(each["loop_s"] + each["finish_s"] + each["sync_s"] for each in all_loops) / 1e9)


QUESTION = Ranks()
