"""``stillframe unpin``: the policy decides again."""

from __future__ import annotations

from typing import Annotated

import typer

from stillframe.checkpoint import requests
from stillframe.checkpoint.survey import open_root
from stillframe.cli import output
from stillframe.cli.arguments import Root


def command(root: Root, step: Annotated[int, typer.Argument(help="A step.", show_default=False)]) -> None:
    """Let the policy decide about a checkpoint again.

    Example: stillframe unpin runs/gpt 1000
    """
    catalog = open_root(root)
    is_news = bool(requests.unpin(catalog, step))
    output.say(f"step {step} is not pinned any more" if is_news else f"step {step} was not pinned")
