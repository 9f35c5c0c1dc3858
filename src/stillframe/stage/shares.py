"""What several ranks hold alike is written once: which of them writes which part.

Each rank works out the same answer alone.  The tensors that a set of ranks holds are laid end to end, by name, and
cut into equal shares, one for each; a tensor that lies across a cut is cut itself, at a row.  So at most as many
tensors are cut as there are ranks, and the shares are even to within a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FINE = 64
"""A dimension of at least this size is fine enough to be cut."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of one tensor, along its cut dimension, that the holder with this number writes."""

    holder: int
    start: int
    end: int


def cut_dimension(shape: Sequence[int]) -> int:
    """The first dimension that is fine enough (its parts lie together in memory), else the largest."""
    for dim, size in enumerate(shape):
        if size >= _FINE:
            return dim
    return max(range(len(shape)), key=lambda dim: shape[dim], default=0)


def shares(sizes: Sequence[tuple[int, int]], count: int) -> list[list[Cut]]:
    """For each tensor, given as (bytes, rows), who writes which rows; ``rows`` 1 if it must stay whole."""
    total = sum(nbytes for nbytes, _ in sizes)
    at = 0
    found: list[list[Cut]] = []
    for nbytes, rows in sizes:
        if rows <= 1 or nbytes == 0:
            middle = at + nbytes // 2
            holder = min(middle * count // total, count - 1) if total else 0
            found.append([Cut(holder, 0, rows)])
        else:
            found.append(_cuts(at, nbytes, rows, total, count))
        at += nbytes
    return found


def _cuts(at: int, nbytes: int, rows: int, total: int, count: int) -> list[Cut]:
    cuts: list[Cut] = []
    row = 0
    for holder in range(at * count // total, count):
        border = total * (holder + 1) // count
        end = rows if holder == count - 1 else min(max(round((border - at) * rows / nbytes), row), rows)
        if end > row:
            cuts.append(Cut(holder, row, end))
            row = end
        if row == rows:
            break
    return cuts
