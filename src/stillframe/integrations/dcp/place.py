"""What the writer and the reader share: the root that DCP calls a checkpoint id, and the bytes of foreign planners."""

from __future__ import annotations

import os
from typing import Any

import torch

from stillframe import register_leaf

PathLike = str | os.PathLike[str]


class Place:
    """What DCP asks of readers and writers alike."""

    def __init__(self, path: PathLike, *, step: int | None = None) -> None:
        super().__init__()
        self.path = os.path.abspath(os.fspath(path))
        self.step = step

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.path = os.path.abspath(os.fspath(checkpoint_id))

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class Opaque:
    """Bytes that a user-defined planner made of a value; only such a planner can load them."""

    def __init__(self, data: bytes) -> None:
        self.data = data


register_leaf(
    Opaque,
    "dcp.bytes",
    lambda opaque: torch.frombuffer(bytearray(opaque.data or b"\0"), dtype=torch.uint8)[: len(opaque.data)],
    lambda tensor: Opaque(tensor.numpy().tobytes()),
)
