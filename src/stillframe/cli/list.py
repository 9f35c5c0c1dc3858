"""``stillframe list``: the steps in a root and the state of each."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.errors import VersionError
from stillframe.units import format_bytes, format_count, format_ranks, format_time


def command(
    root: Root,
    every: Annotated[
        bool, typer.Option("--all", help="Also what is not on the branch, set aside, or was never committed.")
    ] = False,
    json: Json = False,
) -> None:
    """List the checkpoints in a root.

    Those of the branch that training is on. For each step: its state, when it was saved, its size, how many ranks saved
    it, and the metadata given to save(). A star marks the newest checkpoint. A narrow terminal gets fewer columns.

    With --all, also: abandoned (training went back, and took another way), superseded (the branch has another save of
    the step), quarantined, removed (a tombstone is left), incomplete (never committed).

    Example: stillframe list runs/gpt
    """
    found = survey(root)
    shown = found.saves if every else found.steps
    if json:
        output.print_json(
            {
                "root": found.root, "latest": found.latest, "steps": [_json(each) for each in shown],
                "hidden": len(found.saves) - len(shown),
                "writers": [{"rank": rank, **msgspec.structs.asdict(each)} for rank, each in found.owners.items()],
            }
        )  # fmt: skip
    else:
        _print(found, shown, every)
    if newer := found.with_state("newer format"):
        raise VersionError(newer[-1].reason)


def _json(each: Step) -> dict[str, object]:
    return {
        "step": each.step, "save": each.save, "state": each.state, "is_on_branch": each.is_on_branch,
        "is_pinned": each.is_pinned, "bytes": each.bytes, "ranks": each.here, "reason": each.reason or None,
        **output.manifest_json(each.manifest),
    }  # fmt: skip


def _print(found: Survey, shown: tuple[Step, ...], every: bool) -> None:
    if not found.with_state("committed", "damaged", "in progress", "newer format", "unreadable"):
        output.say(f"{found.root} has no checkpoint yet")
    columns = ["step", "epoch", "state", "when", "size", "ranks", "metadata"]
    rows = [_row(each, each.state == "committed" and each.step == found.latest, every) for each in shown]
    output.table(
        columns, rows, right=["step", "epoch", "size", "ranks"], optional=["metadata", "ranks", "epoch", "when"]
    )
    for each in shown:
        if note := _note(each):
            output.say(f"step {each.step}{f' (epoch {each.save.epoch})' if every else ''}: {note}")
    if hidden := len(found.saves) - len(shown):
        output.say(f"{format_count(hidden, 'save')} off the branch, set aside or never committed: see --all")
    for rank, owner in list(found.owners.items())[:1]:
        more = f" (and {len(found.owners) - 1} more ranks)" if len(found.owners) > 1 else ""
        output.say(f"{owner.doing}: rank {rank}, process {owner.pid} on {owner.host}{more}")


def _row(each: Step, is_newest: bool, every: bool) -> list[str]:
    step = f"* {each.step}" if is_newest else str(each.step)
    again = f"-{each.save.attempt}" if each.save.attempt > 1 else ""
    epoch = f"{each.save.epoch}{again}" if every else ""
    state = f"{each.state}, pinned" if each.is_pinned else each.state
    manifest = each.manifest
    if manifest is None:
        return [step, epoch, state, "", format_bytes(each.bytes), "", ""]
    world_size = manifest.world_size
    ranks = str(world_size) if len(each.here) == world_size else f"{len(each.here)} of {world_size}"
    about = output.format_metadata(manifest.metadata)
    return [step, epoch, state, format_time(manifest.saved_unix_s), format_bytes(each.bytes), ranks, about]


def _note(each: Step) -> str:
    if each.state == "in progress" and each.here:
        return f"sealed by {format_ranks(each.here)}"
    return "" if each.state in ("abandoned", "superseded") else each.reason
