"""What a training run tells: one JSON line for its start and for each step, one record at its end.

Owns the shapes of these values, and the fingerprint of a state: a digest of every leaf, so that two states
can be compared bit for bit across processes, and a difference can be named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy
import torch

from stillframe import Times


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The run is about to take its first step."""

    parameters: int
    threads: int
    restored_step: int | None
    restore_s: float
    rank: int = 0
    pid: int = 0
    keeper: int = 0
    """The process id of its keeper, if it has one."""
    source: str = ""
    """Where it was restored from."""
    restored_bytes: int = 0


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One step, at ``begun_s`` of ``time.monotonic()``; then its parts, in this order and without gaps."""

    step: int
    loss: float
    begun_s: float
    forward_s: float
    backward_s: float
    fence_s: float
    """Blocked before the update, until the save before was copied."""
    update_s: float
    save_s: float
    """Blocked in ``save()``."""

    @property
    def blocked_s(self) -> float:
        return self.fence_s + self.save_s

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.fence_s + self.update_s + self.save_s


class Saved(msgspec.Struct, frozen=True):
    """When a save reached what, on the same clock."""

    step: int
    bytes: int
    times: Times


class Record(msgspec.Struct, frozen=True):
    """The whole run, written when it has ended."""

    started: Started
    steps: list[Step]
    saves: list[Saved]
    fingerprint: dict[str, str]
    unseen_loss: float | None = None
    """On text it was not trained on, if that was measured."""


def fingerprint(state: Any) -> dict[str, str]:
    """Path → digest of dtype, shape and bytes of a tensor or array, or the exact text of a plain value.

    A sharded tensor counts as the whole that it is a part of; all ranks call this together then.
    """
    return dict(_leaves(state, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if hasattr(value, "state_dict"):
        yield from _leaves(value.state_dict(), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            name = key if isinstance(key, str) else f"[{key!r}]"
            yield from _leaves(item, f"{path}/{name}" if path else name)
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor has it
        data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield path, f"tensor {value.dtype} {list(value.shape)} {hashlib.sha256(data.data).hexdigest()}"
    elif isinstance(value, numpy.ndarray):
        yield path, f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    else:
        yield path, f"{type(value).__name__} {value!r}"
