from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import Case, Outcome
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, good, label, median, number, spread, systems_in
from benchmarks.training import ITERATIONS
from matplotlib.figure import Figure

_GIB = {"gpt-5M": 0.06, "gpt-10M": 0.11, "gpt-25M": 0.29, "python": 0.25}
_NAMES = {"python": "a loop of pure Python"}


class Training(Question):
    """What does saving cost a training run that needs the same cores?"""

    name = "training"
    title = "Real training on this CPU"
    asks = (
        "The demo's GPT at three sizes, with AdamW, on all cores, and a loop that never leaves the Python interpreter; a save "
        "at every iteration. Turns of 6 iterations without and 6 with saving, until the last save is complete, alternate "
        "within one process; the figure is speed with saving over speed without, of each pair. There is no accelerator: copying, checksums and writing take "
        "cores and memory bandwidth from the training. Not saving shows the noise."
    )

    def cases(self, scope: Scope) -> list[Case]:
        models = ("gpt-10M",) if scope.is_short else tuple(_GIB)
        return [
            Case(
                task="training",
                system=system,
                gib=_GIB[model],
                iterations=ITERATIONS * (2 if scope.is_short else 4),
                detail=model,
            )
            for model in models
            for system in scope.few()
        ]

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        models = models_in(outcomes)
        rows = []
        for system in systems_in(outcomes):
            cells = []
            for model in models:
                samples = ratios(outcomes, system, model)
                cells.append(spread(samples) if samples else "—")
            rows.append([label(system), *cells])
        head = []
        for model in models:
            quiet = [each for one in good(outcomes, detail=model) for each in one.figures["quiet"]]
            size = next(one.figures["bytes"] for one in good(outcomes, detail=model)) / 2**20
            unit = "additions" if model == "python" else "tokens"
            head.append(f"{_NAMES.get(model, model)}, {size:.0f} MiB ({number(median(quiet))} {unit}/s)")
        return [Table("Speed with a save at every iteration over speed without", ["system", *head], rows)]

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        models = models_in(outcomes)
        values = {system: [ratios(outcomes, system, model) for model in models] for system in systems_in(outcomes)}
        axes = figure.subplots()
        bars(axes, [_NAMES.get(model, model) for model in models], values)
        axes.axhline(1, color="#000000", lw=0.8)
        axes.set_ylabel("speed with saving ÷ without")


def models_in(outcomes: Sequence[Outcome]) -> list[str]:
    there = {each.case.detail for each in good(outcomes)}
    return [model for model in _GIB if model in there]


def ratios(outcomes: Sequence[Outcome], system: str, model: str) -> list[float]:
    found = []
    for each in good(outcomes, system=system, detail=model):
        found += [with_ / without for with_, without in zip(each.figures["saving"], each.figures["quiet"], strict=True)]
    return found


QUESTION = Training()
