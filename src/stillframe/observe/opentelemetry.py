"""OpenTelemetry: ``observe(checkpointer.stats)`` with whatever meter provider is set.  Needs ``stillframe[otel]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from stillframe.model import Stats
from stillframe.observe.metrics import METRICS, Metric

_UNITS = {"": "1", "bytes": "By", "seconds": "s"}


def observe(stats: Callable[[], Stats], attributes: dict[str, str] | None = None, meter: Meter | None = None) -> None:
    """Observable instruments ``stillframe.<name>``; asked when the meter's reader asks, and nothing runs in between."""
    meter = meter or get_meter("stillframe")
    for metric in METRICS:
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        make(
            f"stillframe.{metric.name}",
            callbacks=[_callback(metric, stats, attributes or {})],
            unit=_UNITS[metric.unit],
            description=metric.help,
        )


def _callback(
    metric: Metric, stats: Callable[[], Stats], attributes: dict[str, str]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def ask(_options: CallbackOptions) -> Iterable[Observation]:
        value = metric.value(stats())
        return [] if value is None else [Observation(value, attributes)]

    return ask
