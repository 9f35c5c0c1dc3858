"""The figures of a checkpointer under stable names, for Prometheus and OpenTelemetry (both are extras)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stillframe.model import Stats


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure.  A counter only grows while its checkpointer lives; a gauge goes both ways."""

    name: str
    """Without a prefix or a suffix for its kind."""
    kind: Literal["counter", "gauge"]
    unit: Literal["", "bytes", "seconds"]
    help: str
    value: Callable[[Stats], float | None]
    """``None``: there is nothing to tell yet."""


METRICS = (
    Metric("saves", "counter", "", "Calls of save() that were taken.", lambda stats: stats.saves),
    Metric("saves_committed", "counter", "", "Saves that became checkpoints.", lambda stats: stats.committed),
    Metric("saves_failed", "counter", "", "Saves that failed.", lambda stats: stats.failed),
    Metric("saves_skipped", "counter", "", "Saves skipped by when_busy='skip'.", lambda stats: stats.skipped),
    Metric("saves_in_flight", "gauge", "", "Saves on their way.", lambda stats: stats.in_flight),
    Metric("saves_unchanged", "counter", "", "Saves of exactly the bytes before.", lambda stats: stats.unchanged),
    Metric("committed_step", "gauge", "", "Step of the last commit.", lambda stats: stats.committed_step),
    Metric(
        "committed_time", "gauge", "seconds", "Unix time of the last commit: alert on its age.",
        lambda stats: stats.committed_unix_s,
    ),
    Metric("captured", "counter", "bytes", "Copied by save() itself.", lambda stats: stats.captured_bytes),
    Metric("staged", "counter", "bytes", "Copied to the arena.", lambda stats: stats.staged_bytes),
    Metric("flushed", "counter", "bytes", "Written to storage.", lambda stats: stats.flushed_bytes),
    Metric("blocked_save", "counter", "seconds", "Training blocked in save().", lambda stats: stats.blocked_save_s),
    Metric("blocked_fence", "counter", "seconds", "Training blocked at fences.", lambda stats: stats.blocked_fence_s),
    Metric("fences_waited", "counter", "", "Fences that had to wait.", lambda stats: stats.fences),
    Metric("arena_size", "gauge", "bytes", "Host memory lent for staging.", lambda stats: stats.arena_bytes),
    Metric(
        "arena_wait", "counter", "seconds", "Staging waited for room in the arena: storage is too slow for the saves.",
        lambda stats: stats.arena_wait_s,
    ),
    Metric("keeper_starts", "counter", "", "Keepers started; two: one has died.", lambda stats: stats.keeper_starts),
)  # fmt: skip
