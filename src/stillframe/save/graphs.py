"""Graphs of a device: an update that is captured in one runs no Python when it is replayed, so no fence.

A capture is broken by a wait for an event from outside, and, in CUDA's usual mode, by what other threads ask of the
runtime meanwhile.  So nothing may be pending while one is made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from stillframe.errors import ConfigError
from stillframe.state.torch_internals import built_for

logger = logging.getLogger("stillframe")


@functools.cache
def _module() -> Any:
    """Of the accelerator that torch was built for, if it captures graphs; starts no device."""
    accelerator = built_for()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return module if hasattr(module, "is_current_stream_capturing") else None


def is_capturing() -> bool:
    """Whether what this thread queues now is captured, not run: ``cudaStreamIsCapturing`` on CUDA."""
    module = _module()
    return module is not None and module.is_initialized() and module.is_current_stream_capturing()


class Captures:
    """What a checkpointer has to say about the captures that its fence meets.  Thread: the training thread's."""

    def __init__(self) -> None:
        self._is_told = False

    def check(self, pending: Sequence[int]) -> None:
        """``pending``: the steps that are still copied.  Raises :class:`ConfigError` before they break a capture."""
        if not is_capturing():
            return
        if pending:
            steps = ", ".join(map(str, pending))
            raise ConfigError(
                f"an update is captured in a graph while step {steps} is still copied, which would break the capture; "
                "call checkpointer.quiesce() before it"
            )
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "an update is captured in a graph: its replays run no Python and wait for no save; call "
                "checkpointer.fence() before each of them (audit=True finds one that lacks it)"
            )


def check_save() -> None:
    """Raises :class:`ConfigError` if ``save()`` is called within a capture."""
    if is_capturing():
        raise ConfigError("save() within the capture of a graph: call it before the capture, or after it")
