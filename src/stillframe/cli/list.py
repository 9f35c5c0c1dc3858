"""``stillframe list``: the steps in a root and the state of each."""

from __future__ import annotations

import msgspec

from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.errors import VersionError
from stillframe.units import format_bytes, format_ranks, format_seconds, format_time


def command(root: Root, json: Json = False) -> None:
    """List the steps in a root.

    For each step: its state, when it was committed, its size, how many ranks saved it, and how long after save() it
    was staged, sealed and committed. A star marks the newest checkpoint. A narrow terminal gets fewer columns.

    Example: stillframe list runs/gpt
    """
    found = survey(root)
    if json:
        output.print_json(
            {
                "root": found.root, "latest": found.latest, "steps": [_json(each) for each in found.steps],
                "writers": [{"rank": rank, **msgspec.structs.asdict(each)} for rank, each in found.owners.items()],
            }
        )  # fmt: skip
    else:
        _print(found)
    if newer := found.with_state("newer format"):
        raise VersionError(newer[-1].reason)


def _json(each: Step) -> dict[str, object]:
    return {
        "step": each.step, "state": each.state, "bytes": each.bytes, "ranks": each.here, "reason": each.reason or None,
        **output.manifest_json(each.manifest),
    }  # fmt: skip


def _print(found: Survey) -> None:
    if not found.steps:
        output.say(f"{found.root} has no checkpoint yet")
    else:
        columns = ["step", "state", "when", "size", "ranks", "staged", "sealed", "committed"]
        optional = ["staged", "sealed", "ranks", "committed", "when"]
        rows = [_row(each, each.step == found.latest) for each in found.steps]
        output.table(columns, rows, right=["step", "size", *columns[4:]], optional=optional)
    for each in found.steps:
        if note := _note(each):
            output.say(f"step {each.step}: {note}")
    for rank, owner in list(found.owners.items())[:1]:
        more = f" (and {len(found.owners) - 1} more ranks)" if len(found.owners) > 1 else ""
        output.say(f"{owner.doing}: rank {rank}, process {owner.pid} on {owner.host}{more}")


def _row(each: Step, is_newest: bool) -> list[str]:
    step = f"* {each.step}" if is_newest else str(each.step)
    manifest = each.manifest
    if manifest is None:
        return [step, each.state, "", format_bytes(each.bytes), "", "", "", ""]
    world_size = manifest.world_size
    ranks = str(world_size) if len(each.here) == world_size else f"{len(each.here)} of {world_size}"
    delays = (manifest.stage_s, manifest.seal_s, manifest.commit_s)
    times = ["" if delay is None else format_seconds(delay) for delay in delays]
    return [step, each.state, format_time(manifest.created_unix_s), format_bytes(each.bytes), ranks, *times]


def _note(each: Step) -> str:
    if not each.reason and each.state == "in progress" and each.here:
        return f"sealed by {format_ranks(each.here)}"
    if not each.reason and each.manifest is not None and each.stray_bytes:
        return f"{format_bytes(each.stray_bytes)} of another attempt at this step lie beside it"
    return each.reason
