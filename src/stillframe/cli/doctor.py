"""``stillframe doctor``: what is wrong with a root, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

from stillframe.cli import output
from stillframe.cli.arguments import Json, Root
from stillframe.cli.exit_codes import DAMAGED, TO_DO
from stillframe.observe.doctor import examine

_MARKS = {"fine": " ok ", "note": "note", "problem": "TODO", "damage": "BAD "}


def command(root: Root, json: Json = False) -> None:
    """Look for problems, and say what to do.

    Damage, leftovers, free space, permissions. Reads names, sizes and manifests, but no data (`verify` does), and
    changes nothing. Exit code 11 if something should be done, 4 if a checkpoint is damaged.

    Example: stillframe doctor runs/gpt
    """
    findings = examine(root)
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
