"""When to save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stillframe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Every:
    """Save at every step that is a multiple of ``steps``, and when ``minutes`` have passed since the last one.

    Minutes are measured by rank 0's clock, from when it made the checkpointer or from the last step that was due.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        steps, minutes = self.steps, self.minutes
        if steps is None and minutes is None:
            raise ConfigError("Every(): give steps, or minutes, or both")
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ConfigError(f"Every(steps={steps!r}): give a whole number, at least 1")
        if minutes is not None and (
            isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < math.inf
        ):
            raise ConfigError(f"Every(minutes={minutes!r}): give a number above 0")

    def is_multiple(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0


def check_every(every: object) -> Every | None:
    """Raises :class:`ConfigError`."""
    if every is None or isinstance(every, Every):
        return every
    raise ConfigError(f"every={every!r}: give stillframe.Every(steps=…), Every(minutes=…), or both in one")
