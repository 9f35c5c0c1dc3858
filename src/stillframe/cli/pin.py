"""``stillframe pin``: keeps a checkpoint, whatever the policy."""

from __future__ import annotations

from stillframe.checkpoint import requests
from stillframe.checkpoint.survey import open_root
from stillframe.cli import output
from stillframe.cli.arguments import OneStep, Root
from stillframe.cli.steps import one_step_of


def command(root: Root, step: OneStep) -> None:
    """Keep a checkpoint, whatever the policy.

    Neither retention nor `prune` nor `remove` touches a pinned checkpoint. `list` shows which are pinned.

    Example: stillframe pin runs/gpt 1000
    """
    catalog = open_root(root)
    save = requests.pin(catalog, one_step_of(root, step))
    output.say(f"step {save.step} is pinned; `stillframe unpin` undoes it")
