"""How the plots look: grouped bars as in the paper, colours that stay apart for colour-blind eyes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from benchmarks.systems import SYSTEMS
from matplotlib.figure import Figure

matplotlib.use("agg")
matplotlib.rcParams.update(
    {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
        "grid.color": "#dddddd", "axes.axisbelow": True, "svg.hashsalt": "stillframe", "legend.frameon": False,
    }
)  # fmt: skip

_OURS = "#D55E00"
# Okabe and Ito's colours and lighter ones of the same hues; systems that write in the background are not hatched.
_COLOURS = {
    "none": "#bbbbbb", "torch-save": "#0072B2", "safetensors": "#56B4E9", "dcp": "#5D3A9B", "deepspeed-fast": "#999999",
    "clone-thread": "#009E73", "dcp-async": "#CC79A7", "dcp-async-thread": "#E69F00", "dcp-async-process": "#F0E442",
    "torchsnapshot": "#8DD3C7", "torch-checkpointing": "#882255", "deepspeed-decoupled": "#44AA99", "nvrx": "#332288",
    "stillframe": _OURS, "raw": "#444444",
}  # fmt: skip


def colour(system: str) -> str:
    return _COLOURS.get(system, "#777777")


def style(system: str) -> dict[str, Any]:
    """The look of a system's bar."""
    is_async = (system in SYSTEMS and SYSTEMS[system].is_async) or system == "raw"
    hatch = None if is_async or system == "none" else "///"
    return {"color": colour(system), "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}


def name_of(system: str) -> str:
    return SYSTEMS[system].label.replace("\n", ", ") if system in SYSTEMS else system


def bars(axes: Any, groups: Sequence[str], values: dict[str, list[list[float]]], is_labelled: bool = True) -> None:
    """A group of bars for each of ``groups``: the median of each system's samples, whiskers to least and most."""
    width = 0.84 / len(values)
    for number, (system, columns) in enumerate(values.items()):
        for group, samples in enumerate(columns):
            at = group + (number - (len(values) - 1) / 2) * width
            if not samples:
                axes.text(at, axes.get_ylim()[0], "×", ha="center", va="bottom", color=colour(system), fontsize=7)
                continue
            middle = statistics.median(samples)
            label = name_of(system) if group == next(i for i, each in enumerate(columns) if each) else None
            axes.bar(at, middle, width, label=label, **style(system))
            if len(samples) > 1:
                least, most = middle - min(samples), max(samples) - middle
                axes.errorbar(at, middle, [[least], [most]], color="#333333", lw=0.6, capsize=1.2)
            if is_labelled:
                text = f"{middle:.2g}" if middle < 10 else f"{middle:.0f}"
                axes.annotate(
                    text, (at, max(samples)), (0, 2), textcoords="offset points", ha="center", va="bottom",
                    rotation=90, fontsize=6, color="#000000" if system == "stillframe" else "#555555",
                    fontweight="bold" if system == "stillframe" else "normal",
                )  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)


def legend(figure: Figure) -> None:
    """One legend for the whole figure, above it, each system once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="outside upper left", ncols=4, fontsize=8,
            title="hatched: training waits until it is written", title_fontsize=8, alignment="left",
        )  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """As PNG and as SVG."""
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
