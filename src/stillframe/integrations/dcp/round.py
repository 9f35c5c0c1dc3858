"""How the coordinator's ticket comes to every rank: with the plan that DCP scatters.

For each save DCP gathers the ranks' plans, and scatters a plan to each.  Plan caching then replaces that plan by an
earlier one, and with it everything that it carried.  But what is scattered is unpickled on every rank, on the thread
that makes the save, right before: there the admission arrives, whatever becomes of the plan.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from stillframe import Save
from stillframe.errors import StateError
from stillframe.integrations.dcp.stager import Staging, take_staging
from stillframe.integrations.open_roots import Admission, OpenRoot

_thread = threading.local()
_untold: list[Admission] = []
"""Given up on this rank, where nothing was open through which the others could be told."""


class Round:
    """One save of DCP on this rank.  Thread: DCP's, which makes it from the beginning to the end."""

    def __init__(self) -> None:
        self.staging: Staging | None = take_staging()
        self.admission: Admission | None = None
        self.save: Save | None = None
        self._using = contextlib.ExitStack()
        self._is_over = False

    def enter(self, root: str, keep: Any) -> OpenRoot:
        """The root, open until the round is over.

        Raises: :class:`StateError` if DCP has brought no admission; :class:`ConfigError`; :class:`BusyError`.
        """
        if self.admission is None:
            raise StateError(
                "DCP called write_data without the plan that prepare_global_plan made, or on another thread: "
                "stillframe needs both to tell this save from others"
            )
        return self._using.enter_context(self.admission.enter(root, keep=keep))

    def over(self) -> None:
        """It has come to its end on this rank."""
        self._is_over = True
        self._using.close()

    def give_up(self, error: BaseException) -> None:
        """DCP has ended it on this rank before its end.  May be called again."""
        if self._is_over:
            return
        self.over()
        if self.admission is not None and (self.save is None or self.admission.rank == 0):
            with contextlib.suppress(Exception):  # then the others wait for their deadline
                if not self.admission.withdraw(error, may_join=False):
                    _untold.append(self.admission)

    def __del__(self) -> None:
        """The thread has ended, or has begun the next round."""
        if hasattr(self, "_is_over"):
            self.give_up(_ended())


def begin_round() -> Round:
    """A save of DCP begins on this thread."""
    end_round()
    _thread.round = Round()
    return this_round()


def end_round() -> None:
    """If DCP has left a save of this thread before its end, it is given up, and the other ranks are told."""
    before: Round | None = getattr(_thread, "round", None)
    if before is not None:
        before.give_up(_ended())
        _thread.round = None
    with contextlib.suppress(IndexError):
        while True:
            admission = _untold.pop()
            with contextlib.suppress(Exception):
                admission.withdraw(_ended(), may_join=True)


def this_round() -> Round:
    """The one of this thread.  Raises :class:`StateError`."""
    found: Round | None = getattr(_thread, "round", None)
    if found is None:
        raise StateError("DCP has begun no save on this thread: set_up_storage_writer comes first")
    return found


def _ended() -> StateError:
    return StateError("torch.distributed.checkpoint ended the save before it was written here")


class Carried:
    """An admission on its way, in a plan."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def __reduce__(self) -> Any:
        return _arrive, (self._admission,)

    def __copy__(self) -> Carried:
        return self

    def __deepcopy__(self, memo: Any) -> Carried:
        return self


def _arrive(admission: Admission) -> Carried:
    """Called when a plan is unpickled.  The first that comes in a round is the one: others are of plans that somebody
    has kept."""
    found: Round | None = getattr(_thread, "round", None)
    if found is not None and found.admission is None:
        found.admission = admission
    return Carried(admission)
