"""How a save leaves the stager: staged, failed, or lost with the thread that worked on it.

Any error fails the one save it happened to, and no other: the book of saves learns of it first, then what the save
held is given back.  A span that a copy may still be writing to is never used again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from stillframe.errors import KeeperError, StillframeError, to_record
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.save.arrivals import Filled
from stillframe.save.job import Job, error_of
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.saves import Saves
from stillframe.save.spans import Spans


class Endings:
    """Thread: that of the arrivals, or the stager's; :meth:`lose_issuing` and :meth:`lose_arriving` on any.

    ``arena`` and ``spans`` are ``None`` until there is an arena.
    """

    def __init__(self, saves: Saves, keeper: KeeperClient, arena: Arena | None) -> None:
        self._saves = saves
        self._keeper = keeper
        self.arena = arena
        self.spans: Spans | None = None
        self.on_end: Callable[[], None] = lambda: None
        """Called when nothing of a save is under way any more; must not block."""

    def hand_over(self, job: Job, batch: list[Filled]) -> None:
        """These chunks have arrived, or will soon.  Blocks; raises."""
        assert self.spans is not None
        self.spans.hand_over(job, batch)

    def end(self, job: Job) -> None:
        """Nothing more of it is issued, and what was has been handed over; or it has failed."""
        if job.audit is None or job.save.error is not None:  # else it waits for its fence
            self.end_with(job, lambda: None)
        job.arrived.unlock()
        job.dealt_with.unlock()
        self.on_end()

    def end_with(self, job: Job, check: Callable[[], None]) -> None:
        """It is staged, unless it has failed, or ``check`` raises."""
        try:
            if job.save.error is not None:  # given up meanwhile: it must not be committed after all
                raise job.save.error
            check()
            self._staged(job)
        except BaseException as error:
            try:
                self.fail(job, error)
            finally:
                self._tidy(job)

    def _staged(self, job: Job) -> None:
        assert job.keeper is not None
        job.captured.versions.check(job.save.step)
        at_s = time.monotonic()
        job.keeper.send(messages.Staged(job.save.number, at_s))
        # Only now: whoever sees "staged" may rely on the keeper knowing, and on the state's memory being let go.
        job.release()
        self._saves.staged(job.save, at_s)
        job.is_over = True

    def fail(self, job: Job, problem: BaseException) -> None:
        """First whoever waits for it learns it, then the keeper.  What it holds is given back when it ends."""
        error = error_of(job.save.step, problem)
        try:
            failed = self._saves.fail(job.save.number, error)
        finally:
            job.let_go()
            if self.arena is not None:
                self.arena.wake()
        self._saves.tell_failed(failed)
        if not job.has_told:
            job.has_told = True
            self._tell_failed(job, error)

    def _tell_failed(self, job: Job, error: StillframeError) -> None:
        """The keeper drops it, and tells the other ranks; if it knows nothing of it, or is gone, the next one does."""
        save = job.save
        if job.keeper is not None:
            with contextlib.suppress(KeeperError):
                job.keeper.send(messages.Abandon(save.number, save.step, save.attempt, *to_record(error)))
                return
        self._keeper.report_unsaved(save._sequence, save.step, save.attempt, error)

    def _tidy(self, job: Job) -> None:
        """Give back what a save that failed held, unless a copy may still need it.  Blocks while one is under way."""
        if self.spans is None or self.spans.give_back(job):
            self._over(job)

    def _over(self, job: Job) -> None:
        job.release()
        job.is_over = True

    def lose_issuing(self, problem: BaseException) -> None:
        """Nobody issues what was begun and is not issued."""
        self._lose(problem, lambda job: not job.is_ended)

    def lose_arriving(self, problem: BaseException) -> None:
        """Nobody hands over what was issued."""
        self._lose(problem, lambda job: not job.dealt_with.is_open)

    def _lose(self, problem: BaseException, is_lost: Callable[[Job], bool]) -> None:
        for save in self._saves.in_flight:
            job = save.job
            if job.is_begun and not job.is_over and is_lost(job):
                self._saves.fail(save.number, error_of(save.step, problem))
                job.let_go()
                if self.arena is not None:
                    self.arena.retire(tuple(job.spans), job)  # a copy may still be under way
                    self.arena.wake()
