"""``diff``: what changed between two checkpoints, and by how much."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillframe.checkpoint import contents, survey
from stillframe.checkpoint.catalog import Checkpoint
from stillframe.checkpoint.compare import Change, Pair, compare
from stillframe.checkpoint.contents import Entry
from stillframe.checkpoint.stored import Located, Stored
from stillframe.cli import output
from stillframe.cli.arguments import Json
from stillframe.errors import ConfigError

if TYPE_CHECKING:
    from stillframe.restore.statistics import Difference

_DIFFER = 10


class Only(str, Enum):
    """Which entries are listed."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class _Row:
    pair: Pair
    outcome: Change
    difference: Difference | None = None


def diff(
    root: Annotated[Path, typer.Argument(help="A root.", show_default=False)],
    left: Annotated[
        str, typer.Argument(help="A step of it; or a second root, whose newest is compared.", show_default=False)
    ],
    right: Annotated[int | None, typer.Argument(help="Another step of the root.", show_default=False)] = None,
    step: Annotated[
        int | None, typer.Option(help="Of two roots: this step of both instead of the newest of each.")
    ] = None,
    only: Annotated[Only | None, typer.Option(help="List only these.")] = None,
    json: Json = False,
) -> None:
    """What changed between two checkpoints.

    Two steps of a root, or the newest of two roots: which tensors and by how much, which values, what is new. What
    has the same checksums is known to be equal without being read. Exit code 10 if anything differs.

    Examples: stillframe diff runs/gpt 1000 2000; stillframe diff runs/a runs/b --step 1000
    """
    if right is not None and step is not None:
        raise ConfigError(f"--step {step} is for two roots; here are two steps of one")
    with _open(root, _step(left) if right is not None else step) as one:
        with _open(root if right is not None else Path(left), right if right is not None else step) as other:
            rows = measured(one, other)
        names = [f"step {one.step}", f"step {other.step}"]
        if right is None:
            names = [f"{each.path.parent} step {each.step}" for each in (one, other)]
    chosen = [row for row in rows if (only is None and row.outcome != "equal") or (only and row.outcome == only.value)]
    counts = {
        outcome: sum(row.outcome == outcome for row in rows) for outcome in ("changed", "added", "removed", "equal")
    }
    if json:
        output.print_json({"left": names[0], "right": names[1], **counts, "entries": [_json(row) for row in chosen]})
    else:
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        output.say(f"{names[0]} → {names[1]}: {summary}")
        _print(chosen)
    if any(count for outcome, count in counts.items() if outcome != "equal"):
        sys.exit(_DIFFER)


def _step(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no step; give ROOT STEP STEP, or ROOT_A ROOT_B") from None


def _open(root: Path, step: int | None) -> Checkpoint:
    if not root.exists() and str(root).isdecimal():
        raise ConfigError(f"give two steps to compare with one another, not only {root}")
    return survey.open_checkpoint(root, step)


def measured(one: Checkpoint, other: Checkpoint) -> list[_Row]:
    """Everything in both; reads what checksums do not tell."""
    pairs = compare(one, other)
    unread = [pair for pair in pairs if pair.change == "unread"]
    found: dict[int, Difference] = {}
    if unread:
        found = _differences(one, other, unread)

    def row(pair: Pair) -> _Row:
        apart = found.get(id(pair))
        return _Row(pair, pair.change if apart is None else "changed" if apart.different else "equal", apart)

    return [row(pair) for pair in pairs]


def _differences(one: Checkpoint, other: Checkpoint, unread: Sequence[Pair]) -> dict[int, Difference]:
    from stillframe.restore.load import pull
    from stillframe.restore.statistics import difference

    found: dict[int, Difference] = {}
    with output.progress("comparing", sum(pair.bytes for pair in unread)) as advance:
        left = pull(_all_of(one), [_leaf(pair.left) for pair in unread])
        right = pull(_all_of(other), [_leaf(pair.right) for pair in unread])
        for pair, a, b in zip(unread, left, right, strict=True):
            found[id(pair)] = difference(a, b)
            advance(pair.bytes)
    return found


def _all_of(checkpoint: Checkpoint) -> Stored:
    return Stored(checkpoint, checkpoint.ranks[0], is_merged=True)


def _leaf(entry: Entry | None) -> Located:
    assert entry is not None
    return entry.leaf


def _print(chosen: Sequence[_Row]) -> None:
    if chosen:
        columns = ["", "path", "was", "is", "differing", "max |Δ|", "|Δ| / |was|"]
        output.table(columns, [_cells(row) for row in chosen], right=["differing", "max |Δ|", "|Δ| / |was|"])


def _cells(row: _Row) -> list[str]:
    mark = {"changed": "~", "added": "+", "removed": "-", "equal": "="}[row.outcome]
    was, now = _form(row.pair.left), _form(row.pair.right)
    apart = row.difference
    if apart is None:
        return [mark, row.pair.name, was, now, "", "", ""]
    share = f"{100 * apart.different / max(apart.items, 1):.3g} %"
    figures = ["" if each is None else f"{each:.3g}" for each in (apart.max_abs, apart.relative)]
    return [mark, row.pair.name, was, now if now != was else "", share, *figures]


def _form(entry: Entry | None) -> str:
    if entry is None:
        return ""
    if entry.kind == "value":
        return contents.text_of(entry.value, 40)
    kind = "numpy " if entry.kind == "array" else ""
    return f"{kind}{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _json(row: _Row) -> dict[str, object]:
    found: dict[str, object] = {"path": row.pair.name, "outcome": row.outcome}
    for side, entry in (("left", row.pair.left), ("right", row.pair.right)):
        if entry is not None:
            is_value = entry.kind == "value"
            found[side] = {"value": entry.value} if is_value else {"dtype": entry.dtype, "shape": entry.shape}
    return found | ({"difference": row.difference} if row.difference else {})
