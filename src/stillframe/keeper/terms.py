"""What every part of a keeper goes by."""

from __future__ import annotations

from dataclasses import dataclass

from stillframe.store.protocol import Store

COORDINATOR = 0
"""The rank whose keeper commits."""
NEWS_S = 10.0
"""After so long a trainer is told whom a save waits for, and again each time."""


@dataclass(frozen=True, slots=True)
class Terms:
    store: Store
    run: str
    """Made up when the run started; the same on every rank."""
    world_size: int
    deadline_s: float
