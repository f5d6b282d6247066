"""Counters on their way from the scheduler to Prometheus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.engine.blending_connector import KintsugiConnector
from kintsugi.engine.scheduler.stats import ERRORS_MAX, BlendPromMetrics, BlendStats


def stats_of(*accountings: Accounting) -> BlendStats:
    stats = BlendStats()
    for accounting in accountings:
        stats.count(accounting)
    return stats


BLENDED = Accounting(Outcome.BLENDED, bytes_loaded=7, ttft_ms=100.0, predicted_ttft_ms=130.0)
DECLINED = Accounting(
    Outcome.DECLINED, reason="loading_is_slower: by far", ttft_ms=50.0, predicted_ttft_ms=45.0
)


def test_counts_and_errors_of_several_reports_are_put_together() -> None:
    both = stats_of(BLENDED).aggregate(stats_of(BLENDED, DECLINED))
    assert both.data["requests/blended/none"] == 2
    assert both.data["requests/declined/loading_is_slower"] == 1
    assert both.data["bytes_loaded"] == 14
    assert both.data["prediction_errors/blended"] == pytest.approx([0.3, 0.3])
    assert both.data["prediction_errors/declined"] == pytest.approx([0.1])
    assert both.reduce()["prediction_errors/blended"] == 0.3


def test_what_a_service_never_logs_does_not_grow() -> None:
    both = stats_of(*[BLENDED] * ERRORS_MAX).aggregate(stats_of(BLENDED, DECLINED))
    assert len(both.data["prediction_errors/blended"]) == ERRORS_MAX
    assert both.data["requests/blended/none"] == ERRORS_MAX + 1


def test_what_is_told_of_requests_that_go_on_is_neither_counted_nor_logged() -> None:
    told = BlendStats()
    told.tell("ticket", BLENDED)
    assert not told.is_empty()
    other = BlendStats()
    other.tell("another", DECLINED)
    other.tell(None, DECLINED)
    both = told.aggregate(other).data
    assert {name: one["outcome"] for name, one in both["told"].items()} == {
        "ticket": "blended",
        "another": "declined",
    }
    assert KintsugiConnector.build_kv_connector_stats(both).is_empty(), "or vLLM would keep it to be logged"


def test_a_request_without_a_prediction_has_no_error() -> None:
    assert not [name for name in stats_of(Accounting(Outcome.BLENDED, ttft_ms=1.0)).data if "error" in name]


def test_prometheus_gets_a_histogram_of_errors() -> None:
    registry = prometheus_client.CollectorRegistry()

    def into(kind: type) -> Any:
        return lambda *args, **kwargs: kind(*args, **kwargs, registry=registry)

    kinds: Any = {
        kind: into(kind)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = BlendPromMetrics(config, kinds, ["engine"], {0: ["0"]})
    counted = stats_of(BLENDED, DECLINED)
    counted.tell("ticket", BLENDED)
    metrics.observe(counted.data)
    labels = {"engine": "0", "outcome": "blended"}
    name = "kintsugi_ttft_prediction_error"
    assert registry.get_sample_value(f"{name}_count", labels) == 1
    assert registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(0.3)
    assert registry.get_sample_value(f"{name}_bucket", {**labels, "le": "0.2"}) == 0
    assert registry.get_sample_value("kintsugi_blend_bytes_loaded_total", {"engine": "0"}) == 7
