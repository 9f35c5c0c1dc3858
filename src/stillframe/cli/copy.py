"""``stillframe copy``: checkpoints carried to another root."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer

from stillframe.checkpoint import promote, survey
from stillframe.checkpoint.catalog import Catalog
from stillframe.cli import output
from stillframe.cli.arguments import Json
from stillframe.cli.exit_codes import TO_DO
from stillframe.cli.steps import steps_of
from stillframe.errors import BusyError, ConfigError, ExistsError, IntegrityError, NotFoundError, StillframeError
from stillframe.model import SaveId, check_step
from stillframe.store import files, is_url, root_address
from stillframe.units import format_bytes, format_count, format_ranks, format_seconds, parse_bytes


@dataclass
class Copied:
    """What has come of one step.  ``state``: ``there``: it was; ``removed``: it was removed there."""

    step: int
    save: SaveId
    bytes: int = 0
    sent_bytes: int = 0
    state: Literal["copied", "there", "incomplete", "damaged", "removed", "gone"] = "copied"
    missing: list[int] = field(default_factory=list)
    """The ranks whose parts are not there yet."""
    why: str = ""


def command(
    source: Annotated[str, typer.Argument(help="The root to copy from.", metavar="FROM", show_default=False)],
    to: Annotated[
        str,
        typer.Argument(help="The root to copy to; created if it does not exist.", metavar="TO", show_default=False),
    ],
    steps: Annotated[
        list[str] | None,
        typer.Argument(
            help="Steps: 100, 100-200, latest, or -2 for the newest but one. Default: the newest checkpoint.",
            metavar="[STEP]...",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Copy every checkpoint of the branch, oldest first.")] = False,
    limit: Annotated[str | None, typer.Option(help="Limit the bandwidth, such as 500MB/s.", metavar="RATE")] = None,
    json: Json = False,
) -> None:
    """Copy checkpoints to another root.

    FROM and TO are directories or URLs. All data is verified while it is read. A checkpoint appears in TO when it is
    complete there. It is the same, byte for byte: a run can resume from it. Data that TO already has is not sent again:
    after an interruption, run the command again. A TO that holds another run's checkpoints is refused, and not changed
    (exit code 9).

    Where the ranks did not share their roots, copy from each of them: the last one completes the checkpoint. Until
    then the exit code is 11. With --all, damaged steps are reported and skipped (exit code 4), and so are steps that
    were removed from TO.

    Examples: stillframe copy /nvme/gpt s3://bucket/gpt; stillframe copy runs/gpt /backup/gpt --all --limit 500MB/s
    """
    if every and steps:
        raise ConfigError(f"give steps ({', '.join(map(str, steps))}) or --all, not both")
    pace = promote.Pace(_rate(limit))
    catalog = survey.open_root(source)
    target = Catalog(_check_target(catalog.root, to))
    saves = _chosen(catalog, steps_of(source, steps or []), every)
    began = time.monotonic()
    done: list[Copied] = []
    errors: list[StillframeError] = []
    for save in saves:
        done.append(Copied(save.step, save))
        _copy(catalog, target, done[-1], pace, errors if every else None)
        if not json:
            output.say(_line(done[-1]))
    branch = catalog.look().branch
    if branch.epoch is not None and any(map(branch.has, saves)):
        promote.introduce(catalog, target, branch.epoch)  # it may have gone back, and saved nothing since
    seconds = time.monotonic() - began
    sent = sum(each.sent_bytes for each in done)
    if json:
        output.print_json(
            {"from": catalog.root, "to": target.root, "steps": done, "sent_bytes": sent, "seconds": seconds}
        )
    else:
        took = f"{format_seconds(seconds)} ({format_bytes(sent / max(seconds, 1e-9))}/s)"
        count = format_count(sum(each.state in ("copied", "there") for each in done), "checkpoint")
        output.say(f"{target.root} has {count} of {len(done)}; sent {format_bytes(sent)} in {took}")
    if errors:
        raise errors[0]
    if any(each.missing for each in done):
        sys.exit(TO_DO)


def _copy(
    catalog: Catalog, target: Catalog, copied: Copied, pace: promote.Pace, errors: list[StillframeError] | None
) -> None:
    """Carry one step.  ``errors``: what concerns this step alone is put there; if ``None``, it is raised."""
    copied.state = "there" if target.is_committed(copied.save) else "copied"

    def on_part(_rank: int, sent_bytes: int) -> None:
        copied.sent_bytes += sent_bytes

    try:
        copied.bytes = catalog.manifest(copied.save).bytes
        with output.progress(f"step {copied.step}", copied.bytes) as advance:
            copied.missing = promote.promote(catalog, target, copied.save, pace=pace, on_bytes=advance, on_part=on_part)
        copied.state = "incomplete" if copied.missing else copied.state
    except (IntegrityError, BusyError, NotFoundError) as error:
        if errors is None:
            raise
        copied.why = str(error)
        copied.state = "removed" if isinstance(error, BusyError) else "gone"
        if isinstance(error, IntegrityError):
            copied.state = "damaged"
            errors.append(error)


def _line(copied: Copied) -> str:
    name = f"step {copied.step}"
    there = copied.bytes - copied.sent_bytes
    if copied.state == "there":
        return f"{name}: was there already, {format_bytes(copied.bytes)}"
    if copied.state in ("copied", "incomplete"):
        rest = f", {format_bytes(there)} were there already" if there else ""
        lack = f"; {format_ranks(copied.missing)} missing still: copy from the roots that have them"
        return f"{name}: sent {format_bytes(copied.sent_bytes)}{rest}{lack if copied.missing else ''}"
    if copied.state == "removed":
        return f"{name}: not copied, it was removed there"
    return f"{name}: not copied, {'it is gone by now' if copied.state == 'gone' else 'DAMAGED'}: {copied.why}"


def _rate(limit: str | None) -> float:
    """Bytes a second; 0: no limit."""
    if limit is None:
        return 0.0
    rate = parse_bytes(limit.removesuffix("/s"), "--limit")
    if not rate:
        raise ConfigError(f"--limit {limit}: nothing would ever arrive; give a rate such as 500MB/s")
    return float(rate)


def _chosen(catalog: Catalog, steps: Sequence[int], every: bool) -> list[SaveId]:
    """All of them are there.  Raises: one is not, and why."""
    if steps:
        return [_find(catalog, check_step(step)) for step in sorted(set(steps))]
    found = list(catalog.committed()) if every else [save for save in [catalog.newest()] if save is not None]
    if not found:
        raise NotFoundError(f"there is no checkpoint in {catalog.root}")
    return found[::-1]


def _find(catalog: Catalog, step: int) -> SaveId:
    try:
        return catalog.find(step)
    except NotFoundError:
        survey.open_checkpoint(catalog.root, step).close()  # raises the error that says why
        raise


def _check_target(source: str, to: str) -> str:
    """Where to copy to.  Raises :class:`ConfigError`, :class:`ExistsError`."""
    target = root_address(to)
    if is_url(target):
        is_same, is_nested = target == source, files.is_below(target, source) or files.is_below(source, target)
    else:
        if files.kind_of(target) not in ("directory", "nothing"):
            raise ExistsError(f"{target} is a file, and is not changed; give a directory, or one that is to be made")
        real = [each if is_url(each) else files.real_path(each) for each in (source, target)]
        is_same, is_nested = real[0] == real[1], files.is_below(*real) or files.is_below(*real[::-1])
    if is_same:
        raise ConfigError(f"FROM and TO are the same root, {source}; give another place to copy to")
    if is_nested:
        raise ConfigError(f"of FROM ({source}) and TO ({target}), one is inside the other; give a place beside it")
    return target
