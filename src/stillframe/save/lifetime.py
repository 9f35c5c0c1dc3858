"""How long a checkpointer may be used: in the process that made it, until it is closed or the interpreter ends."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable

from stillframe.errors import ConfigError


class Lifetime:
    """``at_exit`` is called when the interpreter ends before :meth:`end`, also in a child of multiprocessing."""

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self._at_exit = at_exit
        self._owner_pid = os.getpid()
        self._is_over = False
        atexit.register(self._leave)
        self._finalizer: multiprocessing.util.Finalize | None = None
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing leaves by os._exit and runs only what is registered here.
            self._finalizer = multiprocessing.util.Finalize(None, self._leave, exitpriority=100)

    def check_open(self, doing: str) -> None:
        """Raises :class:`ConfigError`."""
        if self._is_over:
            raise ConfigError(f"{doing}: this checkpointer is closed; make another")
        self.check_process(doing)

    def check_process(self, doing: str) -> None:
        """Raises :class:`ConfigError` in a forked child."""
        if os.getpid() != self._owner_pid:
            raise ConfigError(
                f"{doing}: this checkpointer belongs to process {self._owner_pid}, not to its forked child"
            )

    def end(self) -> bool:
        """Whether this call ended it: not if it was over, and not in a forked child."""
        if self._is_over or os.getpid() != self._owner_pid:
            return False
        self._is_over = True
        atexit.unregister(self._leave)
        if self._finalizer is not None:
            self._finalizer.cancel()
        return True

    def _leave(self) -> None:
        if self.end():
            self._at_exit()
