"""``stillframe doctor --device``: the self-test of the accelerator, as it is shown."""

from __future__ import annotations

import sys

from stillframe.cli import output
from stillframe.cli.exit_codes import BAD_DEVICE, NO_DEVICE
from stillframe.selftest.checks import Check
from stillframe.selftest.runner import run_all
from stillframe.store import files

_MARKS = {"pass": " ok ", "note": "note", "fail": "BAD "}


def examine_device(*, is_json: bool) -> None:
    """Prints each check when it is made, then the verdict; ends the process if not all is well."""
    checks: list[Check] = []
    with files.scratch_directory("stillframe-selftest-") as scratch:
        for check in run_all(scratch):
            checks.append(check)
            if not is_json:
                output.say(
                    check.said if check.verdict == "none" else f"{_MARKS[check.verdict]} {check.name}: {check.said}"
                )
                sys.stdout.flush()
    verdicts = [check.verdict for check in checks]
    verdict = "none" if "none" in verdicts else "fail" if "fail" in verdicts else "pass"
    if is_json:
        output.print_json({"verdict": verdict, "checks": checks})
    elif verdict != "none":
        counts = f"{verdicts.count('pass')} passed, {verdicts.count('note')} to note, {verdicts.count('fail')} failed"
        output.say(f"verdict: {verdict.upper()} ({counts})")
    if verdict != "pass":
        sys.exit(NO_DEVICE if verdict == "none" else BAD_DEVICE)
