"""``stillframe remove``: removes the checkpoints of single steps."""

from __future__ import annotations

from typing import Annotated

import typer

from stillframe.checkpoint import requests
from stillframe.checkpoint.catalog import Catalog
from stillframe.checkpoint.survey import survey
from stillframe.cli import removed
from stillframe.cli.arguments import Json, Root
from stillframe.cli.steps import completed, steps_of
from stillframe.errors import BusyError


def command(
    root: Root,
    steps: Annotated[
        list[str],
        typer.Argument(
            help="Steps: 100, 100-200, latest, or -2 for the newest but one.",
            metavar="STEP...",
            show_default=False,
            autocompletion=completed,
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Remove even the newest checkpoint.")] = False,
    json: Json = False,
) -> None:
    """Remove the checkpoints of single steps.

    Removes every checkpoint of these steps, also one that is off the branch or quarantined. A pinned step is refused,
    and so is the newest checkpoint of the branch without --force: then nothing is removed. A run that is active in the
    root is asked to do it; if it does not answer, nothing changes (exit code 7).

    Example: stillframe remove runs/gpt 1000 2000
    """
    before = survey(root)
    done = requests.remove(Catalog(before.root), steps_of(root, steps), force=force)
    if done.error is not None and not done.gone:
        raise done.error
    removed.report(before, done, [], 0, is_dry=False, json=json)
    if done.error is not None:
        raise done.error
    if done.stays:
        raise BusyError(f"step {done.stays[0].save.step} stays: {done.stays[0].why}")
