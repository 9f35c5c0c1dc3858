"""The lazy way through ``dcp.async_save``: nothing is copied before it returns, and the update waits for the copy.

DCP's thread takes the staged state, plans (a collective), and only then calls the writer, which requests the save.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from stillframe import Save
from stillframe.errors import ConfigError, StateError
from stillframe.integrations.runs import Run, open_run, seat

_thread = threading.local()


class Stager:
    """For ``dcp.async_save(…, storage_writer=writer, async_stager=Stager(writer))``, in its default mode (a thread).

    The state is copied while training goes on; every optimizer's update waits for that.  ``staging_completion`` is the
    end of the copy, ``upload_completion`` the commit; both tell of failure.  What no live parameter or optimizer owns,
    buffers for one, is copied at once.

    A save that comes before the one before is committed waits for it, in its own thread (DCP's planning is a
    collective), and with it the next update: save less often, or wait for ``upload_completion`` where it suits.
    """

    _synchronize_after_execute = False

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        run = open_run(self._writer.path, *seat(), keep=self._writer.keep)
        run.checkpointer.fence()  # the copies of the state before have been copied away
        return Staging(run, Live(run.still.state(state_dict)), self._writer.step)

    def synchronize_staging(self) -> None:
        """Nothing to do: the fence synchronizes."""

    def close(self) -> None:
        """Nothing to do: the copies are the run's."""


class Live(dict[str, Any]):
    """A state dict of live memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "stillframe's Stager hands over live memory, which cannot go to another process: use "
            "AsyncCheckpointerType.THREAD, or one of DCP's own stagers"
        )


class Staging(Future[dict[str, Any]]):
    """Done when everything is copied; but ``result`` gives the state from the beginning, since it stands still.

    If DCP fails before it calls the writer, only the end of its thread tells, or, if it never took the state, the end
    of this object; one of them must, or the next update would wait forever.
    """

    def __init__(self, run: Run, live: Live, step: int | None) -> None:
        super().__init__()
        self.step = run.take_step(step)  # here, on the training thread, all ranks count alike
        self._run = run
        self._live = live
        self._before = list(run.lazy)
        self._ended = threading.Event()
        run.lazy.add(self._ended)
        self._release = run.checkpointer.hold(
            "dcp.async_save is still planning; if it shares a process group with training, both may hang: give it one "
            "of its own, process_group=dist.new_group(backend='gloo')"
        )

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        if self.is_over:
            return super().result(timeout)
        _thread.end = _End(self)
        _thread.staging = self
        for each in self._before:
            each.wait()
        return self._live

    def done(self) -> bool:
        """Never: DCP takes a future that is done for one that succeeded.  Its callbacks are called in any case."""
        return False

    def is_of(self, run: Run) -> bool:
        return run is self._run

    @property
    def is_over(self) -> bool:
        return super().done()

    def requested(self, save: Save, run: Run) -> None:
        """Blocks until it is staged; raises if it will not be."""
        if self.is_of(run):
            self._release()  # from here on its fence knows of the save itself
        try:
            save.wait("staged")
        except BaseException as error:
            self.failed(error)
            raise
        self._release()
        self.set_result({})

    def failed(self, error: BaseException) -> None:
        self._release()
        if not self.is_over:
            self.set_exception(error)

    def ended(self) -> None:
        """May be called again."""
        self.failed(StateError("it ended before anything was copied; upload_completion says why"))
        self._run.lazy.discard(self._ended)
        self._ended.set()

    def __del__(self) -> None:
        if hasattr(self, "_release"):
            self.ended()


def take_staging() -> Staging | None:
    """The lazy save whose state this thread has taken to save it."""
    staging: Staging | None = getattr(_thread, "staging", None)
    _thread.staging = None
    return None if staging is None or staging.is_over else staging


class _End:
    """Held by a thread, so that it goes when the thread does."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def __del__(self) -> None:
        self._staging.ended()
