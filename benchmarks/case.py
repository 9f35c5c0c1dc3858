"""One measurement: what is run, by which system, and how much room and time it may take."""

from __future__ import annotations

from typing import Any

import msgspec

GIB = 1 << 30
_SLOWEST = 100e6
"""Bytes per second: who writes more slowly than this is not worth waiting for."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Run once, in a process of its own (with several ranks: under torchrun) and a fresh directory."""

    task: str
    """A function of :mod:`benchmarks.tasks`."""
    system: str
    gib: float
    """Bytes of the state, per rank, in GiB."""
    shape: str = "layers"
    iterations: int = 1
    every: tuple[int, ...] = (1,)
    """Save at every k-th iteration; with several numbers, one loop for each."""
    compute_s: float = 0.0
    """Emulated forward and backward of one iteration: waiting, so that the CPU is free, as beside an accelerator."""
    update_s: float = 0.0
    ranks: int = 1
    is_sharded: bool = False
    """FSDP2 shards under torchrun, also with one rank."""
    host_gib: float | None = None
    """What a system may hold in host memory, if it can be told."""
    disk_rate: float | None = None
    """Bytes per second of the emulated disk, shared by all; the machine's own if None."""
    is_watched: bool = False
    """Count bytes written and fsyncs, and the memory at its peak."""
    limit: float | None = None
    """Seconds after which it hangs, if not worked out from the rest."""
    detail: str = ""
    """For tasks that need more: the model, the number of tensors or ranks."""

    @property
    def disk_bytes(self) -> int:
        saves = max(self.iterations // every for every in self.every) + 2
        return int(saves * self.gib * GIB * self.ranks)

    @property
    def memory_bytes(self) -> int:
        """The state, a staged copy, what a writer holds in hand, and the copy to compare with."""
        return int((3.5 * self.gib + 0.6) * GIB * self.ranks)

    @property
    def limit_s(self) -> float:
        """More than any system needs that works: after that, it hangs."""
        if self.limit is not None:
            return self.limit
        iterations = sum(self.iterations for _ in self.every)
        slowest = min(self.disk_rate or _SLOWEST, _SLOWEST)
        return 90 + 3 * iterations * (self.compute_s + self.update_s) + self.disk_bytes * len(self.every) / slowest


class Outcome(msgspec.Struct, kw_only=True):
    """What one run of a case gave, or why it gave nothing."""

    case: Case
    turn: int
    error: str | None = None
    figures: dict[str, Any] = {}

    @property
    def is_good(self) -> bool:
        return self.error is None and self.figures.get("is_right", True)
