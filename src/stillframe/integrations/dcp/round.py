"""One save of DCP on one rank, lazy or not, and how the coordinator's ticket comes to it.

For each save DCP gathers the ranks' plans, and scatters a plan to each.  Plan caching then replaces that plan by an
earlier one, and with it everything that it carried.  But what is scattered is unpickled on every rank, on the thread
that makes the save, right before: there the admission arrives, whatever becomes of the plan.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import os
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager

from stillframe import Save, spi
from stillframe.errors import ConfigError, StateError
from stillframe.open_roots import Admission, close_root, fence
from stillframe.state.torch_internals import frame_of_dcp, has_left

_rounds: dict[Round, FrameType | None] = {}
"""Those that DCP has begun and may leave, each with its frame of DCP's: until they have ended."""
_under_way: set[threading.Event] = set()
"""An event for each lazy save, set at its end."""
_update_gate = functools.cache(lambda: spi.UpdateGate(fence))  # from the first lazy save on: it hooks into optimizers


class Round:
    """One save of DCP on this rank.  Thread: DCP's, which makes it from the beginning to the end.

    DCP tells a writer nothing when the save fails elsewhere.  So whoever comes next ends a round that was left, and it
    ends with its thread, or when that begins another save.  Rank 0 gives the save up then, for all ranks.
    """

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.step = step
        self.versions: spi.Versions | None = None
        """Of what must not have changed before the save is requested."""
        self.rank: int | None = None
        """This one's in DCP's group; ``None`` until DCP sets its writer up."""
        self.path = ""
        """Of the root: a writer may be given another for the next save before this one has ended."""
        self.lets_go = False
        """Whether the root is closed when DCP is done with it: a process that DCP has made may be idle for ever."""
        self.admission: Admission | None = None
        self.save: Save | None = None
        self.using = contextlib.ExitStack()
        """The root, as long as this save needs it."""
        self._home = os.getpid()

    def requested(self, save: Save) -> None:
        """The writer has requested the save.  Blocks until this rank has written it; raises if it will not."""
        self.save = save
        save.wait("sealed")

    def end(self, error: BaseException | None = None) -> None:
        """It has come to its end on this rank; with an ``error``, before it was made.  May be called again."""
        if not self.lets_go:
            _rounds.pop(self, None)  # and with it the frame, which holds the state
        with contextlib.suppress(Exception):  # the others cannot be informed, and wait for their deadline
            self.using.pop_all().__exit__(None if error is None else type(error), error, None)

    def ended(self) -> None:
        """DCP is through with it.  May be called again."""
        _rounds.pop(self, None)
        if self._home == os.getpid():  # in a forked child all threads but one have gone, and the saves are its parent's
            self.end(StateError("DCP ended the save before it was written; its error or upload_completion says why"))


