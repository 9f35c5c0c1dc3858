"""The metrics as plain numbers, for the logger of an experiment: TensorBoard, Weights & Biases, anything with a step.

writer = SummaryWriter(…)
add_scalars(writer, checkpointer.stats(), step)
wandb.log(scalars(checkpointer.stats()), step=step)
"""

from __future__ import annotations

from typing import Protocol

from stillframe.model import Stats
from stillframe.observe.metrics import METRICS, TIER_METRICS


class Writer(Protocol):
    """``torch.utils.tensorboard.SummaryWriter``, or whatever takes its calls."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


def scalars(stats: Stats) -> dict[str, float]:
    """By ``stillframe/<name>``, and ``stillframe/<name>/<root>`` for those of a tier; without what has no value yet."""
    found = {f"stillframe/{metric.name}": metric.value(stats) for metric in METRICS}
    for tier in stats.tiers:
        found |= {f"stillframe/{metric.name}/{tier.root}": metric.value(tier) for metric in TIER_METRICS}
    return {name: float(value) for name, value in found.items() if value is not None}


def add_scalars(writer: Writer, stats: Stats, step: int) -> None:
    """Give all of them to a TensorBoard writer, under this step."""
    for name, value in scalars(stats).items():
        writer.add_scalar(name, value, step)
