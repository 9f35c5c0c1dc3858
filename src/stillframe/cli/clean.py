"""``prune``: remove what a policy lets go, and what dead runs have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from stillframe.checkpoint import survey
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.survey import Step, Survey
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.errors import ConfigError
from stillframe.keeper import prune as tidy
from stillframe.retention import Keep, KeepEvery, KeepLast
from stillframe.units import format_bytes


def prune(
    root: Root,
    keep_last: Annotated[int | None, typer.Option(help="Keep so many of the newest.", metavar="N", min=1)] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep steps that are a multiple of this, and the newest.", metavar="K", min=1)
    ] = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Also remove files of saves that were never committed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints that a policy lets go.

    With both options, what either keeps stays. The newest checkpoint always stays, and so does one that somebody is
    reading. A root in which a run is at work is left alone (exit code 7): it applies its own policy. A checkpoint
    that lacks files does not count, and stays.

    Example: stillframe prune runs/gpt --keep-last 3 --keep-every 1000 --dry-run
    """
    if keep_last is None and keep_every is None and not leftovers:
        raise ConfigError("say what to keep: --keep-last N, --keep-every K or both; or remove --leftovers")
    keep = Keep()
    if keep_last is not None:
        keep = keep | KeepLast(keep_last)
    if keep_every is not None:
        keep = keep | KeepEvery(keep_every)
    before = survey.survey(root)
    own = _own_ranks(before)
    if own and keep != Keep():
        raise ConfigError(
            f"the ranks of the run did not share {before.root}: nothing here tells which steps all of them have. "
            "Let the run itself remove old ones, with Checkpointer(…, keep=…)"
        )
    tidy.check_free(before.root)
    catalogs = [Catalog(before.root), *(Catalog(before.root, rank) for rank in own)]
    if dry_run:
        checkpoints, damaged = tidy.going(catalogs[0], keep) if keep != Keep() else ([], [])
        gone = {*checkpoints, *damaged, *(each.step for each in before.with_state("incomplete") if leftovers)}
        left = [each for each in before.steps if each.step not in gone]
        _report(before, left, 0 if leftovers else before.spare_bytes, is_dry=True, json=json)
        return
    try:
        if keep != Keep():
            tidy.prune(catalogs[0], keep)
        for catalog in catalogs if leftovers else ():
            tidy.remove_leftovers(catalog)
    finally:  # also of what an error has left half done
        after = survey.survey(root)
        _report(before, after.steps, after.spare_bytes, is_dry=False, json=json)


def _own_ranks(found: Survey) -> list[int]:
    """Of a root that is not shared: whose checkpoints are here."""
    return sorted({rank for each in found.steps if each.rank is not None for rank in each.here})


def _report(before: Survey, left: Sequence[Step], spare_bytes: int, *, is_dry: bool, json: bool) -> None:
    """What is different from before."""
    sizes = {each.step: each.bytes + each.stray_bytes for each in left}
    smaller = [
        each for each in before.steps if each.step not in sizes or each.bytes + each.stray_bytes > sizes[each.step]
    ]
    stays = [each.step for each in left if each.state == "committed"]
    freed = (
        sum(each.bytes + each.stray_bytes - sizes.get(each.step, 0) for each in smaller)
        + before.spare_bytes
        - spare_bytes
    )
    if json:
        listed = [{"step": each.step, "state": each.state, "bytes": each.bytes} for each in smaller]
        output.print_json({"root": before.root, "dry_run": is_dry, "removed": listed, "bytes": freed, "kept": stays})
        return
    verb = "would remove" if is_dry else "removed"
    for each in smaller:
        what = f"step {each.step}" if each.step not in sizes else f"leftovers beside step {each.step}"
        size = format_bytes(each.bytes + each.stray_bytes - sizes.get(each.step, 0))
        output.say(f"{verb} {what} ({each.state}, {size})")
    if before.spare_bytes > spare_bytes:
        output.say(f"{verb} spare segments ({format_bytes(before.spare_bytes - spare_bytes)})")
    linked = [step for step in stays if Catalog(before.root).dir(step).is_symlink()]
    if linked:
        output.say(f"left alone, because a link leads elsewhere: {_some(linked)}")
    count = f"{len(stays)} checkpoints stay" if len(stays) != 1 else "1 checkpoint stays"
    freeing = "would be freed" if is_dry else "freed"
    output.say(f"{format_bytes(freed)} {freeing}; {count}{': ' + _some(stays) if stays else ''}")


def _some(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:4]))}, …, {steps[-1]}"
