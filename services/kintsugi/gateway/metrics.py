"""Prometheus metrics of a gateway, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kintsugi.core.exchange import PARTS, LossReason, LostPart
from kintsugi.gateway.shares import FairShares
from kintsugi.gateway.texts.known_chunks import KnownChunks

_FIRST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0)
_OWN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class CertificateExpiry(Collector):
    """Time at which the gateway's certificate expires, read at each scrape. No sample without TLS."""

    def __init__(self) -> None:
        self.read_s: Callable[[], float] | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kintsugi_gateway_certificate_expiry_timestamp_seconds",
            "Time at which the gateway's certificate expires",
            labels=(),
        )
        if self.read_s is not None:
            family.add_metric([], self.read_s())
        yield family


class ShareMetrics(Collector):
    """Use and limits of namespaces, read at each scrape. Only namespaces to which a rule applies have
    samples."""

    def __init__(self, shares: FairShares, known: KnownChunks) -> None:
        self._shares = shares
        self._known = known

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        prefix, both = "kintsugi_gateway_namespace", ["namespace", "resource"]
        use = GaugeMetricFamily(f"{prefix}_use", "Present use of a namespace", labels=both)
        limit = GaugeMetricFamily(f"{prefix}_limit", "Limits of a namespace", labels=both)
        requests = CounterMetricFamily(f"{prefix}_requests", "Admitted requests", labels=["namespace"])
        tokens = CounterMetricFamily(
            f"{prefix}_tokens", "Estimated tokens of prompts, answers and chunks", labels=["namespace"]
        )
        refused = CounterMetricFamily(
            f"{prefix}_refused", "Requests refused by a limit", labels=["namespace", "limit"]
        )
        for account in self._shares.accounts:
            name, limits = account.name, account.limits
            used = {"concurrent": account.in_flight, "queued": len(account.waiting)}
            used["known_chunks"] = self._known.num_chunks(name)
            for resource, value in used.items():
                use.add_metric([name, resource], value)
            for resource in ("concurrent", "requests_per_s", "tokens_per_s", "weight"):
                if (most := getattr(limits, resource)) is not None:
                    limit.add_metric([name, resource], most)
            requests.add_metric([name], account.requests_total)
            tokens.add_metric([name], max(0, account.tokens_charged))
            for which, count in account.refused_total.items():
                refused.add_metric([name, which], count)
        yield from (use, limit, requests, tokens, refused)


class GatewayMetrics:
    """All metrics of a gateway. A ``method`` is the name of an RPC or the path of an HTTP request."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._requests = counter(
            "kintsugi_gateway_requests",
            "Requests by method and status: gRPC's name, or HTTP's number, which is 499 if the caller "
            "disconnected before the answer",
            ["method", "status"],
        )
        self._ttft_s = histogram(
            "kintsugi_gateway_ttft_seconds",
            "Time from a request's arrival to the first piece of its answer",
            ["method"],
            buckets=_FIRST_BUCKETS_S,
        )
        self._chunk_tokens = counter(
            "kintsugi_gateway_chunk_tokens",
            "Chunk tokens of prompts, by result: loaded (hit) or missed",
            ["result"],
        )
        self._outcomes = counter(
            "kintsugi_gateway_outcomes", "Answers by outcome of the prefill", ["outcome"]
        )
        self.resolve_s = histogram(
            "kintsugi_gateway_resolve_seconds",
            "Time from a request's arrival until it is sent to an engine: checks and tokenisation",
            buckets=_OWN_BUCKETS_S,
        )
        self.certificate = CertificateExpiry()
        registry.register(self.certificate)
        self._lost = counter(
            "kintsugi_gateway_lost_parts",
            "Processes of the service that ended unexpectedly, by part and reason; each gateway counts all",
            ["part", "reason"],
        )
        for part, reason in product(PARTS, LossReason):  # Prometheus sees no increase of a new series
            self._lost.labels(part, reason.value)
        self._fills = counter("kintsugi_gateway_fill_events", "Misses by decision and result", ["event"])

    def count_request(self, method: str, status: str | int) -> None:
        self._requests.labels(method, str(status)).inc()

    def observe_first(self, method: str, first_s: float) -> None:
        """Record the time from a request's last byte to the first piece of its answer."""
        self._ttft_s.labels(method).observe(first_s)

    def count_accounting(self, accounting: Mapping[str, Any]) -> None:
        """Count an answer by its accounting, which is empty if the engine reported none."""
        for result in ("hit", "missed"):
            self._chunk_tokens.labels(result).inc(int(accounting.get(f"tokens_{result}", 0)))
        self._outcomes.labels(str(accounting.get("outcome", "unknown"))).inc()

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        Gauge(f"kintsugi_gateway_{name}", text, registry=self.registry).set_function(read)

    def count_loss(self, lost: LostPart) -> None:
        self._lost.labels(lost.part, lost.reason.value).inc()

    def count_fill(self, event: str) -> None:
        self._fills.labels(event).inc()
