"""``stillframe prune``: removes checkpoints by a policy, and what dead runs have left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.survey import Step, Survey, survey
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.errors import ConfigError
from stillframe.keeper import prune as removal
from stillframe.retention import Keep, KeepEvery, KeepLast
from stillframe.units import format_bytes, format_count


def command(
    root: Root,
    keep_last: Annotated[int | None, typer.Option(help="Keep the N newest.", metavar="N", min=1)] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep steps that are multiples of K, and the newest.", metavar="K", min=1)
    ] = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Also remove the files of saves that were never committed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints that a policy does not keep.

    With both options, a checkpoint stays if either keeps it. The newest checkpoint always stays, and so does one that
    somebody reads. A checkpoint that lacks files stays, and does not count. A root in which a run is active is not
    changed (exit code 7): the run applies its own policy.

    Example: stillframe prune runs/gpt --keep-last 3 --keep-every 1000 --dry-run
    """
    if keep_last is None and keep_every is None and not leftovers:
        raise ConfigError(
            "say what to keep: --keep-last N, --keep-every K or both; --leftovers alone removes no checkpoint"
        )
    keep = Keep()
    if keep_last is not None:
        keep = keep | KeepLast(keep_last)
    if keep_every is not None:
        keep = keep | KeepEvery(keep_every)
    before = survey(root)
    unshared = {rank for each in before.steps if each.rank is not None for rank in each.here}
    if unshared and keep != Keep():
        raise ConfigError(
            f"the ranks of the run did not share {before.root}, so nothing here tells which steps all of them have. "
            "Let the run itself remove old checkpoints, with Checkpointer(…, keep=…)"
        )
    catalogs = [Catalog(before.root), *(Catalog(before.root, rank) for rank in sorted(unshared))]
    removal.check_free(catalogs[0])
    if dry_run:
        checkpoints, damaged = removal.going(catalogs[0], keep) if keep != Keep() else ([], [])
        gone = {*checkpoints, *damaged, *(each.step for each in before.with_state("incomplete") if leftovers)}
        left = [each for each in before.steps if each.step not in gone]
        _report(before, left, 0 if leftovers else before.spare_bytes, is_dry=True, json=json)
        return
    try:
        if keep != Keep():
            removal.prune(catalogs[0], keep)
        for catalog in catalogs if leftovers else ():
            removal.remove_leftovers(catalog)
    finally:  # after an error, too: some of it may be done
        after = survey(root)
        _report(before, after.steps, after.spare_bytes, is_dry=False, json=json)


def _report(before: Survey, left: Sequence[Step], spare_bytes: int, *, is_dry: bool, json: bool) -> None:
    """Say what was removed: whatever is smaller than before, or gone."""
    sizes = {each.step: each.bytes + each.stray_bytes for each in left}
    freed = {each.step: each.bytes + each.stray_bytes - sizes.get(each.step, 0) for each in before.steps}
    removed = [each for each in before.steps if each.step not in sizes or freed[each.step] > 0]
    spare_freed = before.spare_bytes - spare_bytes
    total = sum(freed[each.step] for each in removed) + spare_freed
    stays = [each.step for each in left if each.state == "committed"]
    if json:
        listed = [{"step": each.step, "state": each.state, "bytes": each.bytes} for each in removed]
        output.print_json({"root": before.root, "dry_run": is_dry, "removed": listed, "bytes": total, "kept": stays})
        return
    verb = "would remove" if is_dry else "removed"
    for each in removed:
        what = f"step {each.step}" if each.step not in sizes else f"leftovers beside step {each.step}"
        output.say(f"{verb} {what} ({each.state}, {format_bytes(freed[each.step])})")
    if spare_freed > 0:
        output.say(f"{verb} spare segments ({format_bytes(spare_freed)})")
    freeing, keeping = ("would free", "would keep") if is_dry else ("freed", "kept")
    which = f": {_some(stays)}" if stays else ""
    output.say(f"{freeing} {format_bytes(total)}; {keeping} {format_count(len(stays), 'checkpoint')}{which}")


def _some(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:4]))}, …, {steps[-1]}"
