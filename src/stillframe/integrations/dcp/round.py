"""How the coordinator's ticket comes to every rank: with the plan that DCP scatters.

For each save DCP gathers the ranks' plans, and scatters a plan to each.  Plan caching then replaces that plan by an
earlier one, and with it everything that it carried.  But what is scattered is unpickled on every rank, on the thread
that makes the save, right before: there the admission arrives, whatever becomes of the plan.
"""

from __future__ import annotations

import contextlib
import copyreg
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from stillframe import Save
from stillframe.errors import StateError, StillframeError
from stillframe.open_roots import Admission, How, OpenRoot, admitting, close_root
from stillframe.state.torch_internals import frame_of_dcp, is_in_frame

if TYPE_CHECKING:
    from stillframe.integrations.dcp.stager import Staging

_rounds: weakref.WeakSet[Round] = weakref.WeakSet()
_looking = threading.RLock()  # of a set that changes while it is looked through
_ending = threading.RLock()  # a round may end wherever garbage is collected


class Round:
    """One save of DCP on this rank.  Thread: DCP's, which makes it from the beginning to the end.

    DCP tells a writer nothing when the save fails elsewhere.  So whoever comes next ends a round that was left, and it
    ends with its thread, or when that begins another save.  Rank 0 gives the save up then, for all ranks.
    """

    def __init__(self, staging: Staging | None = None) -> None:
        self.staging = staging
        self.admission: Admission | None = None
        self.save: Save | None = None
        self.is_begun = False
        self._using = contextlib.ExitStack()
        self._is_over = False
        self._thread = threading.get_ident()

    def begin(self, how: How, rank: int, lets_go: bool) -> None:
        """DCP sets its writer up.  ``rank``: this one's in DCP's group."""
        self._how, self._rank, self._lets_go = how, rank, lets_go
        self._frame = frame_of_dcp()
        self.is_begun = True
        with _looking:
            _rounds.add(self)

    def __del__(self) -> None:
        if _ending is None:  # the interpreter ends, and has taken this module apart
            return
        if self.staging is not None:
            self.staging.ended()
        self.end(_left())

    @property
    def is_left(self) -> bool:
        """DCP has ended the save without a word: the thread is not in it any more.  If in doubt, it is."""
        return self._frame is not None and not is_in_frame(self._thread, self._frame)

    def admit(self, root: str, world_size: int, step: int | None) -> list[Admission]:
        """On the coordinator: the admissions of all ranks; the root is used from now on.  Blocks, raises.

        The coordinator begins the run, so it is the first of its ranks, whichever it is of DCP's.
        """
        step = step if self.staging is None else self.staging.step
        first = self.admission = self._using.enter_context(admitting(root, world_size, self._how, step=step))
        return [first.of((rank - self._rank) % world_size) for rank in range(world_size)]

    def enter(self, root: str) -> tuple[OpenRoot, Admission]:
        """The root, open until the round is over.

        Raises: :class:`StateError` if DCP has brought no admission; :class:`ConfigError`; :class:`BusyError`.
        """
        if self.admission is None:
            raise StateError(
                "DCP called write_data without the plan that prepare_global_plan made, or on another thread: "
                "stillframe needs both to tell this save from others"
            )
        return self._using.enter_context(self.admission.enter(root, self._how)), self.admission

    def end(self, error: BaseException | None = None) -> None:
        """It has come to its end on this rank; with an ``error``, before it was made.  May be called again."""
        with _ending:
            if self._is_over:
                return
            self._is_over = True
        if error is not None and self.staging is not None:
            self.staging.failed(error)
        with contextlib.suppress(Exception):  # the others cannot be informed, and wait for their deadline
            if error is None:
                self._using.close()
            else:
                self._using.__exit__(type(error), error, error.__traceback__)

    def let_go(self) -> None:
        """Close the root, if that was wanted.  Blocks until its saves are committed or have failed."""
        if self._lets_go and self.admission is not None:
            with contextlib.suppress(StillframeError):  # it is told to who waits for the save
                close_root(self.admission.path)


class _Here(threading.local):
    round: Round | None = None


_thread = _Here()


def begin_lazily(staging: Staging) -> None:
    """DCP has taken a staged state, on this thread, to save it."""
    _thread.round = Round(staging)


def begin_round(how: How, *, rank: int, lets_go: bool) -> None:
    """A save of DCP begins on this thread.  ``lets_go``: the root is closed when DCP is done with it."""
    found = _thread.round
    if found is None or found.is_begun or (found.staging is not None and found.staging.is_over):
        found = _thread.round = Round()
    end_left_rounds()
    found.begin(how, rank, lets_go)


def end_left_rounds() -> None:
    """Give up the saves that DCP has left before their end, on whatever thread."""
    with _looking:
        left = [each for each in _rounds if each.is_left]
    for each in left:
        each.end(_left())
        each.let_go()


def _returned(result: Any) -> Any:
    """DCP's own process sends the end of a save to the trainer, and may be idle for ever then: nothing else says so."""
    end_left_rounds()
    return result.__reduce_ex__(2)


for _kind in (Metadata, CheckpointException):
    copyreg.pickle(_kind, _returned)


def this_round() -> Round:
    """The one of this thread.  Raises :class:`StateError`."""
    if _thread.round is None or not _thread.round.is_begun:
        raise StateError("DCP has begun no save on this thread: set_up_storage_writer comes first")
    return _thread.round


def _left() -> StateError:
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

    def __deepcopy__(self, memo: Any) -> Carried:
        return self


def _arrive(admission: Admission) -> Carried:
    """Called when a plan is unpickled.  The first that comes in a round is the one: others are of plans that somebody
    has kept."""
    found = _thread.round
    if found is not None and found.is_begun and found.admission is None:
        found.admission = admission
    return Carried(admission)
