"""``stillframe diff``: what changed between two checkpoints, and by how much."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from stillframe.checkpoint import contents, survey
from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.compare import Change, Pair, compare
from stillframe.checkpoint.contents import Entry
from stillframe.cli import output
from stillframe.cli.arguments import Json
from stillframe.cli.exit_codes import DIFFERENT
from stillframe.cli.steps import is_step, step_of
from stillframe.cli.stored import merged, tensors
from stillframe.errors import ConfigError
from stillframe.store import files

if TYPE_CHECKING:
    from stillframe.restoring.statistics import Difference

_MARKS = {"changed": "~", "added": "+", "removed": "-", "equal": "="}
_MOST_ROWS = 30
"""More are summed up by module."""
_LONG, _BRIEF = 40, 12
"""So much of a value is shown, and of one on a narrow terminal."""
_MOST_READ = 1000
_JOINT = re.compile(r"[/.]")


class Only(str, Enum):
    """Which entries are listed."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class _Row:
    pair: Pair
    difference: Difference | None

    @property
    def outcome(self) -> Change:
        if self.difference is None:
            return self.pair.change
        return "changed" if self.difference.different else "equal"


def command(
    root: Annotated[str, typer.Argument(help="A root.", show_default=False)],
    left: Annotated[str, typer.Argument(help="A step of the root; or a second root.", show_default=False)],
    right: Annotated[str | None, typer.Argument(help="Another step of the root.", show_default=False)] = None,
    step: Annotated[
        str | None, typer.Option(help="With two roots: compare this step. Default: the newest of each.")
    ] = None,
    only: Annotated[Only | None, typer.Option(help="List only these entries.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="List every entry, also if there are many.")] = False,
    json: Json = False,
) -> None:
    """Show what changed between two checkpoints.

    Compares two steps of a root, or the newest steps of two roots: which tensors changed and by how much, which values
    changed, what was added or removed. For a tensor: the share of its elements that differ, the greatest difference
    (max |Δ|), and the norm of the difference over the norm of the left tensor (|Δ| / |was|). If more than 30 entries
    differ, there is one row for each module, with the greatest figures in it. Data with equal checksums is not read.
    Exit code 10 if anything differs.

    Examples: stillframe diff runs/gpt 1000 2000; stillframe diff runs/a runs/b --step 1000
    """
    if right is not None and step is not None:
        raise ConfigError(f"--step {step} is for two roots; two steps of one root were given")
    with _open(root, left if right is not None else step) as one:
        with _open(root if right is not None else left, right if right is not None else step) as other:
            rows = measured(one, other)
        names = [f"step {one.step}", f"step {other.step}"]
        if right is None:
            names = [f"{each.root} step {each.step}" for each in (one, other)]
    chosen = [row for row in rows if (row.outcome == only.value if only else row.outcome != "equal")]
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in _MARKS}
    if json:
        output.print_json({"left": names[0], "right": names[1], **counts, "entries": [_json(row) for row in chosen]})
    else:
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        output.say(f"{names[0]} → {names[1]}: {summary}")
        figures = ["differing", "max |Δ|", "|Δ| / |was|"]
        if all_ or len(chosen) <= _MOST_ROWS:
            columns = ["", "path", "what", *figures]
            cells = [_cells(row) for row in chosen]
            output.table(columns, cells, right=figures, optional=[figures[2], figures[0]], text=["path"])
        else:
            columns = ["", "module", "entries", "what", *figures]
            optional = [figures[2], "what", "entries", figures[0]]
            output.table(columns, _sums(chosen), right=["entries", *figures], optional=optional, text=["module"])
            output.say(f"{len(chosen)} entries; each row has the greatest figures of a module; --all lists every entry")
    if counts["equal"] < len(rows):
        sys.exit(DIFFERENT)


def _open(root: str, step: str | None) -> Checkpoint:
    if is_step(root) and files.kind_of(root) == "nothing":
        raise ConfigError(f"give a second step to compare step {root} with")
    if step is not None and not is_step(step):
        raise ConfigError(f"{step!r} is not a step; give ROOT STEP STEP, or ROOT_A ROOT_B")
    return survey.open_checkpoint(root, step_of(root, step))


def measured(one: Checkpoint, other: Checkpoint) -> list[_Row]:
    """Compare all entries of two checkpoints; reads only what their checksums do not decide."""
    pairs = compare(one, other)
    differences = iter(_differences(one, other, [pair for pair in pairs if pair.change == "unread"]))
    return [_Row(pair, next(differences) if pair.change == "unread" else None) for pair in pairs]


def _differences(one: Checkpoint, other: Checkpoint, unread: Sequence[Pair]) -> list[Difference]:
    if not unread:
        return []
    from stillframe.restoring.statistics import difference

    found = []
    with output.progress("comparing", sum(pair.bytes for pair in unread)) as advance:
        left = tensors(merged(one), [pair.left for pair in unread if pair.left is not None])
        right = tensors(merged(other), [pair.right for pair in unread if pair.right is not None])
        for pair, before, after in zip(unread, left, right, strict=True):
            found.append(difference(before, after))
            advance(pair.bytes)
    return found


def _cells(row: _Row) -> list[str]:
    cells = [_MARKS[row.outcome], row.pair.name, _what(row.pair)]
    apart = row.difference
    if apart is None:
        return [*cells, "", "", ""]
    share = f"{100 * apart.different / max(apart.items, 1):.3g} %"
    figures = ["" if each is None else f"{each:.3g}" for each in (apart.max_abs, apart.relative)]
    return [*cells, share, *figures]


_Key: TypeAlias = "tuple[Change, str]"


def _sums(rows: Sequence[_Row]) -> list[list[str]]:
    """By what happened, and by as many names of the paths as give few enough rows, for each part of the state."""
    parts = _modules(rows, 1)
    shown = {part: {part: found} for part, found in parts.items()}
    for part, found in parts.items():
        room = _MOST_ROWS - sum(len(each) for other, each in shown.items() if other != part)
        deepest = max(len(_JOINT.findall(row.pair.name)) for row in found) + 1
        finer = (_modules(found, depth) for depth in range(deepest, 0, -1))
        shown[part] = next(each for each in finer if len(each) <= max(room, 1))
    return [_sum(*key, found) for each in shown.values() for key, found in each.items()]


def _modules(rows: Sequence[_Row], depth: int) -> dict[_Key, list[_Row]]:
    """By the first ``depth`` names of their paths."""
    found: dict[_Key, list[_Row]] = {}
    for row in rows:
        joints = [joint.start() for joint in _JOINT.finditer(row.pair.name)]
        module = row.pair.name[: joints[depth - 1]] if len(joints) >= depth else row.pair.name
        found.setdefault((row.outcome, module), []).append(row)
    return found


def _sum(outcome: Change, module: str, rows: Sequence[_Row]) -> list[str]:
    apart = [row.difference for row in rows if row.difference is not None]
    share = f"{100 * sum(each.different for each in apart) / max(sum(each.items for each in apart), 1):.3g} %"
    figures = [
        [value for each in apart if (value := getattr(each, name)) is not None] for name in ("max_abs", "relative")
    ]
    told = [f"{max(each):.3g}" if each else "" for each in figures]
    what = _what(rows[0].pair) if len(rows) == 1 and not apart else ""
    return [_MARKS[outcome], module, str(len(rows)), what, share if apart else "", *told]


def _what(pair: Pair) -> str:
    """``F32[4, 4]`` of a tensor, ``0.5 → 0.25`` of a value: once, if both are the same."""
    sides = [each for each in (pair.left, pair.right) if each is not None]
    told = dict.fromkeys(map(_form, sides))
    if len(told) < len(sides) and pair.change == "changed":
        told = dict.fromkeys(_form(each, is_exact=True) for each in sides)
    return " → ".join(told)


def _form(entry: Entry, is_exact: bool = False) -> str:
    if entry.kind == "value":
        if isinstance(entry.value, float):
            return repr(entry.value) if is_exact else f"{entry.value:.6g}"
        return output.cut(contents.text_of(entry.value, _MOST_READ), _BRIEF if output.is_narrow() else _LONG)
    return f"{'numpy ' if entry.kind == 'array' else ''}{entry.dtype}{output.format_shape(entry.shape)}"


def _json(row: _Row) -> dict[str, object]:
    found: dict[str, object] = {"path": row.pair.name, "outcome": row.outcome}
    for side, entry in (("left", row.pair.left), ("right", row.pair.right)):
        if entry is not None:
            is_value = entry.kind == "value"
            found[side] = {"value": entry.value} if is_value else {"dtype": entry.dtype, "shape": entry.shape}
    return found | ({"difference": row.difference} if row.difference else {})
