"""The stager: one thread that copies what ``save`` noted into the arena, chunk by chunk, in order.

Invariants:
- a save is *issued* when the copy of its last byte is queued behind the compute before ``save()``, and
  *staged* when every byte is in the arena and the keeper has been told of every chunk;
- the fence lets the update pass only behind the issued copies of every save requested so far, also one
  that this thread has not begun;
- sources, captured bytes and spans stay alive until their copy is done.

Any error here fails the one save it happened to, and no other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from stillframe.errors import DeadlineError, KeeperError, StateError, StillframeError, to_record
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES, Label, Stats
from stillframe.save.audit import Audit
from stillframe.save.capture import Captured
from stillframe.save.device import Device, Ticket
from stillframe.save.fence import Holds, UpdateLog
from stillframe.save.keeper_client import KeeperClient
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.plan import Plan
from stillframe.save.saves import Save, Saves
from stillframe.save.seal_count import SealCount

logger = logging.getLogger("stillframe")

_GRACE_S = 1.0
_HANG_UP_S = 5.0
_OBITUARY_S = 1.0
_AHEAD = 4
"""Chunks whose copies may be queued on an accelerator before the first of them is waited for."""


@dataclass(slots=True)
class _Job:
    """One save, as the training thread hands it over."""

    save: Save
    captured: Captured
    audit: Audit | None
    label: Label | None
    keeper: KeeperProcess | None = None
    tickets: list[tuple[Device, Ticket]] = field(default_factory=list)
    issued: threading.Event = field(default_factory=threading.Event)
    is_over: bool = False
    """Staged or failed: no fence needs to look at it any more."""

    @property
    def plan(self) -> Plan:
        return self.captured.plan


@dataclass(frozen=True, slots=True)
class _Filled:
    chunk: int
    span: int
    nbytes: int
    tickets: list[Ticket]


class Stager:
    """Copies saves into the arena, and tells the keeper, which it starts.

    Without an ``arena``, ``make_arena(state_bytes)`` is called once, on the stager's thread, for the first save.
    ``others``: in a root that is not shared, what the other ranks have sealed.
    """

    def __init__(
        self,
        saves: Saves,
        keeper: KeeperClient,
        arena: Arena | None,
        make_arena: Callable[[int], Arena],
        others: SealCount | None = None,
    ) -> None:
        self._others = others
        self._saves = saves
        self._keeper = keeper
        self._make_arena = make_arena
        self.arena = arena
        self._memory: torch.Tensor | None = None
        self._adopted: set[Device] = set()
        self._forgetting = threading.RLock()  # a signal handler may save, too
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: deque[_Job] = deque()
        self._updates = UpdateLog()
        self.holds = Holds()
        """A fence first waits for these, then for the saves that were requested meanwhile."""
        self._owner_pid = os.getpid()
        try:
            keeper.start()
        except BaseException:
            if arena is not None:
                arena.close()
            raise
        self._thread = threading.Thread(target=self._run, name="stillframe-stage", daemon=True)
        self._thread.start()

    # --- on the training thread ------------------------------------------------------------

    def submit(self, save: Save, captured: Captured, audit: Audit | None, label: Label | None) -> None:
        """Never blocks."""
        job = _Job(save, captured, audit, label)
        self._forget_over()
        self._pending.append(job)
        self._work.put(lambda: self._stage(job))

    def is_busy(self, chunks: int) -> bool:
        """Whether a save of so many chunks would have to wait for an earlier one."""
        arena = self.arena
        if any(not job.is_over for job in tuple(self._pending)):
            return True
        return arena is not None and arena.free_spans < min(chunks, arena.spans)

    def fence(self) -> None:
        """Blocks until compute queued from now on comes after the copies of every save requested so far."""
        if os.getpid() != self._owner_pid:  # a forked child has no stager to wait for
            return
        began = time.monotonic()
        has_waited = self.holds.wait()
        if not self._pending:
            self._updates.add(began, time.monotonic() - began if has_waited else 0.0, has_waited)
            return
        for job in tuple(self._pending):
            has_waited = has_waited or not job.issued.is_set()
            job.issued.wait()
            for device, ticket in job.tickets:
                device.order_after(ticket)
            if job.audit is not None and not job.is_over:
                self._end_audit(job)
        self._forget_over()
        waited_s = time.monotonic() - began
        self._updates.add(began, waited_s, has_waited)
        self._saves.fenced(waited_s, has_waited)

    def _forget_over(self) -> None:
        with self._forgetting:
            while self._pending and self._pending[0].is_over:
                self._pending.popleft()

    def begin_audit(self, step: int, captured: Captured) -> Audit:
        """Hash what is to be staged.  Blocks the training thread, so that nothing changes meanwhile."""
        audit = Audit(captured.plan, step)
        self._standing_still(captured.marks, audit.begin)
        return audit

    def _end_audit(self, job: _Job) -> None:
        def work() -> None:
            assert job.audit is not None
            if not job.is_over:
                try:
                    job.audit.end()
                    self._staged(job)
                except Exception as error:
                    self._fail(job, error, [])

        self._standing_still([(device, device.mark()) for device in job.plan.devices], work)

    def _standing_still(self, marks: list[tuple[Device, Any]], work: Callable[[], None]) -> None:
        """Run ``work`` on the stager's thread, after the compute queued so far.  Blocks; raises what it raises."""
        done: Future[None] = Future()

        def turn() -> None:
            try:
                for device, mark in marks:
                    device.begin(mark)
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._work.put(turn)
        done.result()

    def give_up(self, why: str) -> None:
        """Fail the saves that are not staged yet, so that :meth:`close` does not wait for room in the arena."""
        error = DeadlineError(f"given up before it was staged: {why}")
        self._saves.tell_failed(self._saves.fail_unstaged(error))
        if self.arena is not None:
            self.arena.wake()

    def stats(self) -> Stats:
        """Counters of the saves, with those of the arena."""
        arena = self.arena
        return self._saves.stats(arena_bytes=arena.nbytes if arena else 0, arena_wait_s=arena.wait_s if arena else 0.0)

    def close(self, timeout_s: float | None) -> None:
        """Finish what was submitted, end the thread, let the keeper go.

        Past the deadline, hang up on a keeper that does not listen; what is staged is its affair from here on.
        """
        self._work.put(None)
        self._thread.join(None if timeout_s is None else max(timeout_s, _GRACE_S))
        if self._thread.is_alive():
            self._keeper.hang_up()
            self._thread.join(_HANG_UP_S)
        self._pending.clear()
        self._memory = None
        self._keeper.close(timeout_s, self._updates.take())
        if self.arena is not None:
            self.arena.close()

    # --- on the stager's thread ------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # a bug, or a log handler that raises: later saves must not hang because of it
                logger.exception("the stager met an unexpected error")
            del work

    def _next(self) -> Callable[[], None] | None:
        """The next piece of work; while there is none, fault in the arena."""
        while True:
            try:
                return self._work.get_nowait()
            except queue.Empty:
                if self.arena is None or not self.arena.touch_one():
                    return self._work.get()

    def _stage(self, job: _Job) -> None:
        spans: list[int] = []
        self._saves.stage_begun(job.save)
        try:
            self._begin(job)
            self._copy_chunks(job, spans)
            if job.audit is None:
                self._staged(job)
        except Exception as error:
            self._fail(job, error, spans)
        finally:
            job.issued.set()

    def _begin(self, job: _Job) -> None:
        plan, save = job.plan, job.save
        job.keeper = self._keeper.start()
        if self.arena is None:
            self.arena = self._make_arena(plan.data_bytes)
        if self._memory is None:
            self._memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        for device in plan.devices:
            if device not in self._adopted:
                self._adopted.add(device)
                device.adopt(self.arena.address, self.arena.nbytes)
        self._keeper.attach(job.keeper, self.arena)
        draft = msgspec.json.encode(job.captured.draft)
        fd = os.memfd_create("stillframe-draft", os.MFD_CLOEXEC)
        try:
            for data, at in ((plan.header, 0), (draft, len(plan.header))):
                written = 0
                while written < len(data):
                    written += os.pwrite(fd, memoryview(data)[written:], at + written)
            job.keeper.send(
                messages.Begin(
                    save=save.number, step=save.step, attempt=save.attempt, requested_s=save.times.requested_s,
                    header_bytes=len(plan.header), draft_bytes=len(draft), data_bytes=plan.data_bytes,
                    layout=plan.layout, lazy=plan.lazy,
                    telemetry=messages.Telemetry(
                        save.times.returned_s, save.times.stage_begin_s, self._updates.take()
                    ),
                    complete_step=self._others.complete_step() if self._others else -1, label=job.label,
                ),
                fd,
            )  # fmt: skip
        finally:
            os.close(fd)
        for device, mark in job.captured.marks:
            device.begin(mark)

    def _copy_chunks(self, job: _Job, spans: list[int]) -> None:
        """Issue every chunk; hand each on when it has arrived.  ``spans`` are those not yet handed on."""
        assert self.arena is not None
        ahead = min(_AHEAD, self.arena.spans - 1)
        filled: deque[_Filled] = deque()
        for number in range(len(job.plan.chunks)):
            while filled and (len(filled) >= ahead or not filled[0].tickets):
                self._hand_over(job, filled.popleft(), spans)
            filled.append(self._issue(job, number, spans))
        job.tickets = [(device, ticket) for device in job.plan.devices if (ticket := device.ticket()) is not None]
        job.issued.set()
        while filled:
            self._hand_over(job, filled.popleft(), spans)

    def _issue(self, job: _Job, number: int, spans: list[int]) -> _Filled:
        assert self.arena is not None
        chunk = job.plan.chunks[number]
        span = self.arena.take(lambda: job.save.error is not None)
        if span is None:
            raise job.save.error or KeeperError("the save was given up")
        spans.append(span)
        memory = self._span(span, chunk.nbytes)
        used: dict[Device, None] = {}
        for copy in chunk.copies:
            sources = copy.sources
            if copy.captured is not None:
                sources = [job.captured.memory[copy.device][copy.captured : copy.captured + copy.nbytes]]
            copy.device.copy(sources, memory[copy.offset : copy.offset + copy.nbytes])
            used[copy.device] = None
        tickets = [ticket for device in used if (ticket := device.ticket()) is not None]
        return _Filled(number, span, chunk.nbytes, tickets)

    def _hand_over(self, job: _Job, filled: _Filled, spans: list[int]) -> None:
        """Wait for the copy and send the chunk.  The span belongs to the keeper until it gives it back, or dies."""
        assert self.arena is not None
        assert job.keeper is not None
        for ticket in filled.tickets:
            ticket.wait()
        if job.audit is not None:
            job.audit.check_copy(filled.chunk, self._span(filled.span, filled.nbytes))
        job.keeper.send(messages.Chunk(job.save.number, filled.chunk, filled.span, filled.nbytes))
        self.arena.hand_over(filled.span)
        spans.remove(filled.span)
        if job.keeper.is_gone:  # it may have died before the span counted as its own
            self.arena.give_back(filled.span)
        self._saves.staging(job.save, filled.nbytes)

    def _span(self, span: int, nbytes: int) -> torch.Tensor:
        assert self._memory is not None
        return self._memory[span * CHUNK_BYTES : span * CHUNK_BYTES + nbytes]

    def _staged(self, job: _Job) -> None:
        assert job.keeper is not None
        if job.save.error is not None:  # given up meanwhile: it must not be committed after all
            raise job.save.error
        at_s = time.monotonic()
        job.keeper.send(messages.Staged(job.save.number, at_s))
        self._saves.staged(job.save, at_s)  # only now: who sees "staged" may rely on the keeper knowing
        self._over(job)

    def _fail(self, job: _Job, problem: Exception, spans: list[int]) -> None:
        """Fail this save.  Its spans are free again when no copy can still be writing to them."""
        job.issued.set()
        error = problem
        if not isinstance(error, StillframeError):
            error = StateError(f"staging step {job.save.step} failed: {type(problem).__name__}: {problem}")
            error.__cause__ = problem
        if isinstance(problem, KeeperError) and job.keeper is not None:
            job.keeper.join(_OBITUARY_S)  # until its death is dealt with: it must not fail what is saved from now on
        for device in job.plan.devices:
            ticket = device.ticket()
            if ticket is not None:
                ticket.wait()
        if self.arena is not None:
            for span in spans:
                self.arena.give_back(span)
        if job.keeper is not None and not job.keeper.is_gone:
            with contextlib.suppress(KeeperError):
                save = job.save
                job.keeper.send(messages.Abandon(save.number, save.step, save.attempt, *to_record(error)))
        failed = self._saves.fail(job.save.number, error)
        self._over(job)
        self._saves.tell_failed(failed)

    def _over(self, job: _Job) -> None:
        job.captured.memory.clear()
        job.is_over = True
