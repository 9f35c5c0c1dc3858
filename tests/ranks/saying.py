"""How a worker speaks: ranks share their output, so a line is written whole or it runs into another's."""

from __future__ import annotations

import os


def say(line: str) -> None:
    """One line, its end included, in one write: ``print`` of an unbuffered Python makes several."""
    os.write(1, f"{line}\n".encode())
