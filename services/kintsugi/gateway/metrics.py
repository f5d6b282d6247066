"""Prometheus metrics of a gateway, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
_OWN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class GatewayMetrics:
    """Counted where things happen; queues are read when they are scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kintsugi_gateway_requests",
            "Requests by method and how they ended: OK, or a gRPC status",
            ["method", "status"],
            registry=self.registry,
        )
        self.ttft_s = Histogram(
            "kintsugi_gateway_ttft_seconds",
            "From a request's arrival to the first piece of its answer",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.resolve_s = Histogram(
            "kintsugi_gateway_resolve_seconds",
            "From a request's arrival until the engine is asked: checks and tokenising",
            buckets=_OWN_BUCKETS_S,
            registry=self.registry,
        )
        self._chunk_tokens = Counter(
            "kintsugi_gateway_chunk_tokens",
            "Chunk tokens of prompts, by whether their KV was loaded",
            ["result"],
            registry=self.registry,
        )
        self._outcomes = Counter(
            "kintsugi_gateway_outcomes",
            "Answers by how the engine prefilled their prompt",
            ["outcome"],
            registry=self.registry,
        )
        self._fills = Counter(
            "kintsugi_gateway_fill_events",
            "Misses and what became of them",
            ["event"],
            registry=self.registry,
        )
        self.active = Gauge("kintsugi_gateway_active_requests", "Answers under way", registry=self.registry)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"kintsugi_gateway_{name}", text, registry=self.registry).set_function(read)

    def ended(self, method: str, status: str) -> None:
        self._requests.labels(method, status).inc()

    def accounted(self, accounting: Mapping[str, Any] | None) -> None:
        """What the engine said of an answer."""
        values = accounting or {}
        self._outcomes.labels(str(values.get("outcome", "unknown"))).inc()
        self._chunk_tokens.labels("hit").inc(values.get("tokens_hit", 0))
        self._chunk_tokens.labels("missed").inc(values.get("tokens_missed", 0))

    def filled(self, event: str) -> None:
        self._fills.labels(event).inc()
