"""How much ``save`` may leave waiting for the stager: saves, and the bytes that it captured for them.

Captured bytes lie beside the arena.  Another save is taken while those that wait hold less than the arena does, and are
few.  So at most as much waits as the arena holds and one save more, and a save of any size can be made when none waits.

Nothing is given back here: a save counts while its phase is "captured", and no longer when it is staged or has failed,
by whatever path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from stillframe.errors import BusyError
from stillframe.link.arena import Arena
from stillframe.save.saves import Save, Saves

logger = logging.getLogger("stillframe")

MAX_WAITING = 16
"""Saves; each holds its values and its part of a plan, however little it has captured."""
_TURN_S = 10.0
"""After so long, the wait is mentioned."""
_STALL_TURNS = 60
"""Longer than a keeper may be silent: when that one is given up, its saves fail, and this wait is over."""


class Budget:
    """Thread: safe from any, also in a signal handler.  ``arena``: ``None`` until there is one."""

    def __init__(self, saves: Saves, arena: Callable[[], Arena | None]) -> None:
        self._saves = saves
        self._arena = arena
        self._waiting: dict[Save, int] = {}

    def wait(self) -> None:
        """Block until another save may be taken: earlier ones are staged, or fail.

        Raises :class:`BusyError` if nothing moves for ten minutes: a signal handler may keep it from moving.
        """
        if self._has_room():
            return
        staged_bytes, quiet_turns = -1, 0
        while not self._saves.wait_until(self._has_room, _TURN_S):
            # In turns, not by the clock: a process that was stopped and continued saw none.
            waiting = tuple(self._waiting)
            before, staged_bytes = staged_bytes, sum(save.progress.staged_bytes for save in waiting)
            quiet_turns = quiet_turns + 1 if before == staged_bytes else 0
            names = ", ".join(str(save.step) for save in waiting)
            if before == -1:
                logger.warning("save() waits for room: the steps %s are not staged yet. Is the storage slow?", names)
            if quiet_turns >= _STALL_TURNS:
                raise BusyError(
                    f"there is no room for another save: the steps {names} are not staged, and make no progress"
                )

    def add(self, save: Save, captured_bytes: int) -> None:
        """It waits from now on.

        Only when the stager has it: a signal handler that saves in the middle of a save must not wait for that one.
        """
        self._waiting[save] = captured_bytes

    def _has_room(self) -> bool:
        for save in tuple(self._waiting):
            if save.phase != "captured":
                self._waiting.pop(save, None)
        waiting = self._waiting.copy()
        if not waiting:
            return True
        arena = self._arena()
        # An automatic arena is made for the first save, and about as large.
        room = arena.nbytes if arena else max(save.progress.total_bytes for save in waiting)
        return len(waiting) < MAX_WAITING and sum(waiting.values()) < max(room, 1)
