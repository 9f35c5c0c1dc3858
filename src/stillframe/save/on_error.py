"""How the job learns of what went wrong: saves that failed, and tiers that cannot be written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

from stillframe.errors import ConfigError, StillframeError

logger = logging.getLogger("stillframe")

OnError: TypeAlias = "Literal['raise', 'warn'] | Callable[[StillframeError], object]"


def check_on_error(given: OnError) -> None:
    """Raises :class:`ConfigError`."""
    if given not in ("raise", "warn") and not callable(given):
        raise ConfigError(f"on_error={given!r}: give 'raise', 'warn' or a function that takes the error")


class Telling:
    """Thread: safe from any.  Raises nothing: neither a log handler nor the job's own function may end a thread."""

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error

    @property
    def is_later(self) -> bool:
        """Failures of saves are kept until somebody asks, and raised."""
        return self._on_error == "raise"

    def failed(self, step: int, error: StillframeError) -> None:
        """A save has failed."""
        if not self.is_later:
            told = type(error)(f"saving step {step} failed; training goes on: {error}")
            told.__cause__ = error
            self._tell(told)

    def troubled(self, error: StillframeError) -> None:
        """A tier cannot be written.  That costs no save, so it is never raised."""
        self._tell(error)

    def _tell(self, error: StillframeError) -> None:
        with contextlib.suppress(Exception):
            if not callable(self._on_error):
                logger.warning("%s", error)
                return
            try:
                self._on_error(error)
            except Exception as problem:
                logger.warning("on_error raised %s: %s; the error was: %s", type(problem).__name__, problem, error)
