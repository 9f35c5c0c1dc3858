from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.case import GIB, Case, Outcome
from benchmarks.harness import Cannot, Harness
from benchmarks.plots import bars
from benchmarks.questions.base import Question, Scope, Table, gather, good, label, loops, median, number, systems_in
from matplotlib.figure import Figure

LINK = 25e9
"""Pinned copies from one of the paper's GPUs to its host (section 6.1)."""
STORAGE = 1.84e9
"""What one GPU's share of the file system took in steady state: 50 × 83 GB in 282 s by 8 GPUs (Figure 11)."""
HOST_GB = 16.0
"""Each approach could use 64 GB of host memory on a node of four GPUs."""
BYTES = 1 / 40
"""Bytes here are this part of the paper's; the seconds follow from the link."""


@dataclass(frozen=True)
class Model:
    """Of the paper: its Table 1, Figures 3 and 4; then aggregate GB/s (Figure 7) and iteration s (Figure 8)."""

    name: str
    gb: float
    forward_s: float
    backward_s: float
    update_s: float
    gbps: dict[str, float]
    iteration_s: dict[str, float]


_COLUMNS = ("torch-save", "clone-thread", "torchsnapshot", "stillframe")
"""Who stands here for whom there: DeepSpeed, Async. ckpt., TorchSnapshot, DataStates-LLM."""


def _of(*values: float) -> dict[str, float]:
    return dict(zip(_COLUMNS, values, strict=True))


MODELS = (
    Model("3B", 11.3, 0.81, 0.79, 0.10, _of(4, 7, 9, 135), _of(8.93, 8.94, 6.95, 4.16)),
    Model("7B", 10.4, 1.26, 1.82, 0.12, _of(8, 11, 20, 223), _of(13.34, 15.12, 7.44, 5.03)),
    Model("13B", 10.4, 1.85, 3.56, 0.09, _of(7, 23, 41, 234), _of(28.55, 17.16, 9.66, 6.49)),
    Model("30B", 13.9, 3.72, 8.58, 0.11, _of(15, 44, 47, 395), _of(42.05, 23.82, 22.10, 13.72)),
    Model("70B", 13.3, 6.71, 16.82, 0.07, _of(54, 78, 117, 638), _of(46.97, 38.51, 36.41, 29.04)),
)


