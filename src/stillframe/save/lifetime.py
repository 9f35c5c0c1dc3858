"""How long a checkpointer lives: in the process that made it, until it is closed or dropped, or the process ends."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import warnings
import weakref
from collections.abc import Callable

from stillframe.errors import ConfigError
from stillframe.save.fence import OptimizerFence
from stillframe.save.saves import Saves
from stillframe.save.stager import Stager

_EXIT_S = 5.0


class Lifetime:
    """``at_exit`` is called when the interpreter ends before :meth:`end`, also in a child of multiprocessing;
    ``dropped`` when ``owner`` is garbage, with what it calls when nothing is left to do at the exit.

    Neither may refer to the owner: they would keep it alive.
    """

    def __init__(
        self,
        owner: object,
        at_exit: Callable[[], None],
        dropped: Callable[[Callable[[], None]], None],
        what: str,
    ) -> None:
        self._at_exit = at_exit
        self._dropped = dropped
        self._what = what
        self._owner_pid = os.getpid()
        self._is_over = False
        """Nothing more is begun."""
        self._is_done = False
        """Nothing is left to be done."""
        atexit.register(self._leave)
        self._finalizer: multiprocessing.util.Finalize | None = None
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing leaves by os._exit and runs only what is registered here.
            self._finalizer = multiprocessing.util.Finalize(None, self._leave, exitpriority=100)
        weakref.finalize(owner, self._drop).atexit = False

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
        """Nothing more is begun.  Whether there is something left to do: not after :meth:`done`, nor in a forked child.

        Whoever is interrupted before :meth:`done` may begin again.
        """
        if self._is_done or os.getpid() != self._owner_pid:
            return False
        self._is_over = True
        return True

    def done(self) -> None:
        self._is_done = True
        atexit.unregister(self._leave)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def _leave(self) -> None:
        self._is_over = True
        if not self._is_done and os.getpid() == self._owner_pid:
            self._at_exit()

    def _drop(self) -> None:
        if not self._is_done and os.getpid() == self._owner_pid:
            self._is_over = True
            try:
                with contextlib.suppress(Exception):  # where warnings are errors, nobody could catch this one
                    warnings.warn(
                        f"{self._what} was dropped without close(): use it in a with statement", ResourceWarning, 1
                    )
            finally:
                self._dropped(self.done)


class Parts:
    """What must be ended although the checkpointer itself is gone, or going."""

    def __init__(self, saves: Saves, stager: Stager, fence: OptimizerFence) -> None:
        self._saves = saves
        self._stager = stager
        self._fence = fence

    def at_exit(self) -> None:
        """Leaving the interpreter without close(): stage what was requested, the keeper does the rest.

        The stager's thread ends here: one that is inside torch while the interpreter goes aborts the process.
        """
        try:
            self._saves.stage_at_exit()
        finally:
            self._fence.remove()
            self._saves.callbacks.end(_EXIT_S)
            self._stager.end_thread(_EXIT_S)
            self._stager.release()  # unpinned while there is a runtime to ask

    def let_go(self, when_done: Callable[[], None]) -> None:
        """Dropped without close(): the same, without waiting."""
        self._fence.remove()
        self._stager.let_go(when_done)
