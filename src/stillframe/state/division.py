"""Which rank writes which box of what several ranks hold alike.

Every rank works this out alone, and all come to the same result: it depends only on what these ranks have in common.
The boxes are laid end to end, in an order that all ranks know, and divided into equal shares, one for each rank.  A
box that lies across a border is divided itself, at a row.  So at most as many boxes are divided as there are ranks,
and the shares are even to within a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stillframe.state.boxes import Box

_FINE = 64
"""A dimension of at least this size is fine enough to be divided."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box that a set of ranks hold alike."""

    box: Box
    item_bytes: int
    is_divisible: bool

    @property
    def nbytes(self) -> int:
        return self.item_bytes * math.prod(self.box.shape)

    @property
    def rows(self) -> int:
        """How many boxes it can be divided into."""
        return self.box.shape[row_dimension(self.box.shape)] if self.is_divisible and self.box.shape else 1


def row_dimension(shape: Sequence[int]) -> int:
    """The first dimension that is fine enough (its rows lie together in memory), else the largest."""
    for dim, size in enumerate(shape):
        if size >= _FINE:
            return dim
    return max(range(len(shape)), key=lambda dim: shape[dim], default=0)


def assign(boxes: Sequence[HeldBox], ranks: Sequence[int]) -> list[list[tuple[int, Box]]]:
    """For each box that ``ranks`` hold alike, which of them writes which box of it; in the order of ``ranks``."""
    total = sum(held.nbytes for held in boxes)
    at = 0
    found: list[list[tuple[int, Box]]] = []
    for held in boxes:
        nbytes, rows = held.nbytes, held.rows
        if rows <= 1 or nbytes == 0:
            number = min((at + nbytes // 2) * len(ranks) // total, len(ranks) - 1) if total else 0
            found.append([(ranks[number], held.box)])
        else:
            dim = row_dimension(held.box.shape)
            found.append(
                [
                    (ranks[number], held.box.between(dim, start, end))
                    for number, start, end in _rows_of_each(at, nbytes, rows, total, len(ranks))
                ]
            )
        at += nbytes
    return found


def _rows_of_each(at: int, nbytes: int, rows: int, total: int, count: int) -> list[tuple[int, int, int]]:
    """Who writes which rows of ``nbytes`` that begin at ``at`` of ``total``: (number of the rank, first row, end)."""
    found: list[tuple[int, int, int]] = []
    row = 0
    for number in range(at * count // total, count):
        border = total * (number + 1) // count
        end = rows if number == count - 1 else min(max(round((border - at) * rows / nbytes), row), rows)
        if end > row:
            found.append((number, row, end))
            row = end
        if row == rows:
            break
    return found
