"""Runs commands as processes that need not import torch again: reads requests, forks for each, prints its exit code.

The tests of what the real start of a command does (its speed, its imports, signals, pipes) run the real thing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def run(request: dict[str, Any]) -> None:
    """In the child: never returns."""
    code = 70
    try:
        for fd, path in ((1, request["out"]), (2, request["err"])):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"] or Path.cwd())
        sys.argv = ["stillframe", *request["arguments"]]
        from stillframe.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    for module in ("torch", "stillframe.cli.app", "stillframe.convert.export", "stillframe.convert.importing"):
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
