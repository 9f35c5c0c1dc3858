"""The figures of a checkpointer under stable names, for Prometheus and OpenTelemetry (both are extras)."""

from __future__ import annotations

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
    field: str
    """Of :class:`Stats`."""

    def value(self, stats: Stats) -> float | None:
        """``None``: there is nothing to tell yet."""
        value: float | None = getattr(stats, self.field)
        return value


METRICS = (
    Metric("saves", "counter", "", "Calls of save() that were taken.", "saves"),
    Metric("saves_committed", "counter", "", "Saves that became checkpoints.", "committed"),
    Metric("saves_failed", "counter", "", "Saves that failed.", "failed"),
    Metric("saves_skipped", "counter", "", "Saves skipped by when_busy='skip'.", "skipped"),
    Metric("saves_in_flight", "gauge", "", "Saves on their way.", "in_flight"),
    Metric("saves_unchanged", "counter", "", "Saves of exactly the bytes before.", "unchanged"),
    Metric("committed_step", "gauge", "", "Step of the last commit.", "committed_step"),
    Metric(
        "committed_time", "gauge", "seconds", "Unix time of the last commit: alert on its age.",
        "committed_unix_s",
    ),
    Metric("captured", "counter", "bytes", "Copied by save() itself.", "captured_bytes"),
    Metric("staged", "counter", "bytes", "Copied to the arena.", "staged_bytes"),
    Metric("flushed", "counter", "bytes", "Written to storage.", "flushed_bytes"),
    Metric("blocked_save", "counter", "seconds", "Training blocked in save().", "blocked_save_s"),
    Metric("blocked_fence", "counter", "seconds", "Training blocked at fences.", "blocked_fence_s"),
    Metric("fences_waited", "counter", "", "Fences that had to wait.", "fences"),
    Metric("arena_size", "gauge", "bytes", "Host memory lent for staging.", "arena_bytes"),
    Metric(
        "arena_wait", "counter", "seconds", "Staging waited for room in the arena: storage is too slow for the saves.",
        "arena_wait_s",
    ),
    Metric("keeper_starts", "counter", "", "Keepers started; two: one has died.", "keeper_starts"),
)  # fmt: skip
