"""The stager: copies what ``save`` noted into the arena, chunk by chunk, in order.

One thread issues the copies; another (:mod:`stillframe.save.arrivals`) waits for them and tells the keeper.

Invariants:
- a save is *issued* when the copy of its last byte is queued behind the compute before ``save()``, and
  *staged* when every byte is in the arena and the keeper has been told of every chunk;
- the fence lets the update pass only behind the issued copies of every save requested so far, also one
  that this thread has not begun; it waits for the arrival of none, unless it is asked to;
- what is staged is what the state was at ``save()``: a tensor that was changed past the fence fails the save.  It is
  looked for when a fence lets updates pass, or else when staging ends; whichever comes first;
- sources, captured bytes and spans stay alive until their copy is done.

Any error here fails the one save it happened to, and no other: the book of saves learns of it first, then what the save
held is given back.  A span that a copy may still be writing to is never used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from stillframe.errors import ConfigError, DeadlineError, KeeperError, StateError
from stillframe.latch import LOOK_S, Answer, Latch, is_running, join
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.model import Label, Stats
from stillframe.save.arrivals import MAX_BATCH, Arrivals, Pace
from stillframe.save.audit import Audit
from stillframe.save.capture import Captured
from stillframe.save.device import Device
from stillframe.save.endings import Endings
from stillframe.save.fence import UpdateLog
from stillframe.save.graphs import Captures
from stillframe.save.job import Job, say, write_draft
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount
from stillframe.save.spans import Spans

logger = logging.getLogger("stillframe")

_GRACE_S = 1.0
_HANG_UP_S = 5.0


class Stager:
    """Copies saves into the arena, and tells the keeper, which it starts.

    Without an ``arena``, ``make_arena(state_bytes)`` is called once, on the stager's thread, for the first save.
    ``others``: in a root that is not shared, what the other ranks have sealed.  ``pace``: of copies from accelerators.
    """

    def __init__(
        self,
        saves: Saves,
        keeper: KeeperClient,
        arena: Arena | None,
        make_arena: Callable[[int], Arena],
        others: SealCount | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._others = others
        self._pace = pace
        self._saves = saves
        self._keeper = keeper
        self._make_arena = make_arena
        self.arena = arena
        self._spans: Spans | None = None
        self._starting = threading.RLock()  # a signal handler may look, too
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._endings = Endings(saves, keeper, arena)
        self._endings.on_end = partial(self._work.put, _look)  # spans that were being filled can be pinned now
        self._arrivals = Arrivals(self._endings)
        self._updates = UpdateLog()
        self._captures = Captures()
        self._owner_pid = os.getpid()
        self._is_closed = False
        try:
            keeper.start()
        except BaseException:
            if arena is not None:
                arena.close()
            raise
        self._start()

    def _start(self) -> None:
        # Known first, then started: that can be interrupted, and two must never stage.
        self._thread = threading.Thread(target=self._run, name="stillframe-stage", daemon=True)
        self._thread.start()

    # --- on the training thread ------------------------------------------------------------

    def submit(self, save: Save, captured: Captured, audit: Audit | None, label: Label | None) -> None:
        """Put it into the book of saves: from then on it is staged, whatever happens here.  Never blocks."""
        save.job = Job(save, captured, audit, label)
        self._saves.add(save)
        self.hurry()
        if self._is_closed and not save.job.is_begun:  # close() came in between: perhaps nobody stages it any more
            self._endings.fail(save.job, ConfigError("the checkpointer was closed while save() was under way"))

    def hurry(self) -> None:
        """Stage what is requested and not begun.  Who waits for a save says so: ``save()`` may have been interrupted
        before it could."""
        self._work.put(self._stage_requested)

    def before_wait(self) -> None:
        """Somebody is about to wait for saves."""
        self.hurry()
        self._keeper.look_now()
        self._end_audits()

    def run_soon(self, work: Callable[[], None]) -> None:
        """Have this done by the stager's thread.  Never blocks."""
        self._work.put(work)

    def look_after(self) -> None:
        """Fail the saves that nobody works on any more, because a thread or a keeper has ended without a word."""
        with self._starting:
            if not is_running(self._thread):
                self._endings.lose_issuing(KeeperError("the staging thread ended unexpectedly"))
                if not self._is_closed:
                    self._start()
                    self.hurry()
            if self._arrivals.has_died():
                self._endings.lose_arriving(KeeperError("the thread that waits for copies ended unexpectedly"))
                self._arrivals.restart()
        self._keeper.look_after()

    def _pending(self) -> list[Job]:
        return [save.job for save in self._saves.in_flight if not save.job.is_over]

    def wait_idle(self, deadline_s: float) -> bool:
        """Block until no fence has a save to look at: one is told to be staged a moment earlier.  Whether it is so."""
        for job in self._pending():
            while not job.is_over and not job.dealt_with.wait(min(LOOK_S, max(deadline_s - time.monotonic(), 0.0))):
                if time.monotonic() >= deadline_s:
                    return False
                self.look_after()
        return True

    def is_busy(self, chunks: int) -> bool:
        """Whether a save of so many chunks would have to wait for an earlier one."""
        arena = self.arena
        if self._pending():
            return True
        return arena is not None and arena.free_spans < min(chunks, arena.spans)

    def fence(self, begins: bool = False, *, wait: bool = False) -> None:
        """Blocks until compute queued from now on comes after the copies of every save requested so far.

        ``wait``: until these are made.  Either ends when the save fails; no failure is raised here.
        ``begins``: an update by an optimizer, with which another iteration begins; for the report.
        """
        if os.getpid() != self._owner_pid:  # a forked child has no stager to wait for
            return
        began = time.monotonic()
        has_waited = False
        pending = self._pending()
        self._captures.check([job.save.step for job in pending])
        if not pending:
            self._updates.add(began, 0.0, has_waited, begins)
            return
        for job in pending:
            if not job.issued.is_open:
                has_waited = True
                self.hurry()
            self._wait(job.issued)
            if not job.is_over:
                job.captured.versions.release()
            if not self._order(job) or wait:
                has_waited = has_waited or not job.arrived.is_open
                self._wait(job.arrived)
            if job.audit is not None and not job.is_over:
                self._end_audit(job)
        waited_s = time.monotonic() - began
        self._updates.add(began, waited_s, has_waited, begins)
        self._saves.fenced(waited_s, has_waited)

    def _wait(self, latch: Latch) -> None:
        while not latch.wait(LOOK_S):
            self.look_after()

    def _order(self, job: Job) -> bool:
        """Let compute wait for the copies.  Whether the devices could do that: else the host has to."""
        try:
            for device, ticket in job.tickets:
                device.order_after(ticket)
        except Exception:
            return False
        return True

    def _end_audits(self) -> None:
        """Compare now what is copied, so that it is staged.  Blocks; for the training thread, between two updates."""
        for job in self._pending():
            if job.audit is not None and not job.is_over:
                self._wait(job.issued)
                self._end_audit(job)

    def begin_audit(self, step: int, captured: Captured) -> Audit:
        """Hash what is to be staged.  Blocks the training thread, so that nothing changes meanwhile."""
        assert captured.plan is not None
        audit = Audit(captured.plan, step, captured.sources)
        self._standing_still(captured.marks, audit.begin)
        return audit

    def _end_audit(self, job: Job) -> None:
        def check() -> None:
            assert job.audit is not None
            if problem is not None:
                raise problem
            for device, mark in marks:
                device.begin(mark)
            job.audit.end()

        def work() -> None:
            if not job.is_over:
                self._endings.end_with(job, check)

        marks: list[tuple[Device, Any]] = []
        problem: Exception | None = None
        self._wait(job.dealt_with)
        try:
            marks = [(device, device.mark()) for device in job.devices]
        except Exception as error:  # in an update: it fails the save, and raises nothing here
            problem = error
        self._standing_still([], work)

    def _standing_still(self, marks: list[tuple[Device, Any]], work: Callable[[], None]) -> None:
        """Run ``work`` on the stager's thread, after the compute queued so far.  Blocks; raises what it raises."""
        done: Answer[None] = Answer()

        def turn() -> None:
            for device, mark in marks:
                device.begin(mark)
            work()

        self._work.put(lambda: done.run(turn))
        while not done.is_given:
            with contextlib.suppress(DeadlineError):
                done.get(LOOK_S)
            if not done.is_given and not is_running(self._thread):
                raise StateError("the staging thread ended unexpectedly")
        done.get()

    def give_up(self, why: str) -> list[int]:
        """Fail the saves that are not staged yet, so that :meth:`close` does not wait for room in the arena.

        Returns their steps; the keeper finishes the others.
        """
        error = DeadlineError(f"given up before it was staged: {why}")
        failed = self._saves.fail_unstaged(error)
        if self.arena is not None:
            self.arena.wake()
        self._saves.tell_failed(failed)
        return [save.step for save in failed]

    def stats(self) -> Stats:
        """Counters of the saves, with those of the arena."""
        arena = self.arena
        tiers = self._keeper.tiers.stats()
        return self._saves.stats(
            arena_bytes=arena.nbytes if arena else 0, arena_wait_s=arena.wait_s if arena else 0.0, tiers=tiers
        )

    def close(self, timeout_s: float | None) -> None:
        """Finish what was submitted, end the thread, let the keeper go.

        Past the deadline, hang up on a keeper that does not listen; what is staged is its affair from here on.
        """
        self.end_thread(None if timeout_s is None else max(timeout_s, _GRACE_S))
        self._keeper.close(timeout_s, self._updates.take())
        self.release()

    def end_thread(self, timeout_s: float | None) -> None:
        """Blocks until it has done what it was asked.  Afterwards nothing is staged any more."""
        self._is_closed = True
        self._work.put(None)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not (join(self._thread, timeout_s) and self._arrivals.stop(_left(deadline_s))):
            self._keeper.hang_up()
            deadline_s = time.monotonic() + _HANG_UP_S
            if join(self._thread, _HANG_UP_S):
                self._arrivals.stop(_left(deadline_s))

    def let_go(self, when_done: Callable[[], None]) -> None:
        """As :meth:`close`, without waiting: the thread stages what was requested, then lets the keeper go."""

        def leave() -> None:
            self._arrivals.stop(None)
            self._keeper.close(0.0, self._updates.take())
            self.release()
            when_done()

        self._is_closed = True
        self.hurry()
        self._work.put(leave)
        self._work.put(None)

    def release(self) -> None:
        """The arena goes, unless a thread that copies into it does not end."""
        self._spans = self._endings.spans = None
        if self.arena is not None:
            is_issuing = is_running(self._thread) and self._thread is not threading.current_thread()
            self.arena.close(is_in_use=is_issuing or self._arrivals.is_under_way)

    # --- on the stager's thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                try:
                    work()
                except BaseException as error:  # a bug: no save may hang because of it, and later ones must work
                    self._endings.lose_issuing(error)
                    say(logger.exception, "the stager met an unexpected error")
                del work
        except BaseException as error:
            self._endings.lose_issuing(error)
            raise

    def _next(self) -> Callable[[], None] | None:
        """The next piece of work; while there is none, fault in the arena."""
        while True:
            try:
                return self._work.get_nowait()
            except queue.Empty:
                if self.arena is None or not self.arena.touch_one():
                    return self._work.get()

    def _stage_requested(self) -> None:
        for save in self._saves.in_flight:
            job = save.job
            if not job.is_begun:
                job.is_begun = True
                self._stage(job)

    def _stage(self, job: Job) -> None:
        try:
            self._saves.stage_begun(job.save)
            self._begin(job).issue(job, self._arrivals.put)
        except BaseException as error:
            self._endings.fail(job, error)
        finally:
            job.issued.unlock()
            self._arrivals.put(job, None)
            job.is_ended = True

    def _begin(self, job: Job) -> Spans:
        plan, save = job.plan, job.save
        self._keeper.start()  # it starts while the arena is made
        if self.arena is None:
            self.arena = self._endings.arena = self._make_arena(plan.data_bytes)
        if self._spans is None:
            self._spans = self._endings.spans = Spans(self.arena, self._saves, self._pace)
            self._arrivals.batch = max(1, min(MAX_BATCH, self.arena.spans // 8))
        self._spans.adopt(plan.devices)
        draft = msgspec.json.encode(job.captured.draft)
        contents = msgspec.msgpack.encode(job.label.contents) if job.label and job.label.contents else b""
        label = dataclasses.replace(job.label, contents=()) if job.label else None
        begin = messages.Begin(
            save=save.number, step=save.step, attempt=save.attempt, requested_s=save.times.requested_s,
            header_bytes=len(plan.header), draft_bytes=len(draft), data_bytes=plan.data_bytes,
            layout=plan.layout, lazy=plan.lazy,
            telemetry=messages.Telemetry(save.times.returned_s, save.times.stage_begin_s, self._updates.take()),
            complete_step=self._others.complete_step() if self._others else -1, label=label,
            label_bytes=len(contents),
        )  # fmt: skip
        fd = write_draft(plan.header, draft, contents)
        try:
            job.keeper = self._keeper.talk(partial(self._tell_of, begin, fd, self.arena))
        finally:
            os.close(fd)
        for device, mark in job.captured.marks:
            device.begin(mark)
        return self._spans

    def _tell_of(self, begin: messages.Begin, fd: int, arena: Arena, keeper: KeeperProcess) -> None:
        self._keeper.attach(keeper, arena)
        keeper.send(begin, fd)


def _left(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)


def _look() -> None:
    """No work: whoever takes it from the queue looks at the arena again."""
