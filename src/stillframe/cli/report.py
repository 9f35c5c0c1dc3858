"""``stillframe report``: one HTML page about a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stillframe.checkpoint.notes import read_tiers
from stillframe.checkpoint.survey import survey
from stillframe.cli import output
from stillframe.cli.arguments import Force, Out, Root
from stillframe.observe.history import histories, newest
from stillframe.observe.report import report
from stillframe.observe.tiers import standings
from stillframe.store import open_store, root_address


def command(root: Root, out: Out = None, force: Force = False) -> None:
    """Write an HTML page about a run.

    What checkpointing cost, a timeline, every save, sizes, tiers, retention and failures. The page is one file that
    needs no network. Default file: <root's name>.html.

    Example: stillframe report runs/gpt -o gpt.html
    """
    found, every = survey(root), histories(root)
    tiers = standings(read_tiers(open_store(found.root)), every, newest(every), found.latest)
    page = report(found, every, time.time(), tiers).encode(errors="replace")
    output.write_file(out or Path(f"{os.path.basename(root_address(root))}.html"), page, overwrite=force)
