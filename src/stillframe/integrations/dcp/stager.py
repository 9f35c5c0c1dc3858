"""The lazy way through ``dcp.async_save``: nothing is copied before it returns, and the update waits for the copy.

DCP's thread takes the staged state, plans (a collective), and only then calls the writer, which requests the save.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from stillframe import spi
from stillframe.errors import ConfigError
from stillframe.integrations.dcp.round import Staging
from stillframe.open_roots import fence


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
        self._writer = writer
        self._live = spi.LiveState()

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        gate = _update_gate()
        gate.wait()
        fence()  # the copies of the state before have been copied away
        return Staging(gate, LiveDict(self._live.state(state_dict)), self._writer.step)

    def synchronize_staging(self) -> None:
        """Nothing to do: the fence synchronizes."""

    def close(self) -> None:
        """Nothing to do: the copies go with this object."""


@functools.cache
def _update_gate() -> spi.UpdateGate:
    return spi.UpdateGate(fence)


class LiveDict(dict[str, Any]):
    """A state dict of live memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "stillframe's Stager hands over live memory, which cannot go to another process: use "
            "AsyncCheckpointerType.THREAD, or one of DCP's own stagers"
        )
