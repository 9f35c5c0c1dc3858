"""One save of DCP on one rank, lazy or not, and how the coordinator's ticket comes to it.

For each save DCP gathers the ranks' plans, and scatters a plan to each.  Plan caching then replaces that plan by an
earlier one, and with it everything that it carried.  But what is scattered is unpickled on every rank, on the thread
that makes the save, right before: there the admission arrives, whatever becomes of the plan.
"""

from __future__ import annotations

import contextlib
import copyreg
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from stillframe import Save, spi
from stillframe.errors import StateError
from stillframe.open_roots import Admission, close_root
from stillframe.state.torch_internals import frame_of_dcp, is_in_frame

_under_way: set[threading.Event] = set()
"""An event for each lazy save, set at its end."""
_rounds: weakref.WeakSet[Round] = weakref.WeakSet()
_LEFT = "torch.distributed.checkpoint ended the save before it was written here"
_looking = threading.RLock()  # of a set that changes while it is looked through


class Staging(Future[dict[str, Any]]):
    """One lazy save, as the future that DCP wants from a stager: it is told of the copy, done or failed.

    DCP asks for the ``result`` at once, on its own thread, and gets the live state: that is safe, because updates are
    held back until the copy is done.

    If DCP fails before it calls the writer, nothing says so but the end of its thread, or, if it never took the state,
    the end of this object.  Either calls :meth:`ended`; else the next update would wait forever.
    """

    def __init__(self, gate: spi.UpdateGate, live: dict[str, Any], step: int | None) -> None:
        super().__init__()
        self.step, self._live = step, live
        self.versions = spi.versions_of(dict(live))
        """From now on nothing may change, though the save is requested later."""
        self._before, self._ended = list(_under_way), threading.Event()
        _under_way.add(self._ended)
        self._release = gate.hold(
            "dcp.async_save is still planning; if it shares a process group with training, both may hang: give it one "
            "of its own, process_group=dist.new_group(backend='gloo')"
        )

    @property
    def is_over(self) -> bool:
        """It is copied, or the copy has failed: updates are not held back any more."""
        return super().done()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The live state; blocks until the saves before have ended.  Once the copy is over, ``{}`` or its error."""
        if self.is_over:
            return super().result(timeout)
        current.round = Round(self)  # DCP saves it on this thread
        for each in self._before:
            each.wait()
        return self._live

    def done(self) -> bool:
        """Always False: DCP would take True for success.  It learns the outcome from a callback."""
        return False

    def requested(self, save: Save) -> None:
        """The writer has requested the save.  Blocks until it is staged; raises if it will not be."""
        self._release()  # from here on the fence of its root knows of the save
        save.wait("staged")
        self.set_result({})

    def failed(self, error: BaseException) -> None:
        self._release()
        if not self.is_over:
            self.set_exception(error)

    def ended(self) -> None:
        """The thread of DCP is over.  May be called again."""
        self.failed(StateError("it ended before anything was copied; upload_completion says why"))
        _under_way.discard(self._ended)
        self._ended.set()

    def __del__(self) -> None:
        if hasattr(self, "_release"):
            self.ended()


class Round:
    """One save of DCP on this rank.  Thread: DCP's, which makes it from the beginning to the end.

    DCP tells a writer nothing when the save fails elsewhere.  So whoever comes next ends a round that was left, and it
    ends with its thread, or when that begins another save.  Rank 0 gives the save up then, for all ranks.
    """

    def __init__(self, staging: Staging | None = None) -> None:
        self.staging = staging
        self.rank: int | None = None
        """This one's in DCP's group; ``None`` until DCP sets its writer up."""
        self.lets_go = False
        """Whether the root is closed when DCP is done with it."""
        self.admission: Admission | None = None
        self.save: Save | None = None
        self.using = contextlib.ExitStack()
        """The root, as long as this save needs it."""
        self.frame: int | None = None
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if StateError is None:  # the interpreter ends, and has taken this module apart
            return
        if self.staging is not None:
            self.staging.ended()
        self.end(StateError(_LEFT))

    @property
    def is_left(self) -> bool:
        """DCP has ended the save without a word: the thread is not in it any more.  If in doubt, it is."""
        return self.frame is not None and not is_in_frame(self._thread, self.frame)

    def end(self, error: BaseException | None = None) -> None:
        """It has come to its end on this rank; with an ``error``, before it was made.  May be called again."""
        if error is not None and self.staging is not None:
            self.staging.failed(error)
        with contextlib.suppress(Exception):  # the others cannot be informed, and wait for their deadline
            self.using.pop_all().__exit__(None if error is None else type(error), error, None)


class _Here(threading.local):
    """What belongs to this thread."""

    def __init__(self) -> None:
        self.round = Round()


current = _Here()


def begin_round(rank: int, lets_go: bool) -> None:
    """DCP sets its writer up on this thread."""
    found = current.round
    if found.rank is not None or (found.staging is not None and found.staging.is_over):
        found = current.round = Round()
    end_left_rounds()
    found.rank, found.lets_go, found.frame = rank, lets_go, frame_of_dcp()
    with _looking:
        _rounds.add(found)


def end_left_rounds() -> None:
    """Give up the saves that DCP has left before their end, on whatever thread.

    Blocks, if a root is to be closed, until its saves are committed or have failed.
    """
    with _looking:
        left = [each for each in _rounds if each.is_left]
    for each in left:
        each.end(StateError(_LEFT))
        if each.lets_go and each.admission is not None:
            close_root(each.admission.path)


def _returned(result: Any) -> Any:
    """DCP's own process sends the end of a save to the trainer, and may be idle for ever then: nothing else says so."""
    end_left_rounds()
    return result.__reduce_ex__(2)


for _kind in (Metadata, CheckpointException):
    copyreg.pickle(_kind, _returned)


@dataclass(frozen=True)
class Carried:
    """An admission on its way, in a plan."""

    admission: Admission

    @property
    def prefix(self) -> str:
        """What DCP's own writer looks for, if it gets the plan from DCP's cache."""
        return f"__{self.admission.rank}_"

    def __reduce__(self) -> Any:
        return _arrive, (self.admission,)

    def __deepcopy__(self, memo: Any) -> Carried:
        return self


def _arrive(admission: Admission) -> Carried:
    """Called when a plan is unpickled.  The first that comes in a round is the one: others are of plans that somebody
    has kept."""
    found = current.round
    if found.rank is not None and found.admission is None:
        found.admission = admission
    return Carried(admission)
