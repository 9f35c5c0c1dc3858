"""SVG drawings for the report: bars over steps, and a timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 520, 170
_LEFT, _TOP, _BOTTOM = 84, 14, 26
_MAX_BARS, _MAX_LABELS = 120, 8


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    is_bad: bool = False


def bars(title: str, found: Sequence[Bar], text: Callable[[float], str], base: int = 10, note: str = "") -> str:
    """One bar for each step, the newest on the right.  The axis goes from zero to a round number."""
    shown = found[-_MAX_BARS:]
    top = _nice(max((bar.value for bar in shown), default=0.0) or 1.0, base)
    inner_w, inner_h = _WIDTH - _LEFT - 10, _HEIGHT - _TOP - _BOTTOM
    width = inner_w / max(len(shown), 12)
    labelled = math.ceil(len(shown) / _MAX_LABELS)
    made = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + inner_h * (1 - share)
        made.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        made.append(_label("axis", _LEFT - 6, y + 4, "end", text(top * share)))
    for at, bar in enumerate(shown):
        height = inner_h * min(bar.value / top, 1.0)
        x, y = _LEFT + at * width, _TOP + inner_h - height
        kind = "bad" if bar.is_bad else "bar"
        made.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width * 0.8, 0.8):.1f}" '
            f'height="{max(height, 0.5):.1f}">'
            f"<title>step {escape(bar.label)}: {escape(text(bar.value))}</title></rect>"
        )
        if (len(shown) - 1 - at) % labelled == 0:
            made.append(_label("axis", x + 0.4 * width, _HEIGHT - 8, "middle", bar.label))
    if len(shown) < len(found):
        note = f"the last {len(shown)} of {len(found):,}{'; ' if note else ''}{note}"
    more = f" <small>{escape(note)}</small>" if note else ""
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(made)}</svg>'
    return f"<figure><figcaption>{escape(title)}{more}</figcaption>{drawing}</figure>"


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time on a row of the timeline."""

    row: int
    begin_s: float
    end_s: float
    kind: str
    """Its class in the style sheet."""
    title: str
    label: str = ""
    """Shown beside it."""


def timeline(rows: Sequence[str], slices: Sequence[Slice], begin_s: float, end_s: float) -> str:
    """Rows of slices on one axis of seconds."""
    width, left, row_h = 1100, 92, 34
    height = row_h * len(rows) + 34
    scale = (width - left - 10) / max(end_s - begin_s, 1e-9)
    made = []
    step = _nice((end_s - begin_s) / 8)
    tick = 0.0
    while tick <= end_s - begin_s:
        x = left + tick * scale
        made.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 24}"/>')
        made.append(_label("axis", x, height - 8, "middle", f"{tick:.4g} s"))
        tick += step
    for number, name in enumerate(rows):
        y = number * row_h + 8
        made.append(_label("row", left - 8, y + row_h / 2 + 1, "end", name))
    for each in slices:
        first, last = max(each.begin_s, begin_s), min(each.end_s, end_s)
        if last < first:
            continue
        x, y = left + (first - begin_s) * scale, each.row * row_h + 8
        least = 0.5 if each.kind == "blocked" else 1.2
        made.append(
            f'<rect class="{each.kind}" x="{x:.2f}" y="{y + 3}" width="{max((last - first) * scale, least):.2f}" '
            f'height="{row_h - 8}" rx="2"><title>{escape(each.title)}</title></rect>'
        )
        if each.label:
            after = x + 4 + (last - first) * scale
            is_room = after + 7 * len(each.label) < width
            at = (after, "start") if is_room else (x - 4, "end")
            made.append(_label("axis", at[0], y + row_h / 2 + 4, at[1], each.label))
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="timeline">{"".join(made)}</svg>'


def _label(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _nice(value: float, base: int = 10) -> float:
    """The next of 1, 2, 5, 10, … at or above a value; with base 1024, of 1, 2, 4, 8, …"""
    if base == 1024:
        return float(2 ** math.ceil(math.log2(max(value, 1.0))))
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((power * each for each in (1, 2, 5) if power * each >= value * 0.999), power * 10)
