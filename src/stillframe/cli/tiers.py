"""How commands show the tiers behind a root."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stillframe.checkpoint.survey import Step
from stillframe.checkpoint.tiers import TierView, policy_text
from stillframe.cli import output
from stillframe.format.records import Manifest
from stillframe.lineage import Branch
from stillframe.model import SaveId
from stillframe.units import format_bytes

_WIDE, _NARROW = 24, 12
"""The name of a tier in a heading is no longer, if it can be."""


def elsewhere(views: Sequence[TierView], shown: Collection[SaveId], branch: Branch, every: bool) -> list[Step]:
    """What only tiers have, of the branch or of ``every`` one, but for what is shown already."""
    found: dict[SaveId, Manifest | None] = {}
    for view in views:
        for save, held in view.held.items():
            if save not in shown and (every or branch.has(save)):
                found[save] = found.get(save) or held.manifest
    return [Step(save, "not in the root", found[save], (), (), "", branch.has(save)) for save in found]


def headings(views: Sequence[TierView]) -> list[str]:
    """``in`` and the tier's root, or as much of its end as there is room for, where that tells them apart."""
    short = [_short(view.root) for view in views]
    return [
        f"in {output.printable(view.root) if short.count(head) > 1 else head}"
        for view, head in zip(views, short, strict=True)
    ]


def _short(root: str) -> str:
    limit = _NARROW if output.is_narrow() else _WIDE
    parts = root.rstrip("/").split("/")
    for first in range(len(parts)):
        name = "/".join(["…", *parts[first:]]) if first else root
        if len(name) <= limit and (parts[first] or not first):
            return output.printable(name)
    return output.printable(f"…/{parts[-1]}")


def cells(views: Sequence[TierView], save: SaveId) -> list[str]:
    return [_cell(view, save) for view in views]


def _cell(view: TierView, save: SaveId) -> str:
    if view.trouble:
        return "?"
    held = view.held.get(save)
    if held is None:
        return "–"
    count = f"{held.parts} of {'?' if held.of is None else held.of} parts"
    return {"whole": "whole", "partial": count}.get(held.state, f"{held.state}, {count}")


def about(view: TierView) -> str:
    """The whole name of a tier, and how it is used; or why nothing is known of it."""
    if view.trouble:
        return f"{view.root} cannot be read: {view.why}"
    note = view.note
    limit = f"at most {format_bytes(note.limit)}/s" if note.limit else ""
    return f"{view.root} ({', '.join(filter(None, (f'every {note.every}', policy_text(note), limit)))})"


# --- for programs ----------------------------------------------------------------------------


def tier_json(view: TierView) -> dict[str, object]:
    note = view.note
    return {
        "root": note.root, "every": note.every, "keep": policy_text(note) or None, "limit": note.limit or None,
        "newest": view.newest, "trouble": view.trouble or None, "left": view.left,
    }  # fmt: skip


def held_json(view: TierView, save: SaveId) -> dict[str, object] | None:
    """``None`` if nothing is there, or nothing is known of the tier."""
    held = view.held.get(save)
    return None if held is None else {"state": held.state, "parts": held.parts, "of": held.of}
