"""The book of saves: the phase of each, its error, and what they add up to.

A save exists from the moment it is put into the book, which is one assignment: a signal handler or Ctrl-C finds it
there or not, never half.  Every change wakes all waiters, and who waits looks now and then whether those who work live.
A save's failure is kept until somebody is told: the owner of the :class:`Save`, or the next ``save``, ``wait`` or
``close``; or, unless ``on_error="raise"``, it is told at once (:mod:`.on_error`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from stillframe.errors import BusyError, ConfigError, DeadlineError, KeeperError, StillframeError
from stillframe.latch import LOOK_S, Bell, check_may_wait
from stillframe.model import PHASES, Phase, Stats, TierPhase
from stillframe.save.callbacks import Callbacks
from stillframe.save.handle import Save as Save
from stillframe.save.on_error import OnError, Telling
from stillframe.tiers import TierName
from stillframe.units import format_ranks

logger = logging.getLogger("stillframe")

_EXIT_S = 60.0
_UNCHANGED = (
    "two successive saves hold exactly the same bytes in every lazily staged tensor, although an optimizer has made "
    "updates in between. None of its parameters is in the state: is that the one that is being trained? (said once)"
)


def check_phase(phase: str) -> int:
    if phase not in PHASES:
        raise ConfigError(f"phase={phase!r} is not one of {', '.join(PHASES)}")
    return PHASES.index(phase)


class InTiers(Protocol):
    """What becomes of saves in the tiers."""

    def phases(self, save: Save) -> dict[str, TierPhase]: ...

    def wait_for(self, save: Save, tier: TierName, timeout_s: float | None) -> None: ...

    def wait_idle(self, tier: TierName, timeout_s: float | None) -> None: ...


class Saves:
    """All saves of one checkpointer.  Thread: safe from any."""

    def __init__(self, on_error: OnError) -> None:
        self.telling = Telling(on_error)
        self.before_wait: Callable[[], None] = lambda: None
        """Runs ahead of every wait, on the waiting thread: what was requested is on its way."""
        self.look_after: Callable[[], None] = lambda: None
        """Runs now and then while somebody waits: fails the saves whose workers have died without a word."""
        self.on_end: list[Callable[[Save], None]] = []
        """Called for each save that is committed or has failed, before anybody else learns of it; must not block."""
        self.on_awaiting: Callable[[Save], None] = lambda _save: None
        """Called for each save that has waited for other ranks for a while; must not block."""
        self.sequence = 0
        """How often training has gone on from somewhere else, the same on every rank."""
        self.callbacks = Callbacks()
        self._lock = threading.RLock()  # always in a with statement, which no signal can break up
        self._numbers = itertools.count(1)
        self._in_flight: dict[int, Save] = {}
        self._untold: list[Save] = []
        self._counts: dict[str, float] = defaultdict(int)
        self._bells: dict[Bell, None] = {}
        self._has_warned_unchanged = False
        self.last_committed: Save | None = None
        self.tiers: InTiers | None = None

    # --- what happens to a save ------------------------------------------------------------

    def make(self, step: int, attempt: int, total_bytes: int, requested_s: float) -> Save:
        """A save that is not in the book yet."""
        save = Save(self, next(self._numbers), step, attempt, total_bytes, requested_s)
        save._sequence = self.sequence
        return save

    def add(self, save: Save) -> None:
        """From here on it is requested, and somebody will be told what becomes of it."""
        self._in_flight[save.number] = save

    def knows(self, save: Save) -> bool:
        """Whether it is in the book, or was."""
        return save.number in self._in_flight or save.phase != "captured"

    def skip(self, step: int, requested_s: float) -> Save:
        logger.warning("step %d is skipped: an earlier save still fills the arena", step)
        save = Save(self, -1, step, 0, 0, requested_s)
        save._phase = "skipped"
        with self._lock:
            self._count(skipped=1)
        return save

    def stage_begun(self, save: Save) -> None:
        self._note(save, stage_begin_s=time.monotonic())

    def returned(self, save: Save, captured_bytes: int, blocked_s: float) -> None:
        with self._lock:
            save._times = dataclasses.replace(save._times, returned_s=time.monotonic())
            self._count(saves=1, captured_bytes=captured_bytes, blocked_save_s=blocked_s)

    def staging(self, save: Save, nbytes: int) -> None:
        with self._lock:
            save._staged_bytes += nbytes
            self._count(staged_bytes=nbytes)

    def staged(self, save: Save, at_s: float) -> None:
        self._advance(save, "staged", staged_s=at_s)

    def flushed(self, number: int, nbytes: int, begun_s: float) -> None:
        with self._lock:
            self._count(flushed_bytes=nbytes)
            save = self._in_flight.get(number)
            if save is not None:
                save._flushed_bytes += nbytes
                if save._times.flush_begin_s is None:
                    save._times = dataclasses.replace(save._times, flush_begin_s=begun_s)

    def sealed(self, number: int, at_s: float, is_unchanged: bool, epoch: int | None = None) -> Save | None:
        with self._lock:
            self._count(unchanged=int(is_unchanged))
            save = self._in_flight.get(number)
        if save is not None:
            save.epoch = epoch
            self._advance(save, "sealed", sealed_s=at_s)
            if is_unchanged and save._is_suspect and not self._has_warned_unchanged:
                self._has_warned_unchanged = True
                with contextlib.suppress(Exception):
                    logger.warning(_UNCHANGED)
        return save

    def awaiting_ranks(self, number: int, ranks: tuple[int, ...], deadline_s: float) -> None:
        """Note which ranks a save waits for; the first time with a warning."""
        with self._lock:
            save = self._in_flight.get(number)
            if save is None:
                return
            is_first = not save._awaited
            save._awaited = ranks
        if is_first:
            self.on_awaiting(save)
            what = "is sealed here and waits" if save.phase == "sealed" else "waits"
            with contextlib.suppress(Exception):
                logger.warning("step %d %s for %s (up to %g s)", save.step, what, format_ranks(ranks), deadline_s)

    def committed(self, number: int, at_s: float) -> Save | None:
        with self._lock:
            save = self._in_flight.get(number)
            if save is None:
                return None
            for tell in self.on_end:
                tell(save)
            self._advance(save, "committed", committed_s=at_s)
            self._in_flight.pop(number, None)
            self._count(committed=1)
            self.last_committed = save
            self._call_back(save)
            self._counts["committed_step"] = save.step
            self._counts["committed_unix_s"] = time.time()
        return save

    def then(self, save: Save, function: Callable[[Save], object]) -> None:
        with self._lock:
            save._then.append(function)
            if save.phase == "committed":
                self._call_back(save)

    def when_over(self, save: Save, function: Callable[[Save], object]) -> None:
        with self._lock:
            save._over.append(function)
            if save.phase in ("committed", "failed"):
                self._call_back(save)

    def _call_back(self, save: Save) -> None:
        functions = [*(save._then if save.phase == "committed" else []), *save._over]
        save._then, save._over = [], []
        for function in functions:
            self.callbacks.put(function, save)

    def fail(self, number: int, error: StillframeError, files_stay: bool = True) -> list[Save]:
        """The save, for :meth:`tell_failed`; none if it had ended already."""
        with self._lock:
            save = self._in_flight.get(number)
            if save is None:
                return []
            save._files_stay = files_stay
            return self.refuse(save, error)

    def refuse(self, save: Save, error: StillframeError) -> list[Save]:
        """Fail a save, also one that never was in the book."""
        with self._lock:
            save._error = error
            try:
                for tell in self.on_end:
                    tell(save)
            finally:  # whatever happens there, nobody waits for it any more
                save._phase = "failed"
                self._in_flight.pop(save.number, None)
                self._untold.append(save)
                self._count(failed=1)
                self._call_back(save)
                self.ring()
            return [save]

    def fail_unstaged(self, error: StillframeError) -> list[Save]:
        """Fail the saves that are not staged; the keeper finishes the others."""
        numbers = [save.number for save in self.in_flight if save.phase == "captured"]
        return [save for number in numbers for save in self.fail(number, error)]

    def tell_failed(self, saves: list[Save]) -> None:
        """Unless they are to be raised.  Not done by :meth:`fail`, whose callers hold locks."""
        for save in saves:
            assert save.error is not None
            self.telling.failed(save.step, save.error)

    def fenced(self, blocked_s: float, has_waited: bool) -> None:
        with self._lock:
            self._count(blocked_fence_s=blocked_s, fences=int(has_waited))

    def keeper_started(self) -> None:
        with self._lock:
            self._count(keeper_starts=1)

    # --- asking ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[Save]:
        return list(self._in_flight.values())

    @property
    def newest(self) -> Save | None:
        """The last one that was requested and is in flight, or else the last one that was committed."""
        return next(reversed(self.in_flight), self.last_committed)

    def owes_news(self, until_sealed: bool = False) -> bool:
        """Whether the keeper has bytes or a whole save of ours that it has not reported on.

        ``until_sealed``: in a root that is not shared it has nothing more to tell of a save that it has sealed.
        """
        quiet = ("captured", "sealed") if until_sealed else ("captured",)
        with self._lock:
            return any(
                save._staged_bytes > save._flushed_bytes or save._phase not in quiet
                for save in self._in_flight.values()
            )

    def stats(self, **more: Any) -> Stats:
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
            return Stats(in_flight=len(self._in_flight), **counts, **more)

    def raise_untold(self, more: str = "") -> None:
        """Raises the error of the first failed save that nobody has been told of; all count as told from now on.

        ``more`` stands at the end of the message.
        """
        untold = self._take_untold()
        if untold:
            first = untold[0]
            assert first.error is not None
            others = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
            raise type(first.error)(f"saving step {first.step} failed{others}: {first.error}{more}") from first.error

    def stage_at_exit(self) -> None:
        """Before the interpreter ends: wait until the keeper can finish alone, and log what nobody was told of."""
        try:
            self.wait_all("staged", _EXIT_S)
        except StillframeError as error:
            logger.warning("at exit: %s", error)
        for save in self._take_untold():
            logger.warning("saving step %d failed, and nothing raised its error: %s", save.step, save.error)

    def _take_untold(self) -> list[Save]:
        """None unless they are to be raised: else they have been told."""
        with self._lock:
            untold, self._untold = self._untold, []
            return untold if self.telling.is_later else []

    def wait_for(self, save: Save, phase: Phase, timeout_s: float | None, tier: TierName | None = None) -> None:
        wanted = check_phase(phase)
        began = time.monotonic()
        self.wait_until(lambda: _is_settled(save, wanted), timeout_s)
        with self._lock:
            if save in self._untold:
                self._untold.remove(save)
        found = save.phase  # once: it may go on
        if found == "failed":
            raise save.error or KeeperError(f"step {save.step} failed")
        if found == "skipped":
            raise BusyError(f"step {save.step} was skipped: an earlier save still filled the arena (when_busy='skip')")
        if PHASES.index(found) < wanted:
            raise DeadlineError(f"step {save.step} is {found}{_for_whom(save)}, not {phase}, after {timeout_s:g} s")
        if tier is not None:
            assert self.tiers is not None
            self.tiers.wait_for(save, tier, _left(timeout_s, began))

    def wait_all(self, phase: Phase, timeout_s: float | None, tier: TierName | None = None) -> None:
        """Block until every save in flight has reached the phase, or failed, and the tier has what is due.  Raises."""
        wanted = check_phase(phase)
        began = time.monotonic()
        waited_for = self.in_flight
        if not self.wait_until(lambda: all(_is_settled(save, wanted) for save in waited_for), timeout_s):
            late = [save for save in waited_for if not _is_settled(save, wanted)]
            if late:  # else the last came in this moment
                listed = ", ".join(f"{save.step} ({save.phase}{_for_whom(save)})" for save in late)
                raise DeadlineError(f"after {timeout_s:g} s these steps are not {phase}: {listed}")
        if tier is not None:
            assert self.tiers is not None
            self.tiers.wait_idle(tier, _left(timeout_s, began))

    @property
    def is_awaited(self) -> bool:
        """Whether somebody is blocked here, and wants news at once."""
        return bool(self._bells)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block until it is done, which is asked whenever a save has changed.  Returns whether it is."""
        check_may_wait(self._lock)
        bell, deadline_s = Bell(), None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._bells[bell] = None
            self.before_wait()
            while not is_done():
                left_s = LOOK_S if deadline_s is None else min(deadline_s - time.monotonic(), LOOK_S)
                if left_s <= 0:
                    return False
                bell.wait(left_s)
                self.look_after()
            return True
        finally:
            self._bells.pop(bell, None)

    def ring(self) -> None:
        """Whoever waits looks again."""
        for bell in tuple(self._bells):
            bell.ring()

    # --- inside ----------------------------------------------------------------------------

    def _count(self, **more: float) -> None:
        for name, by in more.items():
            self._counts[name] += by

    def _note(self, save: Save, **times: float) -> None:
        with self._lock:
            save._times = dataclasses.replace(save._times, **times)

    def _advance(self, save: Save, phase: Phase, **times: float) -> None:
        with self._lock:
            if save._phase in PHASES and PHASES.index(save._phase) < PHASES.index(phase):
                save._phase = phase
            save._times = dataclasses.replace(save._times, **times)
            self.ring()


def _left(timeout_s: float | None, began_s: float) -> float | None:
    return None if timeout_s is None else max(timeout_s - (time.monotonic() - began_s), 0.0)


def _for_whom(save: Save) -> str:
    is_waiting = save._awaited and save.phase not in ("committed", "failed")
    return f" and waits for {format_ranks(save._awaited)}" if is_waiting else ""


def _is_settled(save: Save, wanted: int) -> bool:
    found = save.phase  # once: it may fail in between
    return found in ("failed", "skipped") or PHASES.index(found) >= wanted
