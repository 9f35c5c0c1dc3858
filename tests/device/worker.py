"""Runs test functions in a process that has the device: one line of JSON in, one out, until its input ends.

A test fails also for what nobody waits for: a use after free on the device, an exception in a thread or a destructor.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.device import queued

TEST_S = 50.0
"""A test that takes longer is ended, with the stacks of its threads."""


def run(module: str, name: str, arguments: dict[str, Any], troubles: list[str]) -> str:
    """What went wrong; nothing if it is empty."""
    faulthandler.dump_traceback_later(TEST_S, exit=True)
    try:
        test = getattr(importlib.import_module(module), name)
        if "tmp_path" in arguments:
            arguments["tmp_path"] = Path(arguments["tmp_path"])
        test.body(**arguments)
    except BaseException:
        troubles.append(traceback.format_exc())
    try:
        queued.reset()
        gc.collect()
    except Exception:
        troubles.append(traceback.format_exc())
    troubles += queued.take_reports()
    faulthandler.cancel_dump_traceback_later()
    return "\n".join(troubles)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    troubles: list[str] = []
    sys.unraisablehook = lambda what: troubles.append(f"ignored in {what.object!r}: {what.exc_value!r}")
    threading.excepthook = lambda what: troubles.append(f"in {what.thread}: {what.exc_value!r}")
    queued.load()
    for line in sys.stdin:
        asked = json.loads(line)
        troubles.clear()
        found = run(asked["module"], asked["name"], asked["arguments"], troubles)
        os.write(answers, json.dumps({"troubles": found}).encode() + b"\n")


if __name__ == "__main__":
    main()
