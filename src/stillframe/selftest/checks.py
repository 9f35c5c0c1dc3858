"""What a check says, and how it travels from the process that made it."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from stillframe.untrusted import decode_json

Verdict = Literal["pass", "note", "fail", "none"]
"""``note``: worth knowing, or could not be shown; ``none``: there is no accelerator."""


Figures = dict[str, float | int | str | None]


class Check(msgspec.Struct, frozen=True):
    name: str
    verdict: Verdict
    said: str
    figures: Figures = {}


_fd = 1


def take_output() -> None:
    """From now on the checks have standard output for themselves; what libraries print goes to standard error."""
    global _fd
    _fd = os.dup(1)
    os.dup2(2, 1)


def tell(check: Check) -> None:
    """One line, in one piece."""
    os.write(_fd, msgspec.json.encode(check) + b"\n")


def parse(line: bytes) -> Check:
    """Raises :class:`ValueError`."""
    return decode_json(line, Check)
