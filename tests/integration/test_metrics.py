"""The figures of a checkpointer as Prometheus and OpenTelemetry see them."""

from __future__ import annotations

from pathlib import Path

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from stillframe import Checkpointer, Tier
from stillframe.observe import opentelemetry, prometheus
from stillframe.observe.metrics import METRICS, TIER_METRICS, Metric
from tests.support import until

DOCUMENT = Path(__file__).parents[2] / "docs/METRICS.md"


def test_prometheus_gets_every_figure(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        forget = prometheus.register(checkpointer.stats, {"rank": "3"}, registry)
        before = generate_latest(registry).decode()
        assert 'stillframe_saves_total{rank="3"} 0.0' in before
        assert "committed_step{" not in before, "there is nothing to tell yet"
        checkpointer.save(7, {"w": torch.ones(1 << 10)})
        checkpointer.wait()
        text = generate_latest(registry).decode()
    assert 'stillframe_saves_committed_total{rank="3"} 1.0' in text
    assert 'stillframe_committed_step{rank="3"} 7.0' in text
    assert 'stillframe_flushed_bytes_total{rank="3"} 4096.0' in text
    for metric in METRICS:
        assert f"stillframe_{metric.name}" in text, metric.name
    forget()
    assert 'rank="3"' not in generate_latest(registry).decode()


def test_two_checkpointers_in_one_process(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with Checkpointer(tmp_path / "a", arena="64MiB") as one, Checkpointer(tmp_path / "b", arena="64MiB") as other:
        prometheus.register(one.stats, {"run": "a"}, registry)
        prometheus.register(other.stats, {"run": "b"}, registry)
        one.save(1, {"w": torch.ones(3)})
        text = generate_latest(registry).decode()
    assert 'stillframe_saves_total{run="a"} 1.0' in text
    assert 'stillframe_saves_total{run="b"} 0.0' in text
    assert text.count("# TYPE stillframe_saves_total") == 1


def test_opentelemetry_gets_every_figure(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with Checkpointer(tmp_path / "r", arena="64MiB") as checkpointer:
        opentelemetry.observe(checkpointer.stats, {"rank": "3"}, provider.get_meter("test"))
        checkpointer.save(7, {"w": torch.ones(1 << 10)})
        checkpointer.wait()
        data = reader.get_metrics_data()
    assert data is not None
    found = {
        metric.name: metric.data.data_points[0]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert set(found) == {f"stillframe.{metric.name}" for metric in METRICS}
    point = found["stillframe.flushed"]
    assert point.attributes == {"rank": "3"}
    assert getattr(point, "value", None) == 4096
    provider.shutdown()


def test_the_document_names_every_figure() -> None:
    def table(metrics: tuple[Metric, ...], place: str) -> str:
        rows = [f"| `{each.name}` | {each.kind} | {each.unit} | `{each.field}` | {each.help} |" for each in metrics]
        return "\n".join([f"| name | kind | unit | in `{place}` | |", "| --- | --- | --- | --- | --- |", *rows])

    assert table(METRICS, "stats()") in DOCUMENT.read_text()
    assert table(TIER_METRICS, "stats().tiers") in DOCUMENT.read_text()


def test_both_get_the_figures_of_every_tier(tmp_path: Path) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    near, bad = Tier(tmp_path / "near", every=2), Tier(tmp_path / "bad")
    (tmp_path / "bad").write_text("in its place")
    checkpointer = Checkpointer(tmp_path / "r", tiers=[near, bad], arena="64MiB")
    try:
        prometheus.register(checkpointer.stats, {"rank": "3"}, registry)
        opentelemetry.observe(checkpointer.stats, {"rank": "3"}, provider.get_meter("test"))
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(3)}).wait()
        checkpointer.wait(tier=near)
        until(lambda: checkpointer.stats().tiers[1].failures, "an attempt that fails")
        text = generate_latest(registry).decode()
        data = reader.get_metrics_data()
    finally:
        checkpointer.close(timeout_s=0.5)
    label = f'{{rank="3",tier="{tmp_path / "near"}"}}'
    assert f"stillframe_tier_committed_step{label} 2.0" in text
    assert f"stillframe_tier_behind_steps{label} 1.0" in text
    assert f"stillframe_tier_failures{label} 0.0" in text
    assert 0 < float(text.partition(f"stillframe_tier_behind_seconds{label} ")[2].split()[0]) < 60
    assert f'stillframe_tier_failures{{rank="3",tier="{tmp_path / "bad"}"}} 0.0' not in text
    assert f'stillframe_tier_committed_step{{rank="3",tier="{tmp_path / "bad"}"}}' not in text, "nothing is there"
    assert 'stillframe_saves_total{rank="3"} 3.0' in text
    assert data is not None
    found = {
        (metric.name, (point.attributes or {})["tier"]): getattr(point, "value", None)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if "tier" in (point.attributes or {})
    }
    assert {name for name, _ in found} == {f"stillframe.{metric.name}" for metric in TIER_METRICS}
    assert found["stillframe.tier_committed_step", str(tmp_path / "near")] == 2
    provider.shutdown()
