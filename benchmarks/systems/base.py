"""What a benchmark needs of a system that saves: one small interface, so that every loop is written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

State = dict[str, Any]
"""A nested dict of tensors (DTensors with several ranks) and, in one question, plain Python values."""


class System:
    """One way of saving, used as its own documentation recommends, in its best configuration for a CPU.

    The loop of every question is::

        forward and backward        # the tensors stand still
        system.fence()              # returns when the tensors may change
        update                      # the tensors change, in place
        system.save(step)           # returns when training may go on with the next forward

    Both calls are timed: their sum is what training is blocked.  A system that copies before it returns needs no
    fence; one that reads the live tensors in the background waits in ``fence`` until it has read them.

    A constructor may raise anything (a missing package, no GPU): the harness lists the system with that reason.
    Heavy imports belong into the constructor, so that the table of systems can be read without them.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    """What the plots call it."""
    is_async: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """The distributions whose versions belong to a figure."""
    how: ClassVar[str]
    """How it is used here, in one sentence: the calls and the settings that matter."""
    start_s: ClassVar[float] = 0
    """What its first start on a machine may take, if it has something to build."""
    host_bytes: ClassVar[int | None] = None
    """What it may hold in host memory, if a question says so and the system can be told."""

    def __init__(self, directory: Path, state: State, rank: int = 0) -> None:
        """``directory`` exists and is empty.  ``state`` holds the live tensors: always these very objects."""
        self.directory = directory
        self.state = state
        self.rank = rank

    def fence(self) -> None:
        """Return when the tensors may change."""

    def save(self, step: int) -> None:
        """Save the state as it is now, under ``step``; return when training may go on."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return when every save is complete, as far as the system itself knows."""

    def restore(self, step: int) -> None:
        """Put what was saved as ``step`` into the live tensors, in place, as a training run would at its start."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads and processes."""


def tensors_of(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a state with its dotted path, in order; of a DTensor, the local part."""
    if isinstance(state, torch.Tensor):
        local = getattr(state, "to_local", None)
        yield path, local() if local else state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))


def map_tensors(state: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nested dict with every tensor (of a DTensor, the local part) replaced by ``change(tensor)``."""
    if isinstance(state, torch.Tensor):
        local = getattr(state, "to_local", None)
        return change(local() if local else state)
    if isinstance(state, dict):
        return {key: map_tensors(value, change) for key, value in state.items()}
    return state


def copy_into(state: State, loaded: dict[str, Any]) -> None:
    """Copy the loaded tensors into the live ones, and put the loaded plain values in their places."""
    for key, value in loaded.items():
        live = state[key]
        if isinstance(value, dict):
            copy_into(live, value)
        elif isinstance(value, torch.Tensor):
            local = getattr(live, "to_local", None)
            (local() if local else live).copy_(value)
        else:
            state[key] = value


def init_alone() -> None:
    """A gloo group for systems that want one: of all ranks under torchrun, else of this process alone."""
    import os

    dist: Any = torch.distributed
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
