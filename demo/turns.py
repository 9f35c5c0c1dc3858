"""What saving costs, measured in turns: a few steps with saves, a few without, and so on in one process.

Two runs one after the other compare the machine at two moments.  Here both kinds meet the same moments, and each pair
of turns gives one ratio; their spread says how much the machine disturbs.  A turn with saves ends when its last
checkpoint is durable, so that its writing is not charged to the next turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from demo.record import Step

_LENGTH = 4
_PAIRS = 6
"""The first one is not counted: the first save plans, and starts the keeper."""
_CLOSE = 0.05
STEPS = 2 * _LENGTH * _PAIRS


def is_saving(step: int) -> bool:
    """Of steps from 1 on.  The two of a pair change places from pair to pair."""
    pair, second = divmod((step - 1) // _LENGTH, 2)
    return (pair + second) % 2 == 1


def is_last(step: int) -> bool:
    """Of its turn."""
    return step % _LENGTH == 0


class Overhead:
    """Of a run in turns."""

    def __init__(self, steps: Sequence[Step]) -> None:
        counted = [step for step in steps if step.step > 2 * _LENGTH]
        plain_s, saving_s = (_turns_s(counted, kind) for kind in (False, True))
        self._ratios = [saving / plain - 1 for plain, saving in zip(plain_s, saving_s, strict=True)]
        self.plain_s, self.saving_s = (statistics.median(each) / _LENGTH for each in (plain_s, saving_s))

    @property
    def median(self) -> float:
        return statistics.median(self._ratios)

    @property
    def is_clear(self) -> bool:
        """Whether all pairs agree that saving costs something, or are close to one another."""
        return min(self._ratios) > 0 or max(self._ratios) - min(self._ratios) < _CLOSE

    @property
    def spread(self) -> str:
        return f"{min(self._ratios):+.0%} to {max(self._ratios):+.0%} in {len(self._ratios)} pairs of turns"


def _turns_s(steps: Sequence[Step], kind: bool) -> list[float]:
    found: dict[int, float] = {}
    for step in steps:
        if is_saving(step.step) == kind:
            turn = (step.step - 1) // _LENGTH
            found[turn] = found.get(turn, 0.0) + step.seconds
    return list(found.values())
