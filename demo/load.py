"""How many cores other programs used meanwhile: whether the timings of two runs may be compared at all.

Owns the sum: what the kernel counts as busy, less what this process and its ended children used.  A keeper
counts once its trainer has waited for it, so the figure is right for a run that ended, not for a killed one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float:
        others_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        return max(others_s, 0.0) / (time.monotonic() - self._began_s)


def _busy_s() -> float:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own_s() -> float:
    return sum(os.times()[:4])
