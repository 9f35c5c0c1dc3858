"""``stillframe verify``: every stored byte against its checksum."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from stillframe.checkpoint import survey
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.verify import Damage, Verdict, verify
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root, Step
from stillframe.cli.exit_codes import DAMAGED
from stillframe.errors import ConfigError, IntegrityError, NotFoundError, VersionError
from stillframe.units import format_bytes, format_seconds


def command(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint in the root.")] = False,
    json: Json = False,
) -> None:
    """Read every byte and verify its checksum.

    The checksum of each chunk was computed when it was written. Names each damaged file, chunk and tensor, and changes
    nothing. Exit code 4 if anything is damaged.

    Example: stillframe verify runs/gpt --all
    """
    if every and step is not None:
        raise ConfigError(f"give a step ({step}) or --all, not both")
    path = survey.check_root(root)
    found = survey.survey(path) if every else None
    steps = [step]
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
            if not every or each in Catalog(path).step_dirs():
                raise  # otherwise retention removed it in the meantime
        else:
            if not json:
                _print(verdicts[-1])
    seconds = time.monotonic() - began
    newer = [] if found is None else found.with_state("newer format")
    damages = sum(len(each.damages) for each in verdicts)
    if json:
        listed = [{**dataclasses.asdict(each), "is_whole": each.is_whole} for each in verdicts]
        output.print_json({"root": path, "seconds": seconds, "steps": listed, "newer": [each.step for each in newer]})
    else:
        size = sum(each.bytes for each in verdicts)
        rate = f"{format_seconds(seconds)} ({format_bytes(size / max(seconds, 1e-9))}/s)"
        output.say(f"read {format_bytes(size)} in {rate}; {damages or 'nothing'} damaged")
    if damages:
        sys.exit(DAMAGED)
    if newer:
        raise VersionError(f"not verified: {newer[-1].reason}")


def _verify(root: Path, step: int | None) -> Verdict:
    """Verify all ranks of a step; in a root that the ranks did not share, those that are here."""
    found, catalogs = survey.catalogs(root, step)
    merged = Verdict(-1 if found is None else found)
    try:
        if not catalogs:
            survey.open_checkpoint(root, step).close()  # raises the error that says why
        for catalog in catalogs:
            with catalog.open(found) as checkpoint:
                with output.progress(f"step {found}", checkpoint.manifest.bytes) as advance:
                    verdict = verify(checkpoint, advance)
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
