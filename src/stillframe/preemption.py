"""Jobs that are told to end: one more checkpoint, the same step on every rank, and out.

A scheduler that wants a node back sends a signal and kills the job some time later.  The signal may come in the middle
of an update, and to one rank only.  So its handler only notes it; the save is made where the loop asks, between two
steps, at one that all ranks agree on (:mod:`stillframe.ranks.meeting`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

from stillframe.checkpointer import Checkpointer
from stillframe.errors import ConfigError, DeadlineError, ExistsError, StillframeError
from stillframe.model import check_deadline, check_step
from stillframe.ranks.meeting import Meeting
from stillframe.save.handle import Save

logger = logging.getLogger("stillframe")

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def on_preemption(
    checkpointer: Checkpointer,
    state: Any,
    *,
    signals: Sequence[int] = _SIGNALS,
    deadline_s: float = 20.0,
    exit_code: int | None = None,
    on_exception: bool = False,
) -> Preemption:
    """Install signal handlers that end the run at the end of a step, with a checkpoint of that step.  On every rank::

        preemption = stillframe.on_preemption(checkpointer, state)
        for step in range(report.next_step, steps):
            ...
            optimizer.step()
            preemption.check(step)                # after a signal: saves, waits, and exits

    signals: which signals.  A signal to any rank ends all of them.
    deadline_s: how long a rank waits, before it exits, until the checkpoint is committed, and has been copied to every
    tier, whatever the tier's ``every``: the machine may not come back.  After that it exits anyway; its keeper finishes
    what is staged, unless it is killed with the job.
    exit_code: of the process; by default 128 plus the signal's number, as shells report it (143 for SIGTERM).
    on_exception: used in a ``with`` statement, also save when an exception ends the loop, if no update has begun since
    the last :meth:`~Preemption.check` (else the state belongs to no step).  A data loader may be one batch ahead.  With
    several ranks, all of them must end this way: without one of them nothing is committed.

    Thread: the main one, as for all signal handlers.  Raises: :class:`ConfigError`.
    """
    return Preemption(checkpointer, state, tuple(signals), check_deadline(deadline_s), exit_code, on_exception)


class Preemption:
    """Made by :func:`on_preemption`.  :meth:`close`, or the end of a ``with`` statement, restores earlier handlers."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: Any,
        signals: tuple[int, ...],
        deadline_s: float,
        exit_code: int | None,
        on_exception: bool,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("on_preemption: call it in the main thread; Python allows signal handlers only there")
        self._checkpointer = checkpointer
        self._state = state
        self._deadline_s = deadline_s
        self._exit_code = exit_code
        self._on_exception = on_exception
        self._step: int | None = None
        self._updates = 0
        self._meeting = Meeting(checkpointer._group, "preemption")
        self.is_requested = False
        """Whether this rank got a signal.  The others learn of it in :meth:`check`."""
        self._before: dict[int, Any] = {}
        for number in signals:
            try:
                self._before[number] = signal.signal(number, self._note)
            except (ValueError, OSError, TypeError) as error:
                self.close()
                raise ConfigError(
                    f"on_preemption(signals={signals!r}): {number!r} cannot be handled: {error}"
                ) from None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two lines of the main thread: it must not do more than this."""
        self.is_requested = True
        self._meeting.call(str(number))

    def check(self, step: int) -> None:
        """Call it at the end of every step, on every rank: after a signal it saves and exits.

        It exits by :class:`SystemExit`, with the checkpointer closed.  Otherwise it blocks briefly, at most once in a
        run, while the ranks agree on the step.
        """
        self._step, self._updates = check_step(step), self._checkpointer._fence.updates
        try:
            number = self._meeting.passed(self._step)
        except DeadlineError as error:
            logger.warning("received a signal, and exited without another checkpoint: %s", error)
            self._leave(signal.SIGTERM)
        if number:
            name = _name(int(number))
            logger.warning("%s: saving step %d, then exiting", name, self._step)
            save = self._save(self._step, {"preempted_by": name})
            self._leave(int(number), save)

    def close(self) -> None:
        """Restore the earlier signal handlers.  May be called again."""
        while self._before:
            number, before = self._before.popitem()
            with contextlib.suppress(ValueError, TypeError):  # another thread; a handler that Python did not set
                signal.signal(number, before)

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if not self._on_exception or not isinstance(error, Exception) or self._step is None:
            return
        if self._checkpointer._fence.updates != self._updates:
            logger.warning("no checkpoint on %s: an update had begun since step %d", type(error).__name__, self._step)
            return
        logger.warning("%s: saving step %d", type(error).__name__, self._step)
        self._save(self._step, {"ended_by": type(error).__name__})

    def _save(self, step: int, metadata: dict[str, Any]) -> Save | None:
        """Save the step, unless the loop has; every tier gets it.  Never raises: whoever leaves, leaves."""
        self._checkpointer._keeper.carry(step)
        try:
            return self._checkpointer.save(step, self._state, metadata=metadata)
        except Exception as error:  # also of the state's own objects
            requested = self._checkpointer._saves.newest
            save = requested if requested is not None and requested.step == step else None
            if isinstance(error, ExistsError):
                return save  # the loop has saved this step itself
            if save is None:
                logger.warning("step %d was not saved: %s: %s", step, type(error).__name__, error)
            else:
                logger.warning("%s", error)  # of an earlier save
            return save

    def _leave(self, number: int, save: Save | None = None) -> NoReturn:
        """Every rank does: none is left to wait for in a collective."""
        began = time.monotonic()
        try:
            self._checkpointer.close(self._deadline_s)
        except StillframeError as error:
            logger.warning("%s", error)
        where = "" if save is None else f": {self._where(save)}"
        logger.warning("exited after %.1f s%s", time.monotonic() - began, where)
        raise SystemExit(128 + number if self._exit_code is None else self._exit_code)

    def _where(self, save: Save) -> str:
        """Where a save is safe by now, and where it is not."""
        if save.error is not None:
            return f"step {save.step} is lost: {save.error}"
        if save.phase != "committed":
            return f"step {save.step} is {save.phase}: the keeper finishes it, unless it is killed with the job"
        tiers = save.tiers
        places = [self._checkpointer._catalog.root, *(root for root in tiers if tiers[root] == "committed")]
        late = [f"{root} ({phase})" for root, phase in tiers.items() if phase != "committed"]
        rest = f", not in {', '.join(late)}: the keeper goes on, unless it is killed with the job" if late else ""
        return f"step {save.step} is committed in {', '.join(places)}{rest}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
