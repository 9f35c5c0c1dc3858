"""Whether a keeper lives is told by itself, and not guessed from the news that do not come.

A keeper with work beats every :data:`BEAT_S`, whatever its storage does: in a message to its trainer, and in its lock's
file to a later run.  Each beat names the storage operation that has lasted longest.  Who waits gives it up for two
reasons only: no beat for :data:`STALL_S` (it is stopped, or its node is gone), or one operation that has not ended for
:data:`HANG_S`.  Slow storage is no reason, nor are other ranks that the keeper waits for.
"""

from __future__ import annotations

import msgspec

BEAT_S = 2.0
STALL_S = 300.0
HANG_S = 900.0
"""Storage that fails over, or writes back all its dirty pages in one fsync, may take minutes."""


class Pulse(msgspec.Struct, frozen=True):
    """One beat."""

    beat: int = 0
    """Counts them."""
    operation: int = 0
    """The number of the storage operation that has lasted longest; 0: there is none."""
    doing: str = ""
    """For people to read."""


class Patience:
    """Judges one keeper by its beats.

    Time is counted in turns of waiting and in beats, not by the clock: a job that was stopped for a while saw neither.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._hung_s = 0.0
        self.last = Pulse()

    def waited(self, seconds: float) -> None:
        """So long nothing was heard."""
        self._silent_s += seconds

    def heard(self, pulse: Pulse | None = None) -> None:
        """It said something; a beat that was heard before does not count."""
        if pulse is None:
            self._silent_s = 0.0
        elif pulse.beat != self.last.beat:
            is_same = pulse.operation != 0 and pulse.operation == self.last.operation
            self._hung_s = self._hung_s + (pulse.beat - self.last.beat) * BEAT_S if is_same else 0.0
            self._silent_s = 0.0
            self.last = pulse

    @property
    def verdict(self) -> str:
        """Why it is to be given up, as a part of a sentence; empty if it is not."""
        if self._hung_s >= HANG_S:
            return f"hangs in one storage operation: {self.last.doing}. Does the storage answer?"
        if self._silent_s >= STALL_S:
            last = f"; it was last {self.last.doing}" if self.last.doing else ""
            return f"has said nothing for {self._silent_s:g} s{last}. Is it stopped, or its node?"
        return ""
