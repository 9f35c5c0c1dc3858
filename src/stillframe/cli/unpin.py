"""``stillframe unpin``: the policy decides again."""

from __future__ import annotations

from stillframe.checkpoint import requests
from stillframe.checkpoint.survey import open_root
from stillframe.cli import output
from stillframe.cli.arguments import OneStep, Root
from stillframe.cli.steps import one_step_of


def command(root: Root, step: OneStep) -> None:
    """Let the policy decide about a checkpoint again.

    Example: stillframe unpin runs/gpt 1000
    """
    catalog = open_root(root)
    number = one_step_of(root, step)
    is_news = bool(requests.unpin(catalog, number))
    output.say(f"step {number} is not pinned any more" if is_news else f"step {number} was not pinned")
