"""Which steps can be saved, and as which attempt."""

from __future__ import annotations

import contextlib

from stillframe.checkpoint.catalog import Catalog
from stillframe.errors import ExistsError, StillframeError
from stillframe.model import SaveId, Ticket
from stillframe.save.saves import Save

_REMEMBERED = 1000


class Taken:
    """A step that somebody has taken; compared by identity, so that who finds another's knows to have come second."""

    def __init__(self, attempt: int, is_begun: bool = True) -> None:
        self.attempt = attempt
        self.is_begun = is_begun
        """Not if only a ticket has been issued for it."""
        self.is_saved = False


class TakenSteps:
    """The steps of the present epoch that have been saved or are being saved, and which attempts are spent.

    An epoch goes on from a checkpoint, and saves later steps than that one, in rising order: after a crash the greatest
    step is restored, and it must be the newest.  A step whose save has failed, or was skipped, does not count.

    Every rank counts the failures that it is told of; ranks that count differently write to different directories, so
    that no commit can mix them.  A ticket spares them the counting: one rank issues it, and every rank saves under it.

    Thread: any.  No lock: a signal handler may save in the middle of a save, and every change here is one operation.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._floor: int | None = None
        """The step that the epoch goes on from, -1 if there is none; ``None``: not looked up yet."""
        self._is_early = False
        """It was looked up before the root was ours: an earlier run may have committed more since."""
        self._greatest = -1
        self._taken: dict[int, Taken] = {}
        """Of those that are saved, the greatest."""
        self._spent: dict[int, int] = {}
        """For a step that is not saved, the greatest attempt that has failed, or that a ticket was issued for."""

    def enter(self, parent: SaveId | None) -> None:
        """Another epoch begins, which goes on from this checkpoint."""
        self._floor, self._is_early = (-1 if parent is None else parent.step), False
        self._greatest = -1
        self._taken, self._spent = {}, {}

    def look(self) -> None:
        """Find out which step is the newest, if that can be told.  Blocks: not for ``save``, which does no I/O.

        What is not known here, the keeper finds out before anything is written.
        """
        self._is_early = True
        with contextlib.suppress(StillframeError):
            self._look_up()

    def leave(self) -> None:
        """Another epoch begins, which goes on from the newest checkpoint."""
        saved = [step for step, each in list(self._taken.items()) if each.is_saved]
        self._floor, self._is_early = max(saved, default=None), False  # of those under way, the keeper finds out
        self._greatest = -1
        self._taken, self._spent = {}, {}

    @property
    def are_free(self) -> bool:
        """Whether no step of the present epoch has been taken."""
        return not self._taken

    def claim(self, step: int) -> Taken:
        """For :meth:`begin`: which attempt at this step the next save of it is.  Nothing is taken yet."""
        return Taken(1 + self._spent.get(step, 0))

    def begin(self, step: int, claim: Taken | None = None) -> int:
        """Take the step.  Returns which attempt at it this is.

        ``claim``: whoever holds it can tell whether this was done, even if it is interrupted: :meth:`has`.
        Raises :class:`ExistsError` if it is a checkpoint, or being saved, or not after the one that this run goes on
        from, or not after all that this run has saved or is saving since.
        """
        mine = claim or self.claim(step)
        self._take(step, mine, -1 if self._floor is None else self._floor)
        return mine.attempt

    def has(self, step: int, claim: Taken) -> bool:
        """Whether the step is taken by this claim."""
        return self._taken.get(step) is claim

    def give_back(self, step: int, attempt: int, has_failed: bool) -> None:
        """It was not saved: it failed, or was skipped."""
        if has_failed:
            self._spent[step] = max(self._spent.get(step, 0), attempt)
        found = self._taken.get(step)
        if found is not None and found.attempt == attempt and not found.is_saved:
            self._taken.pop(step, None)

    def ended(self, save: Save) -> None:
        """A save that was begun is over."""
        if save.error is not None:
            self.give_back(save.step, save.attempt, has_failed=True)
            return
        taken = self._taken.get(save.step)
        if taken is not None and taken.attempt == save.attempt:  # else another epoch or attempt has begun meanwhile
            taken.is_saved = True
            self._spent.pop(save.step, None)
            saved = [step for step, each in list(self._taken.items()) if each.is_saved]
            for step in sorted(saved)[:-_REMEMBERED]:
                self._taken.pop(step, None)

    # --- tickets ---------------------------------------------------------------------------

    def issue(self, step: int | None, least: int = 0) -> Ticket:
        """Take a step (by default the next one, and not below ``least``) for every rank.  On one rank, once it has the
        root.

        Raises :class:`ExistsError` as :meth:`begin` does; :class:`StorageError`.
        """
        floor = self._look_up(again=self._is_early and not self._taken)
        self._is_early = False
        while True:
            wanted = max(floor + 1, self._greatest + 1, least) if step is None else step
            try:
                mine = self.claim(wanted)
                mine.is_begun = False
                self._take(wanted, mine, floor)
            except ExistsError:
                if step is not None:
                    raise
                continue  # another thread has taken it, or a later one, meanwhile
            self._spent[wanted] = mine.attempt
            return Ticket(wanted, mine.attempt)

    def redeem(self, ticket: Ticket) -> None:
        """Begin what a ticket was issued for.  An earlier attempt at the step does not count any more: whoever issued
        this one has given that one up.  Tickets are issued in rising order, and may be redeemed in any.

        Raises :class:`ExistsError` if this rank has redeemed it before, or the step is saved.
        """
        if self._floor is not None:
            self._check_new(ticket.step, self._floor)
        mine = Taken(ticket.attempt)
        found = self._taken.get(ticket.step)
        if found is None and ticket.attempt > self._spent.get(ticket.step, 0):
            found = self._taken.setdefault(ticket.step, mine)
        if found is not None and found.attempt == ticket.attempt and not found.is_begun:
            found.is_begun = True
        elif found is not None and found.attempt < ticket.attempt and not found.is_saved:
            self._taken[ticket.step] = mine
        elif found is not mine:
            raise ExistsError(f"the ticket for step {ticket.step}, attempt {ticket.attempt}, has been used already")
        self._greatest = max(self._greatest, ticket.step)

    def withdraw(self, ticket: Ticket) -> bool:
        """Give it up.  Returns whether this rank had begun to save under it."""
        found = self._taken.get(ticket.step)
        is_begun = found is not None and found.attempt == ticket.attempt and found.is_begun
        self.give_back(ticket.step, ticket.attempt, has_failed=True)
        return is_begun

    # --- inside ----------------------------------------------------------------------------

    def _check_new(self, step: int, floor: int) -> None:
        if step <= floor:
            what = "is already a checkpoint" if step == floor else f"comes before step {floor}, the newest checkpoint"
            raise ExistsError(
                f"step {step} {what} in {self._catalog.root}: restore() first and go on after the step it returns, "
                f"rewind() to an earlier one, or use another root"
            )

    def _take(self, step: int, mine: Taken, floor: int) -> None:
        """Raises :class:`ExistsError` if somebody has it, or a later one."""
        self._check_new(step, floor)
        found = self._taken.setdefault(step, mine)
        newest = max([step, *self._taken])  # only now: of two who come at the same time the later step wins
        self._greatest = max(self._greatest, newest)
        if found is not mine:
            raise ExistsError(f"step {step} {_how_far(found)}: save the next one instead")
        later = self._taken.get(newest)
        if newest > step and later is not None:
            self._taken.pop(step, None)
            raise ExistsError(
                f"step {step} comes before step {newest}, which {_how_far(later)}: after a crash step {newest} would "
                "be restored, and the newer work lost. Save steps in rising order, or rewind() to an earlier one first"
            )

    def _look_up(self, again: bool = False) -> int:
        floor = self._floor
        if floor is None or again:
            newest = self._catalog.newest()
            self._floor = floor = -1 if newest is None else newest.step
        return floor


def _how_far(taken: Taken) -> str:
    return "has been saved in this run already" if taken.is_saved else "is being saved right now"
