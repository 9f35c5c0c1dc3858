"""``stillframe verify``: every stored byte against its checksum."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from typing import Annotated

import typer

from stillframe.checkpoint import survey
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.verify import Verdict, verify_save
from stillframe.cli import output
from stillframe.cli.arguments import Json, Root, Step
from stillframe.cli.exit_codes import DAMAGED
from stillframe.cli.steps import step_of
from stillframe.errors import ConfigError, IntegrityError, NotFoundError, VersionError
from stillframe.model import SaveId, check_step
from stillframe.units import format_bytes, format_seconds


def command(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint in the root.")] = False,
    json: Json = False,
) -> None:
    """Read every byte and verify its checksum.

    The checksum of each chunk was computed when it was written. A chunk whose checksum is wrong is read twice. Names
    each damaged file, chunk and tensor, and changes nothing (`doctor --quarantine` does). Exit code 4 if anything is
    damaged.

    Example: stillframe verify runs/gpt --all
    """
    if every and step is not None:
        raise ConfigError(f"give a step ({step}) or --all, not both")
    catalog = survey.open_root(root)
    path = catalog.root
    found = survey.survey(path) if every else None
    branch = {each.save for each in found.steps} if found is not None else set()
    began = time.monotonic()
    verdicts = []
    for save in _saves(catalog, step_of(root, step)) if found is None else all_of(found):
        with contextlib.suppress(NotFoundError):  # a run has removed it in the meantime
            verdicts.append(read_all(catalog, save))
            if not json:
                _print(verdicts[-1], is_off_branch=found is not None and save not in branch)
    if not verdicts and not (found and found.with_state("newer format")):
        raise NotFoundError(f"there is no checkpoint in {path}")
    seconds = time.monotonic() - began
    newer = [] if found is None else found.with_state("newer format")
    damages = sum(len(each.damages) for each in verdicts)
    if json:
        listed = [{"step": each.step, **dataclasses.asdict(each), "is_whole": each.is_whole} for each in verdicts]
        output.print_json({"root": path, "seconds": seconds, "steps": listed, "newer": [each.step for each in newer]})
    else:
        size = sum(each.bytes for each in verdicts)
        rate = f"{format_seconds(seconds)} ({format_bytes(size / max(seconds, 1e-9))}/s)"
        output.say(f"read {format_bytes(size)} in {rate}; {damages or 'nothing'} damaged")
    if damages:
        sys.exit(DAMAGED)
    if newer:
        raise VersionError(f"not verified: {newer[-1].reason}")


def _saves(catalog: Catalog, step: int | None) -> list[SaveId]:
    """The checkpoint of a step, or the newest.  Raises: there is none, and why."""
    try:
        found = catalog.newest() if step is None else catalog.find(check_step(step))
    except NotFoundError:
        found = None
    if found is None:
        survey.open_checkpoint(catalog.root, step).close()  # raises the error that says why
    return [] if found is None else [found]


def all_of(found: survey.Survey) -> list[SaveId]:
    """Every checkpoint, also those off the branch, and those that seem to be damaged."""
    states: tuple[survey.State, ...] = ("committed", "abandoned", "superseded", "damaged", "unreadable")
    return [each.save for each in found.with_state(*states)]


def read_all(catalog: Catalog, save: SaveId) -> Verdict:
    """Verify all ranks of a save, with a progress bar; in a root that the ranks did not share, those that are here.

    Raises: as :func:`verify_save`.
    """
    size = 0
    with contextlib.suppress(IntegrityError):
        size = catalog.manifest(save).bytes
    with output.progress(f"step {save.step}", size) as advance:
        return verify_save(catalog, save, advance)


def _print(verdict: Verdict, is_off_branch: bool) -> None:
    state = "whole" if verdict.is_whole else "DAMAGED"
    name = str(verdict.save) if is_off_branch else f"step {verdict.step}"
    output.say(f"{name}: {state}, {format_bytes(verdict.bytes)} read")
    for damage in verdict.damages:
        output.say(f"  {damage.message}")
