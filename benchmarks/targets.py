"""What the evaluation is to show, worked out from the results, met or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.case import Outcome
from benchmarks.questions.base import Table, gather, good, label, loops, median, number
from benchmarks.questions.interval import over_none
from benchmarks.questions.persist import cpu_per_gib, size_over
from benchmarks.systems import SYSTEMS

_OURS = "stillframe"
_SIZE = 1.5

Results = Mapping[str, Sequence[Outcome]]


def targets(results: Results) -> Table | None:
    """A row for each target whose question was asked."""
    asked: list[tuple[str, str, Callable[[Sequence[Outcome]], list[str] | None]]] = [
        ("stall", f"blocked per save at {_SIZE:g} GiB and 1 s of compute: the best peer's over ours", blocked),
        ("interval", "a save at every iteration, end to end over not saving", end_to_end),
        ("restore", "cold restore: ours over the best peer's", cold),
        ("persist", "CPU seconds per GiB: the lowest of the asynchronous systems", cpu),
    ]
    rows = []
    for question, what, work_out in asked:
        cells = work_out(results[question]) if results.get(question) else None
        if cells:
            rows.append([what, *cells])
    return Table("What was to come out", ["", "aim", "came out", "against"], rows) if rows else None


def blocked(outcomes: Sequence[Outcome]) -> list[str] | None:
    times = {
        system: median(samples)
        for system in SYSTEMS
        if system != "none" and (samples := gather(loops(good(outcomes, system=system, gib=_SIZE)), "blocked_s"))
    }
    ours = times.pop(_OURS, None)
    if ours is None or not times:
        return None
    best = min(times, key=lambda system: times[system])
    ratio = times[best] / ours
    return ["≥ 500 ×", verdict(f"{number(ratio)} ×", ratio >= 500), against(best, times[best] * 1e3, ours * 1e3, "ms")]


def end_to_end(outcomes: Sequence[Outcome]) -> list[str] | None:
    ratios = over_none(outcomes, _OURS, 1)
    if not ratios:
        return None
    ratio = median(ratios)
    return ["≤ 1.05", verdict(number(ratio), ratio <= 1.05), "not saving"]


def cold(outcomes: Sequence[Outcome]) -> list[str] | None:
    rates = {
        system: median(samples)
        for system in SYSTEMS
        if (samples := [rate for each in good(outcomes, system=system) for rate in size_over(each, "cold_s")])
    }
    ours = rates.pop(_OURS, None)
    if ours is None or not rates:
        return None
    best = max(rates, key=lambda system: rates[system])
    ratio = ours / rates[best]
    return ["≥ 1.5 ×", verdict(f"{number(ratio)} ×", ratio >= 1.5), against(best, rates[best], ours, "GB/s")]


def cpu(outcomes: Sequence[Outcome]) -> list[str] | None:
    costs = {
        system: median(samples)
        for system, kind in SYSTEMS.items()
        if kind.is_async
        and (samples := [cpu_per_gib(each, "cpu_s") for each in good(outcomes, system=system, is_watched=False)])
    }
    ours = costs.pop(_OURS, None)
    if ours is None or not costs:
        return None
    best = min(costs, key=lambda system: costs[system])
    return ["the lowest", verdict(f"{number(ours)} s", ours <= costs[best]), against(best, costs[best], ours, "s")]


def verdict(value: str, is_met: bool) -> str:
    return f"{value}, {'met' if is_met else '**missed**'}"


def against(system: str, theirs: float, ours: float, unit: str) -> str:
    return f"{label(system)}: {number(theirs)} {unit}; stillframe: {number(ours)} {unit}"
