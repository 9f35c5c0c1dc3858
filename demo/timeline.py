"""The picture of the demo: what ran when during a few steps, as lanes over time.

Owns the drawing.  All times are of one clock, ``time.monotonic()``, which trainer and keeper share.
Colours are from the Okabe-Ito palette, told apart by the colour-blind; lanes and labels say it again.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from demo.record import Record, Saved, Step
from matplotlib import pyplot
from matplotlib.axes import Axes

_FORWARD, _BACKWARD, _UPDATE = "#56B4E9", "#0072B2", "#E69F00"
_BLOCKED, _STAGING, _FLUSHING, _COMMIT = "#D55E00", "#009E73", "#CC79A7", "#000000"
_SHOWN = 3
_HEIGHT = 0.62
_LANES = ("training", "blocked", "staging", "flushing")
_SAYS = {
    "training": "training\nthe loop itself",
    "blocked": "blocked\nsave() and fence",
    "staging": "staging\nstate → arena, a thread",
    "flushing": "flushing\narena → disk, the keeper",
}


def draw(record: Record, path: Path) -> None:
    """Write a PNG of three typical consecutive steps."""
    steps = _typical(record.steps)
    begin_s, end_s = steps[0].begun_s, steps[-1].begun_s + steps[-1].seconds
    margin_s = 0.05 * (end_s - begin_s)
    figure, axes = pyplot.subplots(figsize=(13, 4.6), dpi=120, layout="constrained")
    lanes = Lanes(axes, begin_s, begin_s + 0.93 * (end_s - begin_s))
    for step in record.steps:
        if step.begun_s < end_s + margin_s and step.begun_s + step.seconds > begin_s - margin_s:
            lanes.step(step)
    for save in record.saves:
        if save.times.requested_s < end_s + margin_s and (save.times.committed_s or end_s) > begin_s - margin_s:
            lanes.save(save)
    lanes.dress(-margin_s, end_s - begin_s + margin_s)
    figure.savefig(path)
    pyplot.close(figure)


def _typical(steps: list[Step]) -> list[Step]:
    """The consecutive steps whose length is nearest to the median, leaving out the ends of the run."""
    middle = steps[2:-2] if len(steps) >= _SHOWN + 6 else steps
    median_s = statistics.median(step.seconds for step in middle)
    windows = [middle[at : at + _SHOWN] for at in range(max(len(middle) - _SHOWN + 1, 1))]
    return min(windows, key=lambda window: sum(abs(step.seconds - median_s) for step in window))


class Lanes:
    """Bars on four lanes, in milliseconds since ``begin_s``."""

    def __init__(self, axes: Axes, begin_s: float, end_s: float) -> None:
        self._axes = axes
        self._begin_s = begin_s
        self._end_s = end_s
        """Labels that would begin later are left out: they would be cut off."""

    def step(self, step: Step) -> None:
        at_s = step.begun_s
        self._bar("training", at_s, step.forward_s, _FORWARD, "forward")
        at_s += step.forward_s
        self._bar("training", at_s, step.backward_s, _BACKWARD, "backward", ink="white")
        at_s += step.backward_s
        self._blocked(at_s, step.fence_s)
        at_s += step.fence_s
        self._bar("training", at_s, step.update_s, _UPDATE)
        left, right = self._ms(at_s), self._ms(at_s + step.update_s)
        self._axes.axvspan(left, right, color=_UPDATE, alpha=0.18, linewidth=0, zorder=0)
        at_s += step.update_s
        self._blocked(at_s, step.save_s)
        top = -0.5 * _HEIGHT - 0.12
        self._text((self._ms(step.begun_s) + left) / 2, top, f"step {step.step}", weight="bold")
        self._text((left + right) / 2, top, "update", color="#8A5F00")
        blocked = f"fence {step.fence_s * 1e3:.2f} ms, save() {step.save_s * 1e3:.1f} ms"
        self._beside("blocked", at_s + step.save_s, blocked)

    def save(self, save: Saved) -> None:
        times = save.times
        if times.stage_begin_s is not None and times.staged_s is not None:
            self._bar("staging", times.stage_begin_s, times.staged_s - times.stage_begin_s, _STAGING)
            length_ms = (times.staged_s - times.stage_begin_s) * 1e3
            self._beside("staging", times.staged_s, f"step {save.step}, {length_ms:.0f} ms")
        if times.flush_begin_s is not None and times.sealed_s is not None and times.committed_s is not None:
            self._bar("flushing", times.flush_begin_s, times.sealed_s - times.flush_begin_s, _FLUSHING)
            self._axes.plot(self._ms(times.committed_s), _y("flushing"), "D", color=_COMMIT, markersize=6, zorder=4)
            self._beside("flushing", times.committed_s, f"step {save.step} committed")

    def dress(self, left_s: float, right_s: float) -> None:
        axes = self._axes
        axes.set_xlim(left_s * 1e3, right_s * 1e3)
        axes.set_ylim(len(_LANES) - 0.4, -0.75)
        axes.set_yticks(range(len(_LANES)), [_SAYS[lane] for lane in _LANES])
        axes.set_xlabel("milliseconds")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(
            "A checkpoint at every step: copied under the next forward and backward, before the update (orange) "
            "changes the state",
            loc="left", fontsize=11,
        )  # fmt: skip

    def _blocked(self, at_s: float, length_s: float) -> None:
        self._bar("blocked", at_s, length_s, _BLOCKED, edge=_BLOCKED)

    def _bar(
        self,
        lane: str,
        at_s: float,
        length_s: float,
        color: str,
        label: str = "",
        ink: str = "black",
        edge: str = "white",
    ) -> None:
        left, width = self._ms(at_s), length_s * 1e3
        self._axes.barh(_y(lane), width, _HEIGHT, left, color=color, edgecolor=edge, linewidth=0.8, zorder=2)
        if label and at_s < self._end_s:
            self._text(left + width / 2, _y(lane), label, color=ink)

    def _beside(self, lane: str, at_s: float, text: str) -> None:
        if at_s < self._end_s:
            where = (self._ms(at_s), _y(lane))
            self._axes.annotate(text, where, (8, 0), textcoords="offset points", va="center", fontsize=9)

    def _text(self, x: float, y: float, text: str, color: str = "black", weight: str = "normal") -> None:
        self._axes.text(
            x, y, text, va="center", ha="center", fontsize=9, color=color, weight=weight, clip_on=True, zorder=3
        )

    def _ms(self, at_s: float) -> float:
        return (at_s - self._begin_s) * 1e3


def _y(lane: str) -> float:
    return float(_LANES.index(lane))
