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
from stillframe.format.records import SealDraft
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES, Label
from stillframe.save.audit import Audit
from stillframe.save.device import Device, Ticket
from stillframe.save.keeper_client import Keepers
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.plan import Plan
from stillframe.save.saves import Ledger, Save

logger = logging.getLogger("stillframe")

_HANG_UP_S = 5.0
_OBITUARY_S = 1.0
_TELL_S = 10.0
"""After so long, a wait for a hold is mentioned."""
_MAX_UPDATES = 256
"""Between two saves; they go in one packet."""
_AHEAD = 4
"""Chunks whose copies may be queued on an accelerator before the first of them is waited for."""


@dataclass(slots=True)
class Job:
    """One save, as the training thread hands it over."""

    save: Save
    plan: Plan
    draft: SealDraft
    captured: dict[Device, torch.Tensor]
    marks: list[tuple[Device, Any]]
    audit: Audit | None
    label: Label | None = None
    keeper: KeeperProcess | None = None
    tickets: list[tuple[Device, Ticket]] = field(default_factory=list)
    issued: threading.Event = field(default_factory=threading.Event)
    is_over: bool = False
    """Staged or failed: no fence needs to look at it any more."""


@dataclass(frozen=True, slots=True)
class _Filled:
    chunk: int
    span: int
    nbytes: int
    tickets: list[Ticket]


