"""The lazy way through ``dcp.async_save``: nothing is copied before it returns, and the update waits for the copy.

DCP's thread takes the staged state, plans (a collective), and only then calls the writer, which requests the save.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from stillframe import Save, spi
from stillframe.errors import ConfigError, StateError
from stillframe.integrations.dcp.round import begin_lazily
from stillframe.open_roots import fence

_gate: spi.UpdateGate | None = None
_under_way: set[threading.Event] = set()
"""An event for each lazy save, set at its end."""


class Stager:
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
        self._writer = writer
        self._live = spi.LiveState()

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        gate = _update_gate()
        gate.wait()
        fence()  # the copies of the state before have been copied away
        return Staging(gate, LiveDict(self._live.state(state_dict)), self._writer.step)

    def synchronize_staging(self) -> None:
        """Nothing to do: the fence synchronizes."""

    def close(self) -> None:
        """Nothing to do: the copies go with this object."""


def _update_gate() -> spi.UpdateGate:
    global _gate
    if _gate is None or not _gate.is_ours:
        _gate = spi.UpdateGate(fence)
    return _gate


class LiveDict(dict[str, Any]):
    """A state dict of live memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "stillframe's Stager hands over live memory, which cannot go to another process: use "
            "AsyncCheckpointerType.THREAD, or one of DCP's own stagers"
        )


class Staging(Future[dict[str, Any]]):
    """One lazy save, as the future that DCP wants from a stager: it is told of the copy, done or failed.

    DCP asks for the ``result`` at once, on its own thread, and gets the live state: that is safe, because updates are
    held back until the copy is done.

    If DCP fails before it calls the writer, nothing says so but the end of its thread, or, if it never took the state,
    the end of this object.  Either calls :meth:`ended`; else the next update would wait forever.
    """

    def __init__(self, gate: spi.UpdateGate, live: LiveDict, step: int | None) -> None:
        super().__init__()
        self.step = step
        self._live = live
        self.versions = spi.versions_of(dict(live))
        """From now on nothing may change, though the save is requested later."""
        self._before = list(_under_way)
        self._ended = threading.Event()
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
        begin_lazily(self)
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
