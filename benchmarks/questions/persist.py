from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.case import GIB, Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, good, label, median, number, spread, systems_in
from matplotlib.figure import Figure

_RAW = "raw O_DIRECT writer"
_SYNCS = ("file_syncs", "directory_syncs")


class Persist(Question):
    """How fast, and at what price, do the bytes get to the disk?"""

    name = "persist"
    title = "Persist: bytes durable per second, CPU and memory"
    asks = (
        "One save at a time, nothing else running: from save() until the system says it is complete, and until the kernel "
        "has it on the disk (sync), for those that do not see to it themselves. CPU seconds are those of all processes of "
        "the system; in brackets those of the whole machine, kernel threads that write back included. Memory is the peak "
        "(pages that processes share count once) beyond that of not saving. fsyncs are counted in the system's processes, "
        "per save, of files and of directories. The raw writer is one thread with O_DIRECT and one fsync, to new files."
    )

    def cases(self, scope: Scope) -> list[Case]:
        gib = scope.sizes(0.25 if scope.is_short else 1.0)[0]
        iterations = 2 if scope.is_short else 4
        raw = [Case(task="persist-raw", system="raw", gib=gib, iterations=iterations)]
        if scope.is_short:
            return raw + [
                Case(task="persist", system=system, gib=gib, iterations=iterations, is_watched=True)
                for system in scope.few()
            ]
        return raw + [
            Case(task="persist", system=system, gib=gib, iterations=count, is_watched=is_watched)
            for is_watched, count in ((False, iterations), (True, 2))  # watching costs time
            for system in scope.systems
            if is_watched or system != "none"
        ]

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        raw = [size_over(each, "durable_s") for each in good(outcomes, system="raw")]
        raw_rate = median([rate for each in raw for rate in each]) if raw else None
        over = [rate for each in good(outcomes, system="raw") for rate in size_over(each, "over_s")]
        base = [each.figures["peak_bytes"] for each in good(outcomes, system="none", is_watched=True)]
        rows = []
        if raw_rate:
            cpu = [cpu_per_gib(each, "cpu_s") for each in good(outcomes, system="raw")]
            rows.append([_RAW, number(raw_rate), number(raw_rate), "1", spread(cpu), "—", "1 / 0"])
            rows.append([f"{_RAW}, over an old file", number(median(over)), number(median(over)), number(median(over) / raw_rate), "—", "—", "1 / 0"])  # fmt: skip
        for system in systems_in(outcomes):
            mine = timed(outcomes, system)
            watched = good(outcomes, system=system, is_watched=True)
            if system == "none" or not mine:
                continue
            own = [rate for each in mine for rate in size_over(each, "own_s")]
            durable = [rate for each in mine for rate in size_over(each, "durable_s")]
            cpu = [cpu_per_gib(each, "cpu_s") for each in mine]
            machine = [cpu_per_gib(each, "machine_cpu_s") for each in mine]
            memory, syncs = "—", "—"
            if watched and base:
                memory = f"{(median(each.figures['peak_bytes'] for each in watched) - median(base)) / GIB:.2f}"
                saves = watched[0].case.iterations
                calls = [median(each.figures[name] for each in watched) / saves for name in _SYNCS]
                syncs = " / ".join(map(number, calls))
            rows.append(
                [
                    label(system),
                    spread(own),
                    spread(durable),
                    number(median(durable) / raw_rate) if raw_rate else "—",
                    f"{number(median(cpu))} ({number(median(machine))})",
                    memory,
                    syncs,
                ]
            )
        gib = outcomes[0].case.gib
        head = ["system", "complete, GB/s", "durable, GB/s", "÷ raw", "CPU s per GiB (machine)", "memory, GiB", "fsyncs: files / directories"]  # fmt: skip
        return [Table(f"{gib:g} GiB", head, rows)]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        systems = [each for each in systems_in(outcomes) if each != "none" and good(outcomes, system=each)]
        left, right = figure.subplots(1, 2)
        rates = {
            each: [[rate for one in timed(outcomes, each) for rate in size_over(one, "durable_s")]] for each in systems
        }
        raw = {"raw": [[rate for one in good(outcomes, system="raw") for rate in size_over(one, "durable_s")]]}
        bars(left, ["durable, GB/s (more is better)"], {**(raw if raw["raw"][0] else {}), **rates})
        cpu = {each: [[cpu_per_gib(one, "machine_cpu_s") for one in timed(outcomes, each)]] for each in systems}
        bars(right, ["CPU seconds per GiB, whole machine (less is better)"], cpu)


def timed(outcomes: Sequence[Outcome], system: str) -> list[Outcome]:
    """The runs whose time counts: those that were not watched, if there are any."""
    return good(outcomes, system=system, is_watched=False) or good(outcomes, system=system)


def size_over(outcome: Outcome, name: str) -> list[float]:
    """GB/s of every sample."""
    return [outcome.figures["bytes"] / each / 1e9 for each in outcome.figures[name]]


def cpu_per_gib(outcome: Outcome, name: str) -> float:
    figures: dict[str, Any] = outcome.figures
    return float(figures[name] / (figures["bytes"] * outcome.case.iterations / GIB))


QUESTION = Persist()
