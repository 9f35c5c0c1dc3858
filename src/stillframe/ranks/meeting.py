"""How ranks agree on a step that none of them has passed, while training goes on.

Something happens on one rank (a signal, a clock) that all ranks must act on at the same step.  A collective in every
iteration would cost time, and a rank cannot simply name a step: others may be ahead.  So:

1. any rank calls;
2. a thread of every rank sees the call, and says which step its training thread has passed last;
3. rank 0 answers with the largest of these: the *limit*.

All ranks go through the same steps, so the first one after the limit is the same for all.  The training thread waits
only if it comes to its next step between 2 and 3, and needs no other training thread for that: it cannot deadlock with
a collective.

Where even that is too long, a rank says in 2 how far it goes on meanwhile, by its pace, instead of where it is.  Then
they meet some steps later, and nobody waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from stillframe.errors import DeadlineError
from stillframe.latch import Bell
from stillframe.ranks.group import Group
from stillframe.units import format_ranks

_LOOK_S = 0.5
"""How often a rank looks whether another has called; more seldom where many ranks ask one store."""
_ANSWER_S = 30.0
"""How long a training thread waits for the limit, at most."""


@dataclass(slots=True)
class _Round:
    number: int = 0
    why: str = ""
    """Not empty: it was called, and this rank says how far it goes without an answer: to ``said``."""
    said: int | None = None
    limit: int | None = None
    trouble: str = ""
    """Why there will be no limit."""


class Meeting:
    """``name`` tells the meetings of one run apart.  Every rank makes it.

    ``ahead_s``: the ranks meet about that much later, so that they need not wait for the limit.
    Thread: :meth:`call` from any, and in a signal handler; :meth:`passed` is the training thread's.
    """

    def __init__(self, group: Group, name: str, ahead_s: float = 0.0) -> None:
        self._group = group
        self._name = name
        self._ahead_s = ahead_s
        self._round = _Round()
        self._passed = -1
        self._began: tuple[float, int] | None = None
        """When this rank was first here, and at which step: its pace since then."""
        self._wanted = ""
        self._looked_s = 0.0
        self._bell = Bell()
        if group.world_size > 1:
            group.watch(self._look)

    def call(self, why: str) -> None:
        """Have all ranks meet.  One call more changes nothing."""
        self._wanted = self._wanted or why

    def passed(self, step: int) -> str:
        """At the end of a step, on every rank.  Why they were called, if this is the step at which they meet; or empty.

        Raises: :class:`DeadlineError` if the ranks were called and cannot agree.
        """
        self._passed = step  # first: the other thread says that it was called, and then looks at this
        self._began = self._began or (time.monotonic(), step)
        if self._group.world_size == 1:
            why, self._wanted = self._wanted, ""
            return why
        round_ = self._round
        if not round_.why:
            return ""
        deadline_s = time.monotonic() + min(_ANSWER_S, self._group.deadline_s)
        while round_.limit is None and not round_.trouble:
            if round_.said is not None and step <= round_.said:
                return ""
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                round_.trouble = f"no answer within {min(_ANSWER_S, self._group.deadline_s):g} s{self._who()}"
            self._bell.wait(min(left_s, _LOOK_S))
        if round_.limit is None:
            raise DeadlineError(f"the ranks cannot agree on a step: {round_.trouble}")
        if step <= round_.limit:
            return ""
        self._wanted, self._round = "", _Round(round_.number + 1)
        return round_.why

    @property
    def _has_pace(self) -> bool:
        """Not right at the beginning: there a call waits, rather than training."""
        return not self._ahead_s or (self._began is not None and time.monotonic() - self._began[0] >= self._ahead_s)

    def _ahead(self) -> int:
        """How far this rank goes on without an answer."""
        passed, began = self._passed, self._began  # once: what is said must not be less than what was passed
        if not self._ahead_s or began is None:
            return passed
        pace = (passed - began[1]) / max(time.monotonic() - began[0], 1e-9)
        return passed + max(int(pace * self._ahead_s), 0)

    def _who(self) -> str:
        """Asked only when it is too late: a question for each rank."""
        if self._group.rank != 0:
            return " from rank 0"
        try:
            return f" from {format_ranks(self._group.missing(self._key('at')))}"
        except (RuntimeError, OSError):
            return ""

    def _key(self, what: str) -> str:
        return f"meeting/{self._name}/{self._round.number}/{what}"

    # --- on the thread that talks to the store ---

    def _look(self) -> bool:
        """Whether there is nothing to look for any more."""
        round_ = self._round
        if round_.trouble:
            return True
        now_s = time.monotonic()
        if round_.limit is not None or (not round_.why and not self._wanted and now_s - self._looked_s < _LOOK_S):
            return False  # the training thread has yet to get there; or it is too early
        self._looked_s = now_s
        try:
            self._take_part(round_)
        except (RuntimeError, OSError) as error:
            round_.trouble = f"the store of torch.distributed is gone ({error})"
        if round_.limit is not None or round_.trouble:
            self._bell.ring()
        return bool(round_.trouble)

    def _take_part(self, round_: _Round) -> None:
        group = self._group
        if not round_.why:
            called = group.said(self._key("call"))
            if called is None and self._wanted and self._has_pace:
                called = self._wanted
                group.say(self._key("call"), called)
            if not called:
                return
            round_.why = called  # from here on the training thread waits for the limit, or for leave to go on
            round_.said = self._ahead()
            self._bell.ring()
            group.say(self._key(f"at/{group.rank}/step"), str(round_.said))
            group.count(self._key("at"))  # on the same line, so behind it
        elif group.rank != 0:
            said = group.said(self._key("limit"))
            round_.limit = None if said is None else int(said)
        elif not group.lacking(self._key("at")):
            steps = [int(group.said(self._key(f"at/{rank}/step")) or -1) for rank in range(group.world_size)]
            group.say(self._key("limit"), str(max(steps)))
            round_.limit = max(steps)
