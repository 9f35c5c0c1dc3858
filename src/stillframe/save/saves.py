"""The book of saves: the phase of each, its error, and what they add up to.

One lock guards everything here; every change wakes all waiters.  A save's failure is kept until
somebody is told: the owner of the :class:`Save`, or the next ``save``, ``wait`` or ``close``; or,
with ``on_error="warn"``, it is logged at once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

from stillframe.errors import BusyError, ConfigError, DeadlineError, StillframeError
from stillframe.model import PHASES, Phase, Progress, Stats, Times
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")

_EXIT_S = 60.0


def check_phase(phase: str) -> int:
    if phase not in PHASES:
        raise ConfigError(f"phase={phase!r} is not one of {', '.join(PHASES)}")
    return PHASES.index(phase)


class Save:
    """One requested checkpoint, on its way through the phases.  Thread: safe from any."""

    def __init__(
        self, saves: Saves, number: int, step: int, attempt: int, total_bytes: int, requested_s: float
    ) -> None:
        self.step = step
        self.attempt = attempt
        """1, unless earlier saves of the step have failed."""
        self.number = number
        self._saves = saves
        self._total_bytes = total_bytes
        self._staged_bytes = 0
        self._flushed_bytes = 0
        self._phase: Phase = "captured"
        self._error: StillframeError | None = None
        self._times = Times(requested_s)
        self._awaited: tuple[int, ...] = ()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def error(self) -> StillframeError | None:
        """Why it failed; ``None`` if it has not."""
        return self._error

    @property
    def progress(self) -> Progress:
        return Progress(self._total_bytes, self._staged_bytes, self._flushed_bytes)

    @property
    def times(self) -> Times:
        return self._times

    def wait(self, phase: Phase = "committed", timeout_s: float | None = None) -> None:
        """Block until this save has reached ``phase``.

        Raises: its error, if it failed; :class:`BusyError` if it was skipped; :class:`DeadlineError`.
        """
        self._saves.wait_for(self, phase, timeout_s)

    def __repr__(self) -> str:
        return f"<Save step={self.step} {self._phase}>"


class Saves:
    """All saves of one checkpointer.  Thread: safe from any."""

    def __init__(self, on_error: Literal["raise", "warn"]) -> None:
        self._on_error = on_error
        self.before_wait: Callable[[], None] | None = None
        """Runs ahead of every wait, on the waiting thread (an audit needs a turn there)."""
        self.on_end: Callable[[Save], None] = lambda _save: None
        """Called for each save that is committed or has failed, before anybody else learns of it."""
        self._changed = threading.Condition()
        self._in_flight: dict[int, Save] = {}
        self._untold: list[Save] = []
        self._counts: dict[str, float] = defaultdict(int)
        self._waiters = 0

    # --- what happens to a save ------------------------------------------------------------

    def begin(self, step: int, attempt: int, total_bytes: int, requested_s: float) -> Save:
        with self._changed:
            self._count(saves=1)
            save = Save(self, int(self._counts["saves"]), step, attempt, total_bytes, requested_s)
            self._in_flight[save.number] = save
            return save

    def skip(self, step: int, requested_s: float) -> Save:
        logger.warning("step %d is skipped: an earlier save still fills the arena", step)
        save = Save(self, -1, step, 0, 0, requested_s)
        save._phase = "skipped"
        with self._changed:
            self._count(skipped=1)
        return save

    def stage_begun(self, save: Save) -> None:
        self._note(save, stage_begin_s=time.monotonic())

    def returned(self, save: Save, captured_bytes: int, blocked_s: float) -> None:
        self._note(save, returned_s=time.monotonic())
        with self._changed:
            self._count(captured_bytes=captured_bytes, blocked_save_s=blocked_s)

    def staging(self, save: Save, nbytes: int) -> None:
        with self._changed:
            save._staged_bytes += nbytes
            self._count(staged_bytes=nbytes)

    def staged(self, save: Save, at_s: float) -> None:
        self._advance(save, "staged", staged_s=at_s)

    def flushed(self, number: int, nbytes: int, begun_s: float) -> None:
        with self._changed:
            self._count(flushed_bytes=nbytes)
            save = self._in_flight.get(number)
            if save is not None:
                save._flushed_bytes += nbytes
                if save._times.flush_begin_s is None:
                    save._times = dataclasses.replace(save._times, flush_begin_s=begun_s)

    def sealed(self, number: int, at_s: float, is_unchanged: bool) -> Save | None:
        with self._changed:
            self._count(unchanged=int(is_unchanged))
            save = self._in_flight.get(number)
        if save is not None:
            self._advance(save, "sealed", sealed_s=at_s)
        return save

    def awaiting_ranks(self, number: int, ranks: tuple[int, ...]) -> int | None:
        """Note which ranks a sealed save waits for; returns its step the first time, for a warning."""
        with self._changed:
            save = self._in_flight.get(number)
            if save is None:
                return None
            is_first = not save._awaited
            save._awaited = ranks
            return save.step if is_first else None

    def committed(self, number: int, at_s: float) -> Save | None:
        with self._changed:
            save = self._in_flight.pop(number, None)
            self._count(committed=int(save is not None))
            if save is not None:
                self.on_end(save)
                self._counts["committed_step"] = save.step
                self._counts["committed_unix_s"] = time.time()
        if save is not None:
            self._advance(save, "committed", committed_s=at_s)
        return save

    def fail(self, number: int, error: StillframeError) -> list[Save]:
        """The save, for :meth:`tell_failed`; none if it had ended already."""
        with self._changed:
            save = self._in_flight.pop(number, None)
            if save is not None:
                save._error = error
                self.on_end(save)
                save._phase = "failed"
                self._untold.append(save)
                self._count(failed=1)
            self._changed.notify_all()
            return [] if save is None else [save]

    def fail_unstaged(self, error: StillframeError) -> list[Save]:
        """Fail the saves that are not staged; the keeper finishes the others."""
        numbers = [save.number for save in self.in_flight if save.phase == "captured"]
        return [save for number in numbers for save in self.fail(number, error)]

    def fail_all(self, error: StillframeError) -> list[Save]:
        with self._changed:
            numbers = list(self._in_flight)
        return [save for number in numbers for save in self.fail(number, error)]

    def tell_failed(self, saves: list[Save]) -> None:
        """With ``on_error="warn"``, log these failures.  Not done by :meth:`fail`, because a log handler may raise."""
        if self._on_error == "warn":
            for save in saves:
                logger.warning("saving step %d failed; training goes on: %s", save.step, save.error)

    def fenced(self, blocked_s: float, has_waited: bool) -> None:
        with self._changed:
            self._count(blocked_fence_s=blocked_s, fences=int(has_waited))

    def keeper_started(self) -> None:
        with self._changed:
            self._count(keeper_starts=1)

    # --- asking ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[Save]:
        with self._changed:
            return list(self._in_flight.values())

    def owes_news(self, until_sealed: bool = False) -> bool:
        """Whether the keeper has bytes or a whole save of ours that it has not reported on.

        ``until_sealed``: in a root that is not shared it has nothing more to tell of a save that it has sealed.
        """
        quiet = ("captured", "sealed") if until_sealed else ("captured",)
        with self._changed:
            return any(
                save._staged_bytes > save._flushed_bytes or save._phase not in quiet
                for save in self._in_flight.values()
            )

    def stats(self, **more: Any) -> Stats:
        with self._changed:
            counts: dict[str, Any] = dict(self._counts)
            return Stats(in_flight=len(self._in_flight), **counts, **more)

    def raise_untold(self) -> None:
        """Raises the error of the first failed save that nobody has been told of; all count as told from now on."""
        untold = self._take_untold()
        if untold:
            first = untold[0]
            assert first.error is not None
            others = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
            raise type(first.error)(f"saving step {first.step} failed{others}: {first.error}") from first.error

    def stage_at_exit(self) -> None:
        """Before the interpreter ends: wait until the keeper can finish alone, and log what nobody was told of."""
        try:
            self.wait_all("staged", _EXIT_S)
        except StillframeError as error:
            logger.warning("at exit: %s", error)
        for save in self._take_untold():
            logger.warning("saving step %d failed, and nobody was told: %s", save.step, save.error)

    def _take_untold(self) -> list[Save]:
        """None with ``on_error="warn"``: those have been logged."""
        with self._changed:
            untold, self._untold = self._untold, []
            return untold if self._on_error == "raise" else []

    def wait_for(self, save: Save, phase: Phase, timeout_s: float | None) -> None:
        wanted = check_phase(phase)
        if self.before_wait is not None:
            self.before_wait()
        with self._changed:
            self._wait(lambda: _is_settled(save, wanted), timeout_s)
            if save in self._untold:
                self._untold.remove(save)
        if save.error is not None:
            raise save.error
        if save.phase == "skipped":
            raise BusyError(f"step {save.step} was skipped: an earlier save still filled the arena (when_busy='skip')")
        if not _is_settled(save, wanted):
            raise DeadlineError(
                f"step {save.step} is {save.phase}{_for_whom(save)}, not {phase}, after {timeout_s:g} s"
            )

    def wait_all(self, phase: Phase, timeout_s: float | None) -> None:
        """Block until every save in flight has reached the phase, or failed.  Raises :class:`DeadlineError`."""
        wanted = check_phase(phase)
        if self.before_wait is not None:
            self.before_wait()
        with self._changed:
            waited_for = list(self._in_flight.values())
            if not self._wait(lambda: all(_is_settled(save, wanted) for save in waited_for), timeout_s):
                late = ", ".join(
                    f"{save.step} ({save.phase}{_for_whom(save)})"
                    for save in waited_for
                    if not _is_settled(save, wanted)
                )
                raise DeadlineError(
                    f"after {timeout_s:g} s these steps are not {phase}: {late}; they go on in the background"
                )

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is blocked here, and wants news at once."""
        return self._waiters > 0

    def _wait(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        self._waiters += 1
        try:
            return self._changed.wait_for(is_done, timeout_s)
        finally:
            self._waiters -= 1

    # --- inside ----------------------------------------------------------------------------

    def _count(self, **more: float) -> None:
        for name, by in more.items():
            self._counts[name] += by

    def _note(self, save: Save, **times: float) -> None:
        with self._changed:
            save._times = dataclasses.replace(save._times, **times)

    def _advance(self, save: Save, phase: Phase, **times: float) -> None:
        with self._changed:
            if save._phase in PHASES and PHASES.index(save._phase) < PHASES.index(phase):
                save._phase = phase
            save._times = dataclasses.replace(save._times, **times)
            self._changed.notify_all()


def _for_whom(save: Save) -> str:
    return f" and waits for {format_ranks(save._awaited)}" if save._awaited and save.phase == "sealed" else ""


def _is_settled(save: Save, wanted: int) -> bool:
    return save.phase in ("failed", "skipped") or PHASES.index(save.phase) >= wanted
