"""Whose streams: a save reads the state in the order of the thread that trains, whichever thread requests it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Streams:
    """Those that the thread which makes this computes on, of every accelerator device.  Starts no device."""

    def __init__(self) -> None:
        self._streams: list[torch.Stream] = []
        if torch.accelerator.is_available() and _is_started():
            count = torch.accelerator.device_count()
            self._streams = [torch.accelerator.current_stream(index) for index in range(count)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The calling thread computes on the same ones, behind what it has queued itself, and ahead of what it will."""
        others = [stream for stream in self._streams if stream != torch.accelerator.current_stream(stream.device)]
        with contextlib.ExitStack() as stack:
            if others:
                stack.callback(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
            for stream in others:
                own = torch.accelerator.current_stream(stream.device)
                stream.wait_stream(own)
                stack.callback(own.wait_stream, stream)
                stack.callback(torch.accelerator.set_stream, own)
                torch.accelerator.set_stream(stream)  # and its device
            yield


def _is_started() -> bool:
    module = torch.get_device_module()
    return bool(module.is_initialized()) if hasattr(module, "is_initialized") else True
