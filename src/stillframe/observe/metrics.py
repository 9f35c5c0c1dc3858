"""The metrics of a checkpointer under stable names, for Prometheus and OpenTelemetry (both are extras)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stillframe.model import Stats, TierStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.  A counter never decreases while its checkpointer lives; a gauge goes up and down."""

    name: str
    """Without prefix, unit or suffix; the exporter adds them."""
    kind: Literal["counter", "gauge"]
    unit: Literal["", "bytes", "seconds"]
    help: str
    field: str
    """The field of :class:`Stats`, or :class:`TierStats`, that holds it."""

    def value(self, stats: Stats | TierStats) -> float | None:
        """``None`` if there is no value yet."""
        value: float | None = getattr(stats, self.field)
        return value


METRICS = (
    Metric("saves", "counter", "", "Calls of save() that were accepted.", "saves"),
    Metric("saves_committed", "counter", "", "Saves that became checkpoints.", "committed"),
    Metric("saves_failed", "counter", "", "Saves that failed.", "failed"),
    Metric("saves_skipped", "counter", "", "Saves skipped by when_busy='skip'.", "skipped"),
    Metric("saves_in_flight", "gauge", "", "Saves that are neither committed nor failed yet.", "in_flight"),
    Metric("saves_unchanged", "counter", "", "Saves whose bytes equal those of the save before.", "unchanged"),
    Metric("committed_step", "gauge", "", "Step of the last commit.", "committed_step"),
    Metric("committed_time", "gauge", "seconds", "Unix time of the last commit; alert on its age.", "committed_unix_s"),
    Metric("captured", "counter", "bytes", "Copied inside save() itself.", "captured_bytes"),
    Metric("staged", "counter", "bytes", "Copied to the arena.", "staged_bytes"),
    Metric("flushed", "counter", "bytes", "Written to storage.", "flushed_bytes"),
    Metric("blocked_save", "counter", "seconds", "Time that training was blocked in save().", "blocked_save_s"),
    Metric("blocked_fence", "counter", "seconds", "Time that training was blocked at fences.", "blocked_fence_s"),
    Metric("fences_waited", "counter", "", "Fences that had to wait.", "fences"),
    Metric("arena_size", "gauge", "bytes", "Host memory used for staging.", "arena_bytes"),
    Metric(
        "arena_wait", "counter", "seconds",
        "Time that staging waited for room in the arena: storage is slower than the saves.", "arena_wait_s",
    ),
    Metric(
        "keeper_starts", "counter", "", "Keeper processes started; more than 1 means that a keeper died.",
        "keeper_starts",
    ),
)  # fmt: skip

TIER_METRICS = (
    Metric("tier_committed_step", "gauge", "", "Newest step that is whole in the tier.", "committed_step"),
    Metric(
        "tier_committed_time", "gauge", "seconds", "Unix time when that was seen.", "committed_unix_s",
    ),
    Metric("tier_behind_steps", "gauge", "", "How many steps it is older than the newest checkpoint.", "behind_steps"),
    Metric("tier_behind", "gauge", "seconds", "How much earlier it was committed in the root.", "behind_s"),
    Metric("tier_failures", "gauge", "", "Attempts that have failed since one succeeded.", "failures"),
)  # fmt: skip
"""Of each tier, which the label ``tier`` names by its root."""
