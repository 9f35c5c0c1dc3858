"""How the coordinator's ticket comes to every rank: with the plan that DCP scatters.

For each save DCP gathers the ranks' plans, and scatters a plan to each.  Plan caching then replaces that plan by an
earlier one, and with it everything that it carried.  But what is scattered is unpickled on every rank, on the thread
that makes the save, right before: there the admission arrives, whatever becomes of the plan.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

from stillframe import Save
from stillframe.errors import StateError, StillframeError
from stillframe.integrations.dcp.stager import Staging, take_staging
from stillframe.integrations.open_roots import Admission, How, OpenRoot, admitting, close_root
from stillframe.state.torch_internals import frame_of_dcp, is_in_frame

_thread = threading.local()
_rounds: weakref.WeakSet[Round] = weakref.WeakSet()
_ending = threading.RLock()
_untold: list[tuple[Admission, How]] = []
"""Given up on this rank, where nothing was open through which the others could be told."""


class Round:
    """One save of DCP on this rank.  Thread: DCP's, which makes it from the beginning to the end."""

    def __init__(self, how: How, lets_go: bool) -> None:
        self._how = how
        self._lets_go = lets_go
        self.staging: Staging | None = take_staging()
        self.admission: Admission | None = None
        self.save: Save | None = None
        self._using = contextlib.ExitStack()
        self._is_over = False
        self._thread = threading.get_ident()
        self._frame = frame_of_dcp()
        _rounds.add(self)

    @property
    def is_left(self) -> bool:
        """DCP has ended the save without a word: the thread is not in it any more.  If in doubt, it is."""
        return self._frame is not None and not is_in_frame(self._thread, self._frame)

    def admit(self, root: str, world_size: int, step: int | None) -> list[Admission]:
        """On the coordinator: the admissions of all ranks; the root is used from now on.  Blocks, raises."""
        step = step if self.staging is None else self.staging.step
        admissions = self._using.enter_context(admitting(root, world_size, self._how, step=step))
        self.admission = admissions[0]
        return admissions

    def enter(self, root: str) -> OpenRoot:
        """The root, open until the round is over.

        Raises: :class:`StateError` if DCP has brought no admission; :class:`ConfigError`; :class:`BusyError`.
        """
        if self.admission is None:
            raise StateError(
                "DCP called write_data without the plan that prepare_global_plan made, or on another thread: "
                "stillframe needs both to tell this save from others"
            )
        return self._using.enter_context(self.admission.enter(root, self._how))

    def over(self) -> None:
        """It has come to its end on this rank."""
        self._is_over = True
        self._using.close()
        self._let_go()

    def give_up(self, error: BaseException) -> None:
        """DCP has ended it on this rank before its end.  May be called again."""
        with _ending:
            if self._is_over:
                return
            self._is_over = True
        self._using.close()
        if self.admission is not None and (self.save is None or self.admission.rank == 0):
            with contextlib.suppress(Exception):  # then the others wait for their deadline
                if not self.admission.withdraw(error):
                    _untold.append((self.admission, self._how))
        self._let_go()

    def _let_go(self) -> None:
        if self._lets_go and self.admission is not None:
            with contextlib.suppress(StillframeError):  # it is told to who waits for the save
                close_root(self.admission.root)

    def __del__(self) -> None:
        """The thread has ended, or has begun the next round."""
        if hasattr(self, "_is_over"):
            self.give_up(_ended())


def begin_round(how: How, *, lets_go: bool) -> None:
    """A save of DCP begins on this thread.  ``lets_go``: the root is closed at its end."""
    end_round()
    end_left_rounds()
    _thread.round = Round(how, lets_go)


def end_round() -> None:
    """If DCP has left a save of this thread before its end, it is given up, and the other ranks are told."""
    before: Round | None = getattr(_thread, "round", None)
    if before is not None:
        before.give_up(_ended())
        _thread.round = None
    with contextlib.suppress(IndexError):
        while True:
            admission, how = _untold.pop()
            with contextlib.suppress(Exception):
                admission.withdraw(_ended(), how)


def end_left_rounds() -> None:
    """As :func:`end_round`, for saves that DCP has left on other threads."""
    for each in list(_rounds):
        if each.is_left:
            each.give_up(_ended())


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

    @property
    def prefix(self) -> str:
        """What DCP's own writer looks for, if it gets the plan from DCP's cache."""
        return f"__{self._admission.rank}_"

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
