"""The arena as the stager fills it: chunk by chunk into spans, each handed to the keeper when its copy has arrived.

All chunks for which the arena has spans are issued at once, and only a full arena holds up the next.  A span is used
again only when no copy can still be writing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from stillframe.errors import KeeperError
from stillframe.latch import LOOK_S
from stillframe.link import messages
from stillframe.link.arena import Arena
from stillframe.model import CHUNK_BYTES
from stillframe.save.arrivals import Filled, Pace
from stillframe.save.device import Device, HostDevice, Ticket
from stillframe.save.job import Job
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.pinning import pin
from stillframe.save.saves import Saves

_HOST = HostDevice()


class Spans:
    """Thread: :meth:`hand_over` and :meth:`give_back` on that of the arrivals, the others on the stager's."""

    def __init__(self, arena: Arena, saves: Saves, pace: Pace | None = None) -> None:
        self._arena = arena
        self._saves = saves
        self._pace = pace
        self._memory: tuple[torch.Tensor, ...] = torch.frombuffer(arena.memory, dtype=torch.uint8).split(CHUNK_BYTES)

    def adopt(self, devices: Iterable[Device]) -> None:
        pin(self._arena, devices)

    def issue(self, job: Job, put: Callable[[Job, Filled], None]) -> None:
        """Issue every chunk.  Blocks while the arena is full; raises."""
        if self._pace is not None:
            _wait_for_copies(job)  # of the compute before them: else all would be copied at once when that is done
        for number in range(len(job.plan.chunks)):
            put(job, self._issue(job, number))
        job.tickets = [(device, ticket) for device in job.devices if (ticket := device.ticket()) is not None]
        job.issued.unlock()

    def _issue(self, job: Job, number: int) -> Filled:
        chunk = job.plan.chunks[number]
        span = self._arena.take(lambda: job.save.error is not None, job)
        if span is None:
            raise job.save.error or KeeperError("the save was given up")
        job.spans.add(span)
        memory = self._bytes(span, chunk.nbytes)
        used: dict[Device, None] = {}
        late: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for copy in chunk.copies:
            into = memory if copy.nbytes == chunk.nbytes else memory[copy.offset : copy.offset + copy.nbytes]
            used[copy.device] = None
            if copy.captured is None:
                sources = job.captured.sources.rows(copy.sources)
            else:
                gathered = job.captured.memory[copy.device]
                sources = gathered.rows(copy.captured, copy.nbytes)
                if gathered.is_late:
                    late.append((sources, into))
                    continue
            if self._pace is not None and not copy.device.is_host:
                self._pace.wait(copy.nbytes, LOOK_S, lambda: job.save.error is not None)
            copy.device.copy(sources, into)
        tickets = {device: ticket for device in used if (ticket := device.ticket()) is not None}
        return Filled(number, span, chunk.nbytes, tickets, late)

    def hand_over(self, job: Job, batch: list[Filled]) -> None:
        """Wait for the copies and send the chunks.  A span belongs to the keeper until it gives it back, or dies."""
        assert job.keeper is not None
        tickets: dict[Device, Ticket] = {}
        for filled in batch:
            tickets |= filled.tickets  # of each device the last: its copies are made in order
        for ticket in tickets.values():
            ticket.wait()
        for filled in batch:
            for sources, into in filled.late:
                _HOST.copy(sources, into)
            if filled.chunk == len(job.plan.chunks) - 1:
                job.arrived.unlock()
            if job.audit is not None:
                job.audit.check_copy(filled.chunk, self._bytes(filled.span, filled.nbytes))
            self._send(job, job.keeper, filled)
            self._saves.staging(job.save, filled.nbytes)

    def _send(self, job: Job, keeper: KeeperProcess, filled: Filled) -> None:
        """The span is the keeper's before the keeper knows: it may give it back at once, for the stager to take."""
        self._arena.hand_over(filled.span, job, keeper)
        job.spans.discard(filled.span)
        is_sent = False
        try:
            keeper.send(messages.Chunk(job.save.number, filled.chunk, filled.span, filled.nbytes))
            is_sent = True
        finally:
            if keeper.is_gone or not is_sent:  # it may have died before the span counted as its own
                self._arena.give_back(filled.span, keeper)

    def give_back(self, job: Job) -> bool:
        """Free the spans of a save that failed, when no copy can still be writing to them.  Blocks.

        If nobody can tell, because the device is dead, they are used no more.  Tells whether they are free.
        """
        try:
            _wait_for_copies(job)
            for span in tuple(job.spans):
                self._arena.give_back(span, job)
        except BaseException:
            self._arena.retire(tuple(job.spans), job)
            return False
        return True

    def _bytes(self, span: int, nbytes: int) -> torch.Tensor:
        return self._memory[span] if nbytes == CHUNK_BYTES else self._memory[span][:nbytes]


def _wait_for_copies(job: Job) -> None:
    """Of the devices of this save; those that are issued so far.  Raises what the devices raise."""
    for device in job.devices:
        ticket = device.ticket()
        if ticket is not None:
            ticket.wait()
