"""``stillframe trace``: what a run did, as a Chrome trace."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stillframe.cli import output
from stillframe.cli.arguments import Force, Out, Root
from stillframe.errors import NotFoundError
from stillframe.observe.history import histories
from stillframe.observe.trace import trace
from stillframe.store import root_address


def command(root: Root, out: Out = None, force: Force = False) -> None:
    """Write what a run did as a Chrome trace.

    For ui.perfetto.dev or chrome://tracing. Shows the iterations, fences, staging, flushing and commits of every rank
    and attempt on one time axis. Default file: <root's name>.trace.json.

    Example: stillframe trace runs/gpt -o gpt.trace.json
    """
    found = histories(root)
    if not found:
        raise NotFoundError(f"no run has left events in {root}")
    data = msgspec.json.encode(trace(found))
    output.write_file(out or Path(f"{os.path.basename(root_address(root))}.trace.json"), data, overwrite=force)
