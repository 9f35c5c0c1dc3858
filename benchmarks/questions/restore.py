from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, good, label, median, number, spread, systems_in
from benchmarks.questions.persist import size_over
from matplotlib.figure import Figure


class Restore(Question):
    """How fast does a run get its state back?"""

    name = "restore"
    title = "Restore: into live tensors, cold and warm"
    asks = (
        "From the start of the restore until every byte is in the live tensors, which are there and touched before. Cold: "
        "nothing in the page cache; warm: right after. Then one bit in the middle of the largest file is changed and the "
        "restore repeated: not noticed means that training would go on with it. The raw reader reads the same amount with O_DIRECT and three threads, into buffers of its own; `stillframe verify` reads every byte, and checks it, into no tensor."
    )

    def cases(self, scope: Scope) -> list[Case]:
        gib = scope.sizes(0.25 if scope.is_short else 1.5)[0]
        iterations = 2 if scope.is_short else 3
        raw = [Case(task="restore-raw", system="raw", gib=gib, iterations=iterations)]
        if "stillframe" in scope.systems:
            raw.append(Case(task="verify", system="verify", gib=gib, iterations=iterations))
        peers = [each for each in (scope.few() if scope.is_short else scope.systems) if each != "none"]
        return raw + [Case(task="restore", system=each, gib=gib, iterations=iterations) for each in peers]

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        raw = [rate for each in good(outcomes, system="raw") for rate in size_over(each, "cold_s")]
        rows = [["raw O_DIRECT reader", spread(raw), "1", "—", "—"]] if raw else []
        verified = [rate for each in good(outcomes, system="verify") for rate in size_over(each, "cold_s")]
        if verified and raw:
            rows.append(["stillframe verify", spread(verified), number(median(verified) / median(raw)), "—", "—"])
        for system in systems_in(outcomes):
            mine = good(outcomes, system=system)
            if mine:
                cold = [rate for each in mine for rate in size_over(each, "cold_s")]
                warm = [rate for each in mine for rate in size_over(each, "warm_s")]
                ratio = number(median(cold) / median(raw)) if raw else "—"
                rows.append([label(system), spread(cold), ratio, spread(warm), mine[0].figures["flipped"]])
        head = ["system", "cold, GB/s", "÷ raw", "warm, GB/s", "a changed bit"]
        return [Table(f"{outcomes[0].case.gib:g} GiB", head, rows)]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        systems = ["raw", *(each for each in systems_in(outcomes) if good(outcomes, system=each))]
        values = {
            system: [
                [rate for each in good(outcomes, system=system) for rate in size_over(each, name)]
                for name in ("cold_s", "warm_s")
            ]
            for system in systems
        }
        axes = figure.subplots()
        bars(axes, ["cold", "warm"], {system: each for system, each in values.items() if each[0]})
        axes.set_ylabel("GB/s into live tensors")


QUESTION = Restore()
