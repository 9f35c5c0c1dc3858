"""Metrics for Prometheus, on whatever endpoint the process serves.  Needs ``stillframe[prometheus]``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stillframe.model import Stats, TierStats
from stillframe.observe import metrics
from stillframe.observe.metrics import METRICS, TIER_METRICS


class CheckpointerCollector(Collector):
    """Reads the metrics when Prometheus scrapes; nothing happens between two scrapes."""

    def __init__(self) -> None:
        self.sources: list[tuple[Callable[[], Stats], dict[str, str]]] = []

    def collect(self) -> Iterable[Metric]:
        sources = [(stats(), labels) for stats, labels in tuple(self.sources)]
        names = list(dict.fromkeys(name for _, labels in sources for name in labels))
        for metric in METRICS:
            yield _family(metric, names, sources)
        of_tiers = [(tier, {**labels, "tier": tier.root}) for stats, labels in sources for tier in stats.tiers]
        for metric in TIER_METRICS if of_tiers else ():
            yield _family(metric, list(dict.fromkeys([*names, "tier"])), of_tiers)


def _family(
    metric: metrics.Metric, names: Sequence[str], sources: Sequence[tuple[Stats | TierStats, dict[str, str]]]
) -> Metric:
    name = "_".join(filter(None, ("stillframe", metric.name, metric.unit)))
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.help, labels=names)
    for stats, labels in sources:
        value = metric.value(stats)
        if value is not None:
            family.add_metric([labels.get(each, "") for each in names], value)
    return family


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
