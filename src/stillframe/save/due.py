"""Which steps are saved, the same ones on every rank."""

from __future__ import annotations

import logging
import time

from stillframe.errors import ConfigError, DeadlineError
from stillframe.ranks.group import Group
from stillframe.ranks.meeting import Meeting
from stillframe.schedule import Every

logger = logging.getLogger("stillframe")


class Due:
    """Ranks count their steps alike, but not their minutes: those are rank 0's, and all ranks meet when they are over.

    Thread: the training thread's.
    """

    def __init__(self, every: Every | None, group: Group) -> None:
        self._every = every
        self._is_clock = group.rank == 0
        self._since_s = time.monotonic()
        self._meeting = Meeting(group, "time") if every is not None and every.minutes is not None else None

    def at(self, step: int, is_last: bool) -> bool:
        """Blocks for an answer of the other ranks, now and then, if minutes count.  Raises :class:`ConfigError`."""
        if self._every is None:
            raise ConfigError("due: say when, as in Checkpointer(root, every=stillframe.Every(steps=100, minutes=30))")
        is_due = self._is_time(step) or self._every.is_multiple(step) or is_last
        if is_due:
            self._since_s = time.monotonic()
        return is_due

    def _is_time(self, step: int) -> bool:
        if self._meeting is None or self._every is None or self._every.minutes is None:
            return False
        if self._is_clock and time.monotonic() - self._since_s >= 60 * self._every.minutes:
            self._meeting.call("time")
        try:
            return bool(self._meeting.passed(step))
        except DeadlineError as error:
            logger.warning("no step is due by the clock any more: %s", error)
            self._meeting = None
            return False