class Staging(Round, Future[dict[str, Any]]):
    """A lazy one, as the future that DCP wants from a stager: it is told of the copy, done or failed.

    DCP asks for the ``result`` at once, on its own thread, and gets the live state: that is safe, because updates are
    held back until the copy is done.

    If DCP fails before it calls the writer, nothing says so but the end of its thread, or, if it never took the state,
    the end of this object.  Either calls :meth:`ended`; else the next update would wait forever.
    """

    def __init__(self, gate: spi.UpdateGate, live: dict[str, Any], step: int | None) -> None:
        super().__init__(step)
        self._live, self.versions = live, spi.versions_of(dict(live))
        self._before, self._over = list(_under_way), threading.Event()
        _under_way.add(self._over)
        self._release = gate.hold(
            "dcp.async_save is still planning; if it shares a process group with training, both may hang: give it one "
            "of its own, process_group=dist.new_group(backend='gloo')"
        )

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The live state; blocks until the saves before have ended.  Once the copy is over, ``{}`` or its error."""
        if super().done():
            return super().result(timeout)
        if current.round is not self:
            current.begin(self)  # DCP saves it on this thread
        for each in self._before:
            each.wait()
        return self._live

    def done(self) -> bool:
        """Always False: DCP would take True for success.  It learns the outcome from a callback."""
        return False

    def requested(self, save: Save) -> None:
        self._release()  # from here on the fence of its root knows of the save
        save.wait("staged")
        self.set_result({})
        super().requested(save)

    def end(self, error: BaseException | None = None) -> None:
        self._release()
        if error is not None:
            told = error if isinstance(error, Exception) else StateError(repr(error))  # others would end DCP's callback
            with contextlib.suppress(InvalidStateError):  # it is copied, or another thread has said so
                self.set_exception(told)
        super().end(error)

    def ended(self) -> None:
        super().ended()
        _under_way.discard(self._over)
        self._over.set()

    def __del__(self) -> None:
        if hasattr(self, "_release"):
            self.ended()


class Stager(AsyncStager):
    """For ``dcp.async_save(…, storage_writer=writer, async_stager=stager)``, in its default mode (a thread).

    The state is copied while training goes on; every optimizer's update waits for that.  ``staging_completion`` is the
    end of the copy, ``upload_completion`` the commit; both tell of failure.  What no live parameter or optimizer owns,
    buffers for one, is copied at once.

    A save that comes before the one before is committed waits for it, in its own thread (DCP's planning is a
    collective), and with it the next update: save less often, or wait for ``upload_completion`` where it suits.  For
    the same reason all ranks begin their lazy saves in the same order, also those to several roots.

    Make one and use it for every save: it remembers whose memory the state is, and reuses its copies.
    """

    _synchronize_after_execute = False

    def __init__(self, writer: Any) -> None:
        self._writer, self._live = writer, spi.LiveState()

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        gate = _update_gate()
        gate.wait()
        fence()  # the copies of the state before have been copied away
        return Staging(gate, LiveDict(self._live.state(state_dict)), self._writer.step)

    def close(self) -> None:
        """Nothing to do: the fence synchronizes, and the copies go with this object."""

    synchronize_staging = close


class LiveDict(dict[str, Any]):
    """A state dict of live memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "stillframe's Stager hands over live memory, which cannot go to another process: use "
            "AsyncCheckpointerType.THREAD, or one of DCP's own stagers"
        )


class _Here(threading.local):
    """What belongs to this thread."""

    round = Round()  # of no save
    reset: tuple[Any, str] = None, ""
    """The writer that DCP is about to save with, and the root."""

    def begin(self, found: Round) -> Round:
        """The round before has ended now; this one has when the thread ends or begins another."""
        self.round, self._life = found, threading.Event()  # any object: a traceback may keep the round itself alive
        weakref.finalize(self._life, found.ended).atexit = False
        return found


current = _Here()


def begin_round(rank: int, step: int | None, path: str, lets_go: bool) -> None:
    """DCP sets its writer up on this thread: for the lazy save that it has taken up here, or for one of its own."""
    found = current.round
    if not isinstance(found, Staging) or found.rank is not None or Future.done(found):
        found = current.begin(Round(step))
    end_left_rounds()
    found.rank, found.path, found.lets_go = rank, path, lets_go
    _rounds[found] = frame_of_dcp()


def end_left_rounds() -> None:
    """Give up the saves that DCP has left before their end, on whatever thread.

    Blocks, if a root is to be closed, until its saves are committed or have failed.
    """
    for each, frame in _rounds.copy().items():
        if has_left(frame):  # DCP has ended the save without a word
            each.ended()
            if each.lets_go and each.admission is not None:
                close_root(each.admission.path)


def _returned(result: Any) -> Any:
    """DCP's own process sends the end of a save to the trainer, and may be idle for ever then: nothing else says so."""
    end_left_rounds()
    return result.__reduce_ex__(2)


for _kind in (Metadata, CheckpointException):
    copyreg.pickle(_kind, _returned)


class Carried(NamedTuple):
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
