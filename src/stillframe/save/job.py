"""One save on its way through the stager."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from stillframe.errors import StateError, StillframeError, text_of
from stillframe.latch import Latch
from stillframe.model import Label
from stillframe.save.audit import Audit
from stillframe.save.capture import Captured
from stillframe.save.device import Device, Ticket
from stillframe.save.keeper_process import KeeperProcess
from stillframe.save.plan import Plan
from stillframe.save.saves import Save


@dataclass(slots=True)
class Job:
    """One save, as the training thread hands it over."""

    save: Save
    captured: Captured
    audit: Audit | None
    label: Label | None
    keeper: KeeperProcess | None = None
    tickets: list[tuple[Device, Ticket]] = field(default_factory=list)
    spans: set[int] = field(default_factory=set)
    """Of the arena; those not yet handed on to the keeper."""
    issued: Latch = field(default_factory=Latch)
    """Every copy is queued, or none is any more."""
    arrived: Latch = field(default_factory=Latch)
    """Every byte is in the arena, or the save has failed."""
    dealt_with: Latch = field(default_factory=Latch)
    """And the keeper has every chunk, or what the save held is given back."""
    is_begun: bool = False
    """The stager's thread has it, or had it."""
    is_ended: bool = False
    """That thread is done with it."""
    has_told: bool = False
    """Whoever must know that it failed."""
    is_over: bool = False
    """Staged or failed: no fence needs to look at it any more."""

    @property
    def plan(self) -> Plan:
        """Until the state is let go of."""
        assert self.captured.plan is not None
        return self.captured.plan

    @property
    def devices(self) -> list[Device]:
        return self.captured.devices

    def release(self) -> None:
        """Keep nothing of the state alive any more.  The save outlives this, and refers to it."""
        self.captured.release()
        self.audit = None

    def let_go(self) -> None:
        """It has failed: nobody waits for it any more."""
        self.is_over = True
        self.issued.unlock()
        self.arrived.unlock()
        self.dealt_with.unlock()


def write_draft(*parts: bytes) -> int:
    """A memfd that holds the header of the segment, the draft of the seal, and what files of the label hold.

    The caller closes it.
    """
    fd = os.memfd_create("stillframe-draft", os.MFD_CLOEXEC)
    try:
        at = 0
        for data in parts:
            rest = memoryview(data)
            while rest:
                count = os.pwrite(fd, rest, at)
                rest, at = rest[count:], at + count
    except BaseException:
        os.close(fd)
        raise
    return fd


def error_of(step: int, problem: BaseException, doing: str = "staging") -> StillframeError:
    if isinstance(problem, StillframeError):
        return problem
    error = StateError(f"{doing} step {step} failed: {type(problem).__name__}: {text_of(problem)}")
    error.__cause__ = problem
    return error


def say(log: Callable[..., None], text: str, *arguments: object) -> None:
    """A log handler that raises must not end the thread, nor cost the news that come after it."""
    with contextlib.suppress(Exception):
        log(text, *arguments)
