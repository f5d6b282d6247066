"""What the HTTP front end counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0)


class HttpMetrics:
    """Prometheus series of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "kintsugi_http_requests",
            "Answered requests by path and status; 499 left before the answer.",
            ["path", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "kintsugi_http_requests_in_flight", "Requests being answered.", registry=registry
        )
        self.first_piece_s = Histogram(
            "kintsugi_http_first_piece_seconds",
            "From a request's last byte to the answer's first: with streaming, the time to first token.",
            ["path"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._chunk_tokens = Counter(
            "kintsugi_http_chunk_tokens", "Tokens of chunks in prompts.", ["result"], registry=registry
        )

    def answered(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def accounted(self, accounting: Mapping[str, Any]) -> None:
        for result in ("hit", "missed"):
            self._chunk_tokens.labels(result).inc(int(accounting.get(f"tokens_{result}", 0)))
