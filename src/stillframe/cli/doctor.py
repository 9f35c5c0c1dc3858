"""``stillframe doctor``: what is wrong with a root, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.cli.exit_codes import DAMAGED, TO_DO
from stillframe.observe.doctor import Finding, examine

_MARKS = {"fine": " ok ", "note": "note", "problem": "TODO", "damage": "BAD "}


def command(
    root: Root,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Read all data, and set aside every checkpoint that is damaged.")
    ] = False,
    json: Json = False,
) -> None:
    """Look for problems, and say what to do.

    Damage, leftovers, free space, permissions. Reads names, sizes and manifests, but no data (`verify` does), and
    changes nothing. Exit code 11 if something should be done, 4 if a checkpoint is damaged.

    With --quarantine it also reads every byte. What is damaged is read a second time, and if it is still damaged, the
    checkpoint is set aside: no restore tries it, and retention leaves it alone. Nothing is deleted. What cannot be read
    for now (an I/O error, a missing mount) is not damage, and is not set aside.

    Example: stillframe doctor runs/gpt; stillframe doctor runs/gpt --quarantine
    """
    findings = [*(_treated(root) if quarantine else []), *examine(root)]
    if json:
        output.print_json({"root": Path(root).absolute(), "findings": findings})
    else:
        for finding in findings:
            output.say(f"{_MARKS[finding.level]} {finding.what}")
            if finding.todo:
                output.say(f"     → {finding.todo}")
    levels = {finding.level for finding in findings}
    if levels & {"damage", "problem"}:
        sys.exit(DAMAGED if "damage" in levels else TO_DO)


def _treated(root: Path) -> list[Finding]:
    from stillframe.cli.verify import read_all
    from stillframe.observe.quarantine import treat

    return treat(root, read_all)
