"""The figures of a checkpointer as Prometheus and OpenTelemetry see them."""

from __future__ import annotations

from pathlib import Path

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from stillframe import Checkpointer
from stillframe.observe import opentelemetry, prometheus
from stillframe.observe.metrics import METRICS

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
    rows = [f"| `{each.name}` | {each.kind} | {each.unit} | `{each.field}` | {each.help} |" for each in METRICS]
    table = "\n".join(["| name | kind | unit | in `stats()` | |", "| --- | --- | --- | --- | --- |", *rows])
    assert table in DOCUMENT.read_text()
