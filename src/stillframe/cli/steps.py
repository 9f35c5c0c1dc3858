"""How a step is named on the command line: its number, ``latest``, or -2 for the newest but one; several: 100-200."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import typer

from stillframe.checkpoint.survey import open_root
from stillframe.errors import ConfigError, NotFoundError, StillframeError
from stillframe.store import is_url, root_address, root_text
from stillframe.units import format_count

_LATEST = "latest"
_BACK = re.compile(r"latest~(\d{1,9})")
_RANGE = re.compile(r"(\d+)-(\d+)")


def readable(arguments: Sequence[str]) -> list[str]:
    """``-2`` would be taken for an option: it becomes ``latest~1``."""
    return [f"{_LATEST}~{int(each[1:]) - 1}" if re.fullmatch(r"-[1-9]\d{0,8}", each) else each for each in arguments]


def is_step(text: str) -> bool:
    return text.isdecimal() or text == _LATEST or _BACK.fullmatch(text) is not None


def step_of(root: str, text: str | None) -> int | None:
    """Of checkpoints of the branch; ``None`` stands for the newest.  Raises :class:`ConfigError`, `NotFoundError`."""
    if text is None or text == _LATEST:
        return None
    if text.isdecimal():
        return int(text)
    back = _BACK.fullmatch(text)
    if back is None:
        raise ConfigError(f"{text!r} is not a step: give its number, or latest, or -2 for the newest but one")
    catalog, number = open_root(root), int(back[1])
    steps = [save.step for save in catalog.committed()]
    if number >= len(steps):
        count = format_count(len(steps), "checkpoint")
        raise NotFoundError(f"there is no step -{number + 1} in {catalog.root}: it has {count}")
    return steps[number]


def one_step_of(root: str, text: str) -> int:
    """Raises also :class:`NotFoundError` if there is no newest."""
    step = step_of(root, text)
    if step is None and (step := open_root(root).latest()) is None:
        raise NotFoundError(f"there is no checkpoint in {root}")
    return step


def steps_of(root: str, texts: Sequence[str]) -> list[int]:
    """Each once.  A range stands for the steps that are there; raises also :class:`NotFoundError` if there are none."""
    found: list[int] = []
    for text in texts:
        several = _RANGE.fullmatch(text)
        found += _within(root, int(several[1]), int(several[2])) if several else [one_step_of(root, text)]
    return list(dict.fromkeys(found))


def _within(root: str, first: int, last: int) -> list[int]:
    catalog = open_root(root)
    found = sorted({save.step for save in catalog.look().saves if first <= save.step <= last})
    if not found:
        raise NotFoundError(f"there is no step from {first} to {last} in {catalog.root}")
    return found


def completed(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the steps of the root before, the newest first; nothing of an object store, which may be slow."""
    root = context.params.get("root")
    with contextlib.suppress(StillframeError):
        if isinstance(root, str) and not is_url(root_address(root_text(root))):
            steps = [_LATEST, *(str(save.step) for save in open_root(root).committed())]
            return [step for step in steps if step.startswith(incomplete)]
    return []
