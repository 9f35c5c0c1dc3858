"""Metrics for OpenTelemetry, with whatever meter provider is set.  Needs ``stillframe[otel]``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from stillframe.model import Stats
from stillframe.observe.metrics import METRICS, TIER_METRICS, Metric

_UNITS = {"": "1", "bytes": "By", "seconds": "s"}


def observe(stats: Callable[[], Stats], attributes: dict[str, str] | None = None, meter: Meter | None = None) -> None:
    """Export the metrics of a checkpointer as observable instruments: ``observe(checkpointer.stats)``.

    They are named ``stillframe.<name>``, and read only when the meter's reader collects.
    """
    meter = meter or get_meter("stillframe")
    for metric in (*METRICS, *TIER_METRICS):
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        make(
            f"stillframe.{metric.name}",
            callbacks=[
                functools.partial(
                    _of_tiers if metric in TIER_METRICS else _observation, metric, stats, attributes or {}
                )
            ],
            unit=_UNITS[metric.unit],
            description=metric.help,
        )


def _observation(
    metric: Metric, stats: Callable[[], Stats], attributes: dict[str, str], _options: CallbackOptions
) -> list[Observation]:
    value = metric.value(stats())
    return [] if value is None else [Observation(value, attributes)]


def _of_tiers(
    metric: Metric, stats: Callable[[], Stats], attributes: dict[str, str], _options: CallbackOptions
) -> list[Observation]:
    found = [(metric.value(tier), tier.root) for tier in stats().tiers]
    return [Observation(value, {**attributes, "tier": root}) for value, root in found if value is not None]
