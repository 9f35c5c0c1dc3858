"""The keeper of the moment: starts one when there is none, passes on its news, survives its death."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from stillframe import errors
from stillframe.errors import BusyError, DeadlineError, KeeperError, StillframeError
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.link.messages import FromKeeper
from stillframe.model import RestoreReport
from stillframe.save.keeper_process import KeeperConfig, KeeperProcess
from stillframe.save.saves import Ledger, Save
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")

_YOUNG_S = 1.0
_NO_SAVE = -1
READY_S = 300.0
"""How long to wait for the root: the keeper of the run before may still be finishing."""


class Keepers:
    """Thread: safe from any.

    ``on_failure`` is called with the saves that a message or a death failed, ``on_commit`` with each committed step.
    """

    def __init__(
        self,
        config: KeeperConfig,
        ledger: Ledger,
        on_failure: Callable[[list[Save]], None],
        on_commit: Callable[[int], None],
    ) -> None:
        self._on_commit = on_commit
        self._config = config
        self._ledger = ledger
        self._on_failure = on_failure
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._current: KeeperProcess | None = None
        self._lost: list[Save] = []
        self._refusal: StillframeError | None = None
        self._answered = threading.Event()
        self._has_warned_unchanged = False
        self.is_closed = False

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._current.pid if self._current else None

    def start(self) -> KeeperProcess:
        """The running keeper, started if there is none.  Raises :class:`KeeperError`."""
        with self._lock:
            if self._current is None:
                if self.is_closed:
                    raise KeeperError("the checkpointer is closed")
                self._answered.clear()
                self._refusal = None
                self._current = KeeperProcess(
                    self._config, self._hear, self._on_exit, self._ledger.owes_news, self._is_awaited
                )
                self._ledger.keeper_started()
                self._report_lost(self._current)
            return self._current

    def _report_lost(self, keeper: KeeperProcess) -> None:
        """Let the others know, through this keeper, which steps an earlier one took with it: its lock is held again."""
        lost, self._lost = self._lost, []
        for save in lost:
            if save.error is not None:
                with contextlib.suppress(KeeperError):  # it is gone, too: then its lock tells
                    keeper.send(messages.Abandon(save.number, save.step, *errors.to_record(save.error)))

    def refuse(self, step: int, error: StillframeError) -> None:
        """Let the other ranks know that this one does not save a step that they may be saving."""
        if self._config.world_size > 1:
            with contextlib.suppress(KeeperError):
                self.start().send(messages.Abandon(_NO_SAVE, step, *errors.to_record(error)))

    def attach(self, keeper: KeeperProcess, arena: Arena) -> None:
        """Give this keeper the arena, unless it has it."""
        self._arena = arena
        if not keeper.has_arena:
            keeper.send(messages.Attach(arena.nbytes), arena.fd)
            keeper.has_arena = True

    def wait_ready(self) -> None:
        """Until the root is ours.  Raises :class:`BusyError` if another run has it."""
        with self._lock:
            self.start()
        if not self._answered.wait(READY_S):
            raise DeadlineError(f"the keeper did not get hold of {self._config.root} within {READY_S:g} s")
        if isinstance(self._refusal, BusyError):
            raise self._refusal

    def restored(self, report: RestoreReport | None) -> None:
        """For the record of the keeper, if there is one."""
        with self._lock:
            current = self._current
        if current is not None and report is not None and (report.step is not None or report.skipped):
            passed_over = tuple(each.step for each in report.skipped)
            with contextlib.suppress(KeeperError):
                current.send(messages.Restored(report.step, report.bytes, report.seconds, passed_over))

    def close(self, timeout_s: float | None, updates: tuple[tuple[float, float], ...] = ()) -> None:
        """Let it finish and go; waits no longer than this for it."""
        with self._lock:
            self.is_closed = True
            current = self._current
            if current is None:
                return
            current.expect_exit()
        try:
            current.send(messages.Close(updates))
        except KeeperError:
            pass  # gone already; joining tells
        current.join(timeout_s)

    def hang_up(self) -> None:
        """Take no more from it and send it nothing more; it finishes what it has."""
        with self._lock:
            current = self._current
        if current is not None:
            current.hang_up()

    # --- on the receiving thread -----------------------------------------------------------

    def _hear(self, message: FromKeeper) -> None:
        if isinstance(message, messages.Flushed):
            self._ledger.flushed(message.save, message.nbytes, message.begun_s)
            if self._arena is not None:
                self._arena.give_back(message.span)
        elif isinstance(message, messages.Sealed):
            self._ledger.sealed(message.save, message.at_s, message.is_unchanged)
            if message.is_unchanged:
                self._warn_unchanged()
        elif isinstance(message, messages.Waiting):
            step = self._ledger.waiting(message.save, message.ranks)
            if step is not None:
                logger.warning(
                    "step %d is sealed here and waits for %s (up to %g s)",
                    step, format_ranks(message.ranks), self._config.deadline_s,
                )  # fmt: skip
        elif isinstance(message, messages.Committed):
            save = self._ledger.committed(message.save, message.at_s)
            if save is not None:
                self._on_commit(save.step)
        elif isinstance(message, messages.Failed):
            failed = self._ledger.fail(message.save, errors.from_record(message.kind, message.message))
            self._on_failure([failed] if failed else [])
        elif isinstance(message, messages.Notice):
            logger.warning("%s", message.message)
        elif isinstance(message, messages.Ready):
            if message.warning:
                logger.warning("%s", message.warning)
            self._answered.set()
        else:
            self._refusal = errors.from_record(message.kind, message.message)

    def _is_awaited(self) -> bool:
        return self._ledger.is_awaited or (self._arena is not None and self._arena.is_awaited)

    def _on_exit(self, process: KeeperProcess, error: KeeperError | None) -> None:
        with self._lock:
            # All of this before another keeper can be started: its saves and spans are not these.
            reason = self._refusal or error or KeeperError(f"the keeper (pid {process.pid}) left with saves in flight")
            failed = self._ledger.fail_all(reason)
            self._lost += failed
            if self._arena is not None:
                self._arena.give_back_all()
            if self._current is process:
                self._current = None
            self._answered.set()
            self._replace(process)
        self._on_failure(failed)

    def _replace(self, process: KeeperProcess) -> None:
        """Of several ranks, start another at once: a rank without a keeper looks to the others as if it had ended.

        Not if it died young: then the next one would, too.
        """
        is_young = time.monotonic() - process.started_s < _YOUNG_S
        if self._config.world_size > 1 and not self.is_closed and not is_young and self._refusal is None:
            with contextlib.suppress(KeeperError):
                self.start()

    def _warn_unchanged(self) -> None:
        if not self._has_warned_unchanged:
            self._has_warned_unchanged = True
            logger.warning(
                "two successive saves hold exactly the same bytes in every lazily staged tensor. "
                "Is the state you save the one that is being trained? (said once)"
            )
