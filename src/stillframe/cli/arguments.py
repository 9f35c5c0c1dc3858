"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[Path, typer.Argument(help="The directory that the Checkpointer was made with.", show_default=False)]
Step = Annotated[int | None, typer.Argument(help="A step; the newest if none is given.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Rank = Annotated[
    int | None,
    typer.Option("--rank", help="Whose own values are meant, of what each rank keeps for itself.", show_default="0"),
]
