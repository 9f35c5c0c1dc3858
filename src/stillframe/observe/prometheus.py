"""Metrics for Prometheus, on whatever endpoint the process serves.  Needs ``stillframe[prometheus]``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stillframe.model import Stats
from stillframe.observe.metrics import METRICS


class CheckpointerCollector(Collector):
    """Reads the metrics when Prometheus scrapes; nothing happens between two scrapes."""

    def __init__(self) -> None:
        self.sources: list[tuple[Callable[[], Stats], dict[str, str]]] = []

    def collect(self) -> Iterable[Metric]:
        sources = [(stats(), labels) for stats, labels in tuple(self.sources)]
        names = list(dict.fromkeys(name for _, labels in sources for name in labels))
        for metric in METRICS:
            name = "_".join(filter(None, ("stillframe", metric.name, metric.unit)))
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.help, labels=names)
            for stats, labels in sources:
                value = metric.value(stats)
                if value is not None:
                    family.add_metric([labels.get(each, "") for each in names], value)
            yield family


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, CheckpointerCollector] = weakref.WeakKeyDictionary()


def register(
    stats: Callable[[], Stats], labels: dict[str, str] | None = None, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Export the metrics of a checkpointer: ``register(checkpointer.stats, {"rank": "0"})``.

    Several checkpointers need different labels.  Returns a function that removes the metrics again: call it when the
    checkpointer is closed.
    """
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = CheckpointerCollector()
        registry.register(collector)
    source = stats, labels or {}
    collector.sources.append(source)
    return lambda: collector.sources.remove(source)
