"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stillframe.cli.steps import completed

Root = Annotated[str, typer.Argument(help="The directory or URL given to Checkpointer().", show_default=False)]
OptionalRoot = Annotated[
    str | None, typer.Argument(metavar="ROOT", help="The directory or URL given to Checkpointer().", show_default=False)
]
Step = Annotated[
    str | None,
    typer.Argument(
        help="A step: its number, latest, or -2 for the newest but one. Default: the newest checkpoint.",
        metavar="[STEP]", show_default=False, autocompletion=completed,
    ),
]  # fmt: skip
OneStep = Annotated[
    str,
    typer.Argument(
        help="A step: its number, latest, or -2 for the newest but one.",
        metavar="STEP", show_default=False, autocompletion=completed,
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Rank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        help="For values saved separately by each rank (RNG, data position, plain tensors): use this rank's.",
        show_default="the first",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
