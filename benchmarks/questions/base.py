"""What every question is: cases to run, tables and one plot from what came out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.case import Case, Outcome
from benchmarks.harness import Harness
from benchmarks.systems import SYSTEMS
from matplotlib.figure import Figure

Samples = Sequence[float]

FEW = ("none", "torch-save", "dcp", "clone-thread", "dcp-async-thread", "torch-checkpointing", "stillframe")
FEWEST = ("none", "torch-save", "stillframe")
"""One of each kind, where asking all would take too long."""


@dataclass(frozen=True)
class Scope:
    """What of a question is asked: all of it or the short form, of which systems, up to which size."""

    is_short: bool
    systems: Sequence[str]
    max_gib: float
    harness: Harness | None
    """None while only the room is worked out: then nothing may be run."""

    def sizes(self, *gib: float) -> list[float]:
        return [each for each in gib if each <= self.max_gib] or [min(gib[0], self.max_gib)]

    def few(self) -> list[str]:
        """One system of each kind; in the short form the two ends."""
        return [name for name in self.systems if name in (FEWEST if self.is_short else FEW)]


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Question:
    """One question of the evaluation."""

    name: ClassVar[str]
    title: ClassVar[str]
    asks: ClassVar[str]
    """What is done and how to read it: printed above the tables."""

    def cases(self, scope: Scope) -> list[Case]:
        raise NotImplementedError

    def turns(self, is_short: bool) -> int:
        return 1 if is_short else 2

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        raise NotImplementedError

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        raise NotImplementedError


def good(outcomes: Iterable[Outcome], **which: Any) -> list[Outcome]:
    """The outcomes that may be used, of the cases with these attributes."""
    outcomes = list(outcomes)
    wrong = [each.case for each in outcomes if not each.error and not each.is_good]  # once wrong, never right
    return [
        each
        for each in outcomes
        if each.is_good
        and each.case not in wrong
        and all(getattr(each.case, name) == value for name, value in which.items())
    ]


def systems_in(outcomes: Iterable[Outcome]) -> list[str]:
    """The systems that gave something, in the order of the tables."""
    there = {each.case.system for each in outcomes}
    return [name for name in SYSTEMS if name in there]


def label(system: str) -> str:
    return SYSTEMS[system].label if system in SYSTEMS else system


def median(samples: Iterable[float]) -> float:
    return statistics.median(samples)


def number(value: float) -> str:
    """Three digits, and no exponents."""
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    return f"{value:,.0f}" if "e" in text or abs(value) >= 1000 else text


def spread(samples: Samples, scale: float = 1.0) -> str:
    """The median, and in brackets the least and the most."""
    scaled = [each * scale for each in samples]
    if len(scaled) == 1:
        return number(scaled[0])
    return f"{number(median(scaled))} ({number(min(scaled))}–{number(max(scaled))})"


def loops(outcomes: Iterable[Outcome], every: int | None = None) -> list[dict[str, Any]]:
    """The loops of these outcomes; with several ranks, those of every rank."""
    found = []
    for outcome in outcomes:
        for rank in outcome.figures.get("ranks", [outcome.figures]):
            found += [each for each in rank["loops"] if every is None or each["every"] == every]
    return found


def gather(loops: Iterable[dict[str, Any]], name: str) -> list[float]:
    """One list of all samples."""
    return [sample for each in loops for sample in each[name]]