class Stager:
    """``make_arena(state_bytes)`` is called once, on this thread, when the first save needs it."""

    def __init__(
        self,
        ledger: Ledger,
        keepers: Keepers,
        make_arena: Callable[[int], Arena],
        arena: Arena | None,
        on_failure: Callable[[list[Save]], None],
        complete_step: Callable[[], int],
    ) -> None:
        self._complete_step = complete_step
        self._ledger = ledger
        self._keepers = keepers
        self._make_arena = make_arena
        self._on_failure = on_failure
        self.arena = arena
        self._memory: torch.Tensor | None = None
        self._adopted: set[Device] = set()
        self._forgetting = threading.RLock()  # a signal handler may save, too
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: deque[Job] = deque()
        self._updates: deque[tuple[float, float]] = deque(maxlen=_MAX_UPDATES)
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MAX_UPDATES)
        self._holds: dict[threading.Event, str] = {}
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="stillframe-stage", daemon=True)
        self._thread.start()

    # --- on the training thread ------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Never blocks."""
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
        began = time.monotonic()
        has_waited = self._wait_for_holds()
        if not self._pending or os.getpid() != self._owner_pid:  # a forked child has no stager to wait for
            self._updates.append((began, time.monotonic() - began if has_waited else 0.0))
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
        (self._waits if has_waited else self._updates).append((began, waited_s))
        self._ledger.fenced(waited_s, has_waited)

    def hold(self, hint: str) -> Callable[[], None]:
        """From now on fences wait, also for the saves requested meanwhile, until the function returned is called."""
        released = threading.Event()
        self._holds[released] = hint

        def release() -> None:
            self._holds.pop(released, None)
            released.set()

        return release

    def _wait_for_holds(self) -> bool:
        """Whether there were any."""
        holds = self._holds.copy() if os.getpid() == self._owner_pid else {}
        for each, hint in holds.items():
            if not each.wait(_TELL_S):
                logger.warning("an update has waited %g s for a save that is not requested yet%s", _TELL_S, hint)
                each.wait()
        return bool(holds)

    def take_updates(self) -> tuple[tuple[float, float], ...]:
        """The updates since this was last asked: when, and how long the fence waited; of those that did not wait, the
        newest only."""
        updates: list[tuple[float, float]] = []
        for each in (self._waits, self._updates):
            with contextlib.suppress(IndexError):
                while True:
                    updates.append(each.popleft())
        return tuple(sorted(updates))

    def _forget_over(self) -> None:
        with self._forgetting:
            while self._pending and self._pending[0].is_over:
                self._pending.popleft()

    def begin_audit(self, audit: Audit, marks: list[tuple[Device, Any]]) -> None:
        """Hash what is to be staged, while the training thread stands still here."""
        self._standing_still(marks, audit.begin)

    def _end_audit(self, job: Job) -> None:
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
        """Let the stager's thread do this behind the compute queued so far; blocks, and raises what it raised."""
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
        """Saves that are not staged yet fail, so that :meth:`stop` need not wait for room in the arena."""
        self._on_failure(self._ledger.fail_unstaged(DeadlineError(f"given up before it was staged: {why}")))
        if self.arena is not None:
            self.arena.wake()

    def stop(self, timeout_s: float | None) -> None:
        """Finish what was submitted and end the thread; past the deadline, hang up on a keeper that does not listen."""
        self._work.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._keepers.hang_up()
            self._thread.join(_HANG_UP_S)
        self._pending.clear()
        self._memory = None

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

    def _stage(self, job: Job) -> None:
        spans: list[int] = []
        self._ledger.stage_begun(job.save)
        try:
            self._begin(job)
            self._copy_chunks(job, spans)
            if job.audit is None:
                self._staged(job)
        except Exception as error:
            self._fail(job, error, spans)
        finally:
            job.issued.set()

    def _begin(self, job: Job) -> None:
        plan, save = job.plan, job.save
        job.keeper = self._keepers.start()
        if self.arena is None:
            self.arena = self._make_arena(plan.data_bytes)
        if self._memory is None:
            self._memory = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        for device in plan.devices:
            if device not in self._adopted:
                self._adopted.add(device)
                device.adopt(self.arena.address, self.arena.nbytes)
        self._keepers.attach(job.keeper, self.arena)
        draft = msgspec.json.encode(job.draft)
        fd = os.memfd_create("stillframe-draft", os.MFD_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(plan.header)
            file.write(draft)
            file.flush()
            job.keeper.send(
                messages.Begin(
                    save=save.number, step=save.step, requested_s=save.times.requested_s,
                    header_bytes=len(plan.header), draft_bytes=len(draft), data_bytes=plan.data_bytes,
                    layout=plan.layout, lazy=plan.lazy, returned_s=save.times.returned_s,
                    stage_begin_s=save.times.stage_begin_s, updates=self.take_updates(),
                    complete_step=self._complete_step(), label=job.label,
                ),
                fd,
            )  # fmt: skip
        for device, mark in job.marks:
            device.begin(mark)

    def _copy_chunks(self, job: Job, spans: list[int]) -> None:
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

    def _issue(self, job: Job, number: int, spans: list[int]) -> _Filled:
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
                sources = [job.captured[copy.device][copy.captured : copy.captured + copy.nbytes]]
            copy.device.copy(sources, memory[copy.offset : copy.offset + copy.nbytes])
            used[copy.device] = None
        tickets = [ticket for device in used if (ticket := device.ticket()) is not None]
        return _Filled(number, span, chunk.nbytes, tickets)

    def _hand_over(self, job: Job, filled: _Filled, spans: list[int]) -> None:
        """The copy is done: the span is the keeper's until it gives it back, or dies."""
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
        self._ledger.staging(job.save, filled.nbytes)

    def _span(self, span: int, nbytes: int) -> torch.Tensor:
        assert self._memory is not None
        return self._memory[span * CHUNK_BYTES : span * CHUNK_BYTES + nbytes]

    def _staged(self, job: Job) -> None:
        assert job.keeper is not None
        if job.save.error is not None:  # given up meanwhile: it must not be committed after all
            raise job.save.error
        at_s = time.monotonic()
        job.keeper.send(messages.Staged(job.save.number, at_s))
        self._ledger.staged(job.save, at_s)  # only now: who sees "staged" may rely on the keeper knowing
        self._over(job)

    def _fail(self, job: Job, problem: Exception, spans: list[int]) -> None:
        """This save ends here; its spans come back when no copy can still be writing to them."""
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
                job.keeper.send(messages.Abandon(job.save.number, job.save.step, *to_record(error)))
        failed = self._ledger.fail(job.save.number, error)
        self._over(job)
        self._on_failure([failed] if failed else [])

    def _over(self, job: Job) -> None:
        job.captured.clear()
        job.is_over = True
