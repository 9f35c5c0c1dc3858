"""On which streams training and staging run, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from stillframe import Checkpointer
from stillframe.save.device import AcceleratorDevice
from tests.device import queued

On = Literal["default", "own"]


@contextlib.contextmanager
def training_on(on: On) -> Iterator[list[torch.Stream]]:
    """This thread's streams of both devices: the default ones, or two of its own."""
    streams = [queued.default_stream(each) if on == "default" else torch.Stream(f"queued:{each}") for each in range(2)]
    with queued.on_stream(streams[1]), queued.on_stream(streams[0]):
        yield streams


def side_streams(checkpointer: Checkpointer) -> list[torch.Stream]:
    """Those that its copies run on, once it has saved."""
    found = [each for each in checkpointer._planner._devices._devices.values() if isinstance(each, AcceleratorDevice)]
    assert found
    return [each._side for each in found]
