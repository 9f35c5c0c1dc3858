"""``stillframe report``: one HTML page about a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stillframe.checkpoint.survey import survey
from stillframe.cli import output
from stillframe.cli.arguments import Force, Out, Root
from stillframe.observe.history import histories
from stillframe.observe.report import report


def command(root: Root, out: Out = None, force: Force = False) -> None:
    """Write an HTML page about a run.

    What checkpointing cost, a timeline, every save, sizes, retention and failures. The page is one file that needs no
    network. Default file: <root's name>.html.

    Example: stillframe report runs/gpt -o gpt.html
    """
    page = report(survey(root), histories(root), time.time()).encode(errors="replace")
    output.write_file(out or Path(f"{Path(os.path.abspath(root)).name}.html"), page, overwrite=force)
