"""``verify`` and ``doctor``: is everything whole, and if not, what to do."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from stillframe.checkpoint import survey
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.verify import Damage, Verdict
from stillframe.checkpoint.verify import verify as read_again
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root, Step
from stillframe.errors import ConfigError, IntegrityError, NotFoundError, VersionError
from stillframe.observe.doctor import Finding, examine
from stillframe.units import format_bytes

_DAMAGED = 4
_TO_DO = 11


def verify(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint in the root.")] = False,
    json: Json = False,
) -> None:
    """Read every byte again, and check it.

    Each chunk against the checksum that was made when it was written. Names each damaged file, chunk and tensor;
    changes nothing. Exit code 4 if anything is damaged.

    Example: stillframe verify runs/gpt --all
    """
    if every and step is not None:
        raise ConfigError(f"give a step ({step}) or --all, not both")
    path = survey.check_root(root)
    found = survey.survey(path) if every else None
    steps: list[int | None] = [step]
    if found is not None:
        steps = [each.step for each in found.with_state("committed", "damaged", "unreadable")]
    if not steps:
        raise NotFoundError(f"there is no checkpoint in {path}")
    began = time.monotonic()
    verdicts = []
    for each in steps:
        try:
            verdicts.append(_verify(path, each))
        except NotFoundError:
            if not every or Catalog(path).dir(each or 0).exists():
                raise  # else retention has removed it since
        if not json and verdicts:
            _print(verdicts[-1])
    seconds = time.monotonic() - began
    damages = [damage for each in verdicts for damage in each.damages]
    read = sum(each.bytes for each in verdicts)
    newer = [each for each in found.steps if each.state == "newer format"] if found is not None else []
    if json:
        listed = [_json(each) for each in verdicts]
        output.print_json({"root": path, "seconds": seconds, "steps": listed, "newer": [each.step for each in newer]})
    else:
        rate = f" in {seconds:.1f} s ({format_bytes(read / max(seconds, 1e-9))}/s)"
        output.say(f"read {format_bytes(read)}{rate}; {len(damages) or 'nothing'} damaged")
    if damages:
        sys.exit(_DAMAGED)
    if newer:
        raise VersionError(f"not looked at: {newer[-1].reason}")


def _verify(root: Path, step: int | None) -> Verdict:
    """Of all ranks; in a root that is not shared, of those that are here."""
    found, catalogs = survey.catalogs(root, step)
    merged = Verdict(-1 if found is None else found)
    try:
        if not catalogs:
            survey.open_checkpoint(root, step).close()  # raises, and says why
        for catalog in catalogs:
            with catalog.open(found) as checkpoint:
                with output.progress(f"step {found}", checkpoint.manifest.bytes) as advance:
                    verdict = read_again(checkpoint, advance)
                merged.bytes += verdict.bytes
                merged.damages += verdict.damages
    except IntegrityError as error:
        merged.damages.append(Damage(root, -1, None, (), str(error)))
    return merged


def _print(verdict: Verdict) -> None:
    state = "whole" if verdict.is_whole else "DAMAGED"
    output.say(f"step {verdict.step}: {state}, {format_bytes(verdict.bytes)} read")
    for damage in verdict.damages:
        output.say(f"  {damage.message}")


def _json(verdict: Verdict) -> dict[str, object]:
    return {
        "step": verdict.step, "is_whole": verdict.is_whole, "bytes": verdict.bytes, "damages": verdict.damages,
    }  # fmt: skip


def doctor(root: Root, json: Json = False) -> None:
    """Look for what is wrong, and say what to do.

    Damage, leftovers, space, permissions. Reads names, sizes and manifests, no data (that is `verify`); changes
    nothing. Exit code 11 if something is to be done, 4 if a checkpoint is damaged.

    Example: stillframe doctor runs/gpt
    """
    findings = examine(root)
    if json:
        output.print_json({"root": Path(root).absolute(), "findings": findings})
    else:
        for finding in findings:
            output.say(f"{_mark(finding)} {finding.what}")
            if finding.todo:
                output.say(f"    → {finding.todo}")
    kinds = {finding.level for finding in findings}
    if kinds & {"damage", "problem"}:
        sys.exit(_DAMAGED if "damage" in kinds else _TO_DO)


def _mark(finding: Finding) -> str:
    return {"fine": " ok ", "note": "note", "problem": "TODO", "damage": "BAD "}[finding.level]
