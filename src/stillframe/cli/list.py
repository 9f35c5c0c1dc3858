"""``stillframe list``: the steps in a root and in its tiers, and the state of each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
import typer

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.checkpoint.tiers import TierView, do_not_count, look_at_tiers
from stillframe.cli import output, tiers
from stillframe.cli.arguments import Json, Root
from stillframe.errors import ConfigError, IntegrityError, NotFoundError, VersionError
from stillframe.model import SaveId
from stillframe.units import format_bytes, format_count, format_ranks, format_time

_MAX_VALUE = 24
_Values: TypeAlias = Mapping[str, Mapping[SaveId, object]]
"""For each path the values there, by save."""


def command(
    root: Root,
    every: Annotated[
        bool, typer.Option("--all", help="Also saves off the branch, set aside, removed, or never committed.")
    ] = False,
    last: Annotated[int | None, typer.Option(min=1, help="Only the newest so many.", show_default=False)] = None,
    value: Annotated[
        list[str] | None,
        typer.Option(help="Also this value of the state, such as metrics/loss. May be repeated.", metavar="PATH"),
    ] = None,
    json: Json = False,
) -> None:
    """List the checkpoints in a root.

    Lists the checkpoints of the branch that training is on. For each step: its state, when it was saved, the size of
    its files (of its data, if only a tier has it), how many ranks saved it, and the metadata given to save(). A star
    marks the newest checkpoint. A narrow terminal gets fewer columns.

    If the run carries checkpoints to tiers, each has a column, "in" and its place: whole, how many parts are there,
    carrying (a living run goes on with it), – (nothing is there), ? (it cannot be read; the address of a server and the
    credentials come from the environment). Steps that only a tier has are listed, too. Lines below name the tiers. They
    say if another run has gone on in one, and which steps of the root do not count because of that.

    With --all, also which start of the run has saved it (a run that was killed and resumed once has two), and:
    abandoned (training went back, and took another way), superseded (the branch has another save of
    the step), quarantined, removed (a tombstone is left), incomplete (never committed).

    Examples: stillframe list runs/gpt; stillframe list runs/gpt --last 5 --value metrics/loss
    """
    found = survey(root)
    views = look_at_tiers(found)
    here = found.saves if every else found.steps
    elsewhere = tiers.elsewhere(views, {each.save for each in here}, found.branch, every)
    shown = sorted((*here, *elsewhere), key=lambda each: each.save)[-last if last else 0 :]
    hidden = len(found.saves) - len(here)
    values = {path: _values_at(found.root, shown, path) for path in value or ()}
    if json:
        output.print_json(
            {
                "root": found.root, "latest": found.latest, "steps": [_json(each, views, values) for each in shown],
                "hidden": hidden, "tiers": [tiers.tier_json(view) for view in views],
                "writers": [{"rank": rank, **msgspec.structs.asdict(each)} for rank, each in found.owners.items()],
            }
        )  # fmt: skip
    else:
        _print(found, shown, views, values, hidden, every)
    if newer := found.with_state("newer format"):
        raise VersionError(newer[-1].reason)


def _values_at(root: str, shown: list[Step], path: str) -> dict[SaveId, object]:
    """Of each step that can be read here and has it.  Raises :class:`ConfigError` if none has."""
    from stillframe.checkpoint.contents import entries
    from stillframe.cli.stored import merged

    found: dict[SaveId, object] = {}
    catalog = Catalog(root)
    for each in shown:
        if each.state in ("committed", "abandoned", "superseded"):
            with contextlib.suppress(NotFoundError, IntegrityError), catalog.open_save(each.save) as checkpoint:
                for entry in entries(merged(checkpoint)):
                    if entry.name == path and entry.kind == "value":
                        found[each.save] = entry.value
    if shown and not found:
        raise ConfigError(f"--value {path}: no step that is listed has such a value; `stillframe show` names them")
    return found


def _json(each: Step, views: list[TierView], values: _Values) -> dict[str, object]:
    return {
        "step": each.step, "save": each.save, "state": each.state, "is_on_branch": each.is_on_branch,
        "is_pinned": each.is_pinned, "bytes": each.bytes, "ranks": each.here, "reason": each.reason or None,
        **output.manifest_json(each.manifest),
        **({"values": {path: found.get(each.save) for path, found in values.items()}} if values else {}),
        "tiers": {view.root: tiers.held_json(view, each.save) for view in views},
    }  # fmt: skip


def _print(found: Survey, shown: list[Step], views: list[TierView], values: _Values, hidden: int, every: bool) -> None:
    if not found.with_state("committed", "damaged", "in progress", "newer format", "unreadable"):
        output.say(f"{found.root} has no checkpoint yet")
    columns = ["step", "start", "state", "when", "size", "ranks", "metadata"]
    heads = tiers.headings(views)
    rows = [
        [
            *_row(each, each.state == "committed" and each.step == found.latest, every),
            *(_text(of, each.save) for of in values.values()),
            *tiers.cells(views, each.save),
        ]
        for each in shown
    ]
    output.table(
        [*columns, *values, *heads], rows, right=["step", "start", "size", "ranks"],
        optional=["metadata", "ranks", "start", "when", *(["size", *reversed(heads)] if values else [])],
        text=list(values),
    )  # fmt: skip
    for each in shown:
        if note := _note(each):
            output.say(f"step {each.step}{f' (start {each.save.epoch})' if every else ''}: {note}")
    if hidden:
        why = "off the branch, set aside, removed or never committed"
        output.say(f"{format_count(hidden, 'save')} not shown ({why}): see --all")
    for rank, owner in list(found.owners.items())[:1]:
        more = f" (and {len(found.owners) - 1} more ranks)" if len(found.owners) > 1 else ""
        output.say(f"{owner.doing}: rank {rank}, process {owner.pid} on {owner.host}{more}")
    for view in views:
        output.say(f"tier {tiers.about(view)}")
        if view.left:
            output.say(do_not_count(view.left, found.root, view.root))


def _text(values: Mapping[SaveId, object], save: SaveId) -> str:
    from stillframe.checkpoint.contents import text_of

    value = values.get(save, "")
    if isinstance(value, float) and output.is_narrow():
        return f"{value:.6g}"
    return text_of(value, _MAX_VALUE) if save in values else ""


def _row(each: Step, is_newest: bool, every: bool) -> list[str]:
    step = f"* {each.step}" if is_newest else str(each.step)
    again = f"-{each.save.attempt}" if each.save.attempt > 1 else ""
    start = f"{each.save.epoch}{again}" if every else ""
    state = f"{each.state}, pinned" if each.is_pinned else each.state
    manifest = each.manifest
    if manifest is None:
        return [step, start, state, "", format_bytes(each.bytes) if each.files else "", "", ""]
    world_size = manifest.world_size
    is_all = len(each.here) == world_size or each.state == "not in the root"
    ranks = str(world_size) if is_all else f"{len(each.here)} of {world_size}"
    about = output.format_metadata(manifest.metadata)
    size = format_bytes(each.bytes if each.files else manifest.bytes)
    return [step, start, state, format_time(manifest.saved_unix_s), size, ranks, about]


def _note(each: Step) -> str:
    if each.state == "in progress" and each.here:
        return f"sealed by {format_ranks(each.here)}"
    return "" if each.state in ("abandoned", "superseded") else each.reason