class Models(Question):
    """Do the paper's ratios come out on the paper's proportions?"""

    name = "models"
    title = "The paper's five models, scaled to this machine"
    asks = (
        "One GPU's part of each model: bytes of its Figure 3 and seconds of its Figure 4, a checkpoint at every one of 5 "
        "iterations, as in its Figures 7 and 8. Bytes are divided by 40; the link is a memory copy, and the seconds are "
        "scaled so that bytes over link and compute keep the paper's proportion (25 GB/s); the disk is slowed to the "
        "proportion of 1.84 GB/s a GPU, for all systems alike and without a page cache in between; the host buffer is 16 GB "
        "to scale. Throughput is the paper's measure, bytes over blocked time, so its ratio is that of blocked times. "
        "The fence and the save of the five iterations count; the first save of a process does not."
    )

    def cases(self, scope: Scope) -> list[Case]:
        seconds = LINK * BYTES / copy_rate(scope.harness)
        models = (MODELS[1],) if scope.is_short else MODELS
        return [
            Case(
                task="loop", system=system, gib=model.gb * 1e9 * BYTES / GIB, iterations=5,
                compute_s=(model.forward_s + model.backward_s) * seconds, update_s=model.update_s * seconds,
                disk_rate=STORAGE * BYTES / seconds, host_gib=HOST_GB * 1e9 * BYTES / GIB, detail=model.name,
            )
            for model in models
            for system in ("none", *_COLUMNS)
            if system in (scope.few() if scope.is_short else scope.systems) or system == "none"
        ]  # fmt: skip

    def turns(self, is_short: bool) -> int:
        return 1

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        rows, times = [], []
        for model in models_in(outcomes):
            ours = blocked(outcomes, model, "stillframe")
            our_time = iteration(outcomes, model, "stillframe")
            row, time = [model.name], [model.name]
            for system in _COLUMNS[:-1]:
                theirs, their_time = blocked(outcomes, model, system), iteration(outcomes, model, system)
                there = model.gbps["stillframe"] / model.gbps[system]
                row.append(f"{number(median(theirs) / median(ours))} ({number(there)})" if theirs and ours else "—")
                there = model.iteration_s[system] / model.iteration_s["stillframe"]
                time.append(f"{number(their_time / our_time)} ({number(there)})" if their_time and our_time else "—")
            rows.append([*row, number(median(ours) * 1e3) if ours else "—"])
            alone = iteration(outcomes, model, "none")
            there = model.iteration_s["stillframe"] / (model.forward_s + model.backward_s + model.update_s)
            times.append([*time, f"{number(our_time / alone)} ({number(there)})" if our_time and alone else "—"])
        case = outcomes[0].case
        scale = case.compute_s / (models_in(outcomes)[0].forward_s + models_in(outcomes)[0].backward_s)
        head = [label(system) for system in _COLUMNS[:-1]]
        return [
            Table(
                f"Throughput of stillframe over theirs here (the paper's DataStates-LLM over theirs); seconds × {scale:.3g}, "
                f"link {LINK * BYTES / scale / 1e9:.3g} GB/s, disk {(case.disk_rate or 0) / 1e9:.3g} GB/s",
                ["model", *head, "stillframe blocked, ms"], rows,
            ),
            Table("Iteration time of theirs over stillframe's (the paper's)", ["model", *head, "stillframe over not saving"], times),
        ]  # fmt: skip

    def draw(self, outcomes: Sequence[Outcome], figure: Figure) -> None:
        models = models_in(outcomes)
        systems = [each for each in systems_in(outcomes) if each in _COLUMNS]
        left, right = figure.subplots(1, 2)
        throughput = {
            system: [[model.gb * BYTES / each for each in blocked(outcomes, model, system)] for model in models]
            for system in systems
        }
        bars(left, [model.name for model in models], throughput)
        left.set_yscale("log")
        left.set_ylabel("bytes ÷ blocked time, GB/s (log scale)")
        times = {
            system: [gather(of(outcomes, model, system), "iteration_s") for model in models]
            for system in ("none", *systems)
        }
        bars(right, [model.name for model in models], times, is_labelled=False)
        right.set_ylabel("iteration, s (scaled)")


def copy_rate(harness: Harness | None) -> float:
    """Bytes per second that one thread copies here; some rate if it is not to be measured."""
    if harness is None:
        return 5e9
    measured = harness.run(Case(task="copy-rate", system="copy", gib=0.25, iterations=9))
    if measured.error:
        raise Cannot(f"the rate of a memory copy could not be measured: {measured.error}")
    return float(measured.figures["bytes"] / median(measured.figures["copy_s"]))


def models_in(outcomes: Sequence[Outcome]) -> list[Model]:
    there = {each.case.detail for each in outcomes}
    return [model for model in MODELS if model.name in there]


def of(outcomes: Sequence[Outcome], model: Model, system: str) -> list[dict[str, list[float]]]:
    return loops(good(outcomes, system=system, detail=model.name))


def blocked(outcomes: Sequence[Outcome], model: Model, system: str) -> list[float]:
    """Mean seconds per checkpoint, of each run: the paper divides the bytes by the time of all."""
    return [sum(each["blocked_s"]) / len(each["blocked_s"]) for each in of(outcomes, model, system)]


def iteration(outcomes: Sequence[Outcome], model: Model, system: str) -> float:
    samples = gather(of(outcomes, model, system), "iteration_s")
    return sum(samples) / len(samples) if samples else 0.0


QUESTION = Models()
