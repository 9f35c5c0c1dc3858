"""Prometheus: figures for whatever endpoint the process serves.  Needs ``stillframe[prometheus]``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stillframe.metrics import METRICS
from stillframe.model import Stats

_PREFIX = "stillframe"


class CheckpointerCollector(Collector):
    """Asks for the figures when Prometheus does: nothing runs in between.

    ``stats``: a checkpointer's ``stats``.  ``labels`` are put on every figure, such as the rank.
    """

    def __init__(self, stats: Callable[[], Stats], labels: dict[str, str] | None = None) -> None:
        self._stats = stats
        self._labels = labels or {}

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        names, values = list(self._labels), list(self._labels.values())
        for metric in METRICS:
            value = metric.value(stats)
            if value is None:
                continue
            name = "_".join(filter(None, (_PREFIX, metric.name, metric.unit)))
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.help, labels=names)
            family.add_metric(values, value)
            yield family


def register(
    stats: Callable[[], Stats], labels: dict[str, str] | None = None, registry: CollectorRegistry = REGISTRY
) -> CheckpointerCollector:
    """``register(checkpointer.stats, {"rank": "0"})``; the collector can be given to ``registry.unregister``."""
    collector = CheckpointerCollector(stats, labels)
    registry.register(collector)
    return collector
