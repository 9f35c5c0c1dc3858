"""``stillframe doctor``: what is wrong with a root, and what to do about it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from stillframe.cli import output
from stillframe.cli.arguments import Json, OptionalRoot
from stillframe.cli.device import examine_device
from stillframe.cli.exit_codes import DAMAGED, TO_DO
from stillframe.errors import ConfigError
from stillframe.observe.doctor import Finding, examine
from stillframe.store import root_address

_MARKS = {"fine": " ok ", "note": "note", "problem": "FIX ", "damage": "BAD "}


def command(
    root: OptionalRoot = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Read all data, and set aside every checkpoint that is damaged.")
    ] = False,
    finish: Annotated[bool, typer.Option("--finish", help="Complete the steps that are incomplete in a tier.")] = False,
    device: Annotated[bool, typer.Option("--device", help="Test the accelerator instead of a root.")] = False,
    json: Json = False,
) -> None:
    """Look for problems, and say what to do.

    Checks for damage, leftovers, free space and permissions; for incomplete steps in the run's tiers, and for why
    nothing arrives in one. Reads names, sizes, manifests and the journal of the run, but no data (`verify` does), and
    changes nothing. Exit code 11 if something should be done, 4 if a checkpoint is damaged.

    With --quarantine it also reads every byte. What is damaged is read a second time, and if it is still damaged, the
    checkpoint is set aside: no restore tries it, and retention leaves it alone. Nothing is deleted. What cannot be read
    for now (an I/O error, a missing mount) is not damage, and is not set aside.

    With --finish, steps that a run which has ended left incomplete in a tier are completed there: missing parts are
    copied from the root, if it has them. While a run is active, nothing is done (exit code 7): it completes or removes
    such steps itself.

    With --device, and without a root, it tests this machine's accelerator, for two minutes at most: the order of copies
    and updates, with controls that must fail; pinning; the bandwidth into the arena, compared with torch's own copies;
    a training that is killed and restored. Its checkpoints go to a temporary directory. Exit code 13 if a check failed,
    12 if there is no accelerator. Attach what it prints to a bug report.

    Example: stillframe doctor runs/gpt; stillframe doctor runs/gpt --quarantine; stillframe doctor runs/gpt
    --finish; stillframe doctor --device
    """
    if device != (root is None) or (device and (quarantine or finish)):
        raise ConfigError("doctor: give a root, or --device and nothing else")
    if root is None:
        examine_device(is_json=json)
        return
    findings = [*(_treated(root) if quarantine else []), *(_finished(root) if finish else []), *examine(root)]
    if json:
        output.print_json({"root": root_address(root), "findings": findings})
    else:
        for finding in findings:
            output.say(f"{_MARKS[finding.level]} {finding.what}", indent=5)
            if finding.advice:
                output.say(f"     → {finding.advice}", indent=7)
    levels = {finding.level for finding in findings}
    if levels & {"damage", "problem"}:
        sys.exit(DAMAGED if "damage" in levels else TO_DO)


def _treated(root: str) -> list[Finding]:
    from stillframe.cli.verify import read_all
    from stillframe.observe.quarantine import treat

    return treat(root, read_all)


def _finished(root: str) -> list[Finding]:
    from stillframe.observe.finishing import finish

    return finish(root)
