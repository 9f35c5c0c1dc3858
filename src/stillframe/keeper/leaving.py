"""When a keeper that could go leaves a tier: whatever that does, the wait for it ends.

A keeper could go when its trainer is gone, or closes.  It carries what is due as long as that gets on.  What it leaves
is noted in the root (:mod:`.carrying`), and the next run carries it on.
"""

from __future__ import annotations

import time

from stillframe.model import CHUNK_BYTES

_STILL_S, _TROUBLE_S = 30.0, 5.0
"""Between two attempts: so long other ranks that do not get on are waited for, and a tier that fails."""
_ATTEMPT_S, _CHUNKS = 300.0, 3
"""In an attempt: so long it may carry nothing.  A request may be repeated for hours, and a dead mount never answers.  A
limit may be so low that the time for so many chunks is longer."""


class Leaving:
    """Of one tier.  Thread: safe from any."""

    def __init__(self, bytes_per_s: float) -> None:
        self._slowest_s = _CHUNKS * CHUNK_BYTES / bytes_per_s if bytes_per_s else 0.0
        self._began_s: float | None = None
        self._attempted_s = 0.0

    def begin(self) -> None:
        """The keeper could go.  May be repeated."""
        self._began_s = self._began_s or time.monotonic()

    @property
    def has_begun(self) -> bool:
        return self._began_s is not None

    def attempted(self) -> None:
        """An attempt has ended."""
        self._attempted_s = time.monotonic()

    def is_time(self, moved_s: float, troubled_s: float | None) -> bool:
        """Between two attempts.  ``moved_s``: when something last moved; ``troubled_s``: since when the tier fails."""
        if troubled_s is not None:
            return time.monotonic() - troubled_s > _TROUBLE_S
        return time.monotonic() - max(self._began_s or 0.0, moved_s) > _STILL_S

    def hangs(self, moved_s: float) -> bool:
        """Whether an attempt is to be left where it is."""
        last_s = max(self._began_s or 0.0, moved_s, self._attempted_s)
        return time.monotonic() - last_s > max(_ATTEMPT_S, self._slowest_s)
