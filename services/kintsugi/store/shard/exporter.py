"""Prometheus metrics of a shard. A scrape reads the shard's own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kintsugi.store.protocol.access import Access
from kintsugi.store.protocol.audit import AuditLog
from kintsugi.store.protocol.metrics_port import MetricsServer, require_admin, with_readiness
from kintsugi.store.protocol.tls import TlsFiles, parse_address
from kintsugi.store.shard.shard import Shard

_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_GAP_BUCKETS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


class ShardMetrics(Collector):
    """One shard's metrics in a registry of their own."""

    def __init__(self, shard: Shard, bytes_read: Mapping[str, int], tls: TlsFiles | None = None) -> None:
        """`bytes_read`: bytes by path, updated by the service. `tls`: files of the certificate whose expiry
        is reported."""
        self.registry = CollectorRegistry()
        self._latency = Histogram(
            "kintsugi_store_rpc_seconds",
            "Time from a call's first byte to its last",
            ["rpc"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        gap = Histogram(
            "kintsugi_store_evict_reuse_gap_seconds",
            "Time from a chunk's eviction to the next lookup of it",
            buckets=_GAP_BUCKETS_S,
            registry=self.registry,
        )
        shard.table.reuse.observe = gap.observe
        self._audit_lost = Gauge(
            "kintsugi_store_audit_lines_lost",
            "Lines of the audit log that could not be written",
            registry=self.registry,
        )
        self._shard, self._bytes_read, self._tls = shard, bytes_read, tls
        self.registry.register(self)

    def watch_audit(self, audit: AuditLog) -> None:
        """Report the lines that an audit log has lost."""
        self._audit_lost.set_function(lambda: audit.lines_lost)

    @contextmanager
    def time_rpc(self, rpc: str) -> Iterator[None]:
        """Observe the duration of the `with` block."""
        with self._latency.labels(rpc).time():
            yield

    def serve(
        self,
        address: str,
        why_not_ready: Callable[[], str] = lambda: "",
        warning: Callable[[], str] = lambda: "",
        access: Access | None = None,
    ) -> MetricsServer:
        """Start an HTTP server for scrapes and readiness probes at `host:port`; the caller stops it.
        `access`: the callers; scrapes then need the verb `admin`. None: any client may scrape. Raises
        `InvalidField`, `OSError`."""
        host, port = parse_address("metrics", address)
        metrics = make_wsgi_app(self.registry)
        app = with_readiness(
            metrics if access is None else require_admin(metrics, access), why_not_ready, warning
        )
        return MetricsServer(app, host, port)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        shard, counters = self._shard, self._shard.table.counters
        for name, text, value in (
            ("hits", "Keys that lookups found", counters.hits),
            ("misses", "Keys that lookups did not find", counters.misses),
            ("quarantined", "Chunks dropped because their bytes or records were wrong", counters.quarantined),
            ("expired", "Chunks whose lifetime has ended", counters.expired),
            ("copied", "Chunks copied from other shards", counters.copied),
        ):
            yield CounterMetricFamily(f"kintsugi_store_{name}", text, value=value)
        yield GaugeMetricFamily("kintsugi_store_chunks", "Chunks held", value=len(shard))
        yield GaugeMetricFamily(
            "kintsugi_store_failed",
            "1 if a thread of the shard has died",
            value=float(shard.failure is not None),
        )
        read = CounterMetricFamily("kintsugi_store_read_bytes", "Chunk KV read, by path", labels=["path"])
        for path, count in self._bytes_read.items():
            read.add_metric([path], count)
        yield read
        expiry = GaugeMetricFamily(
            "kintsugi_store_certificate_expiry_timestamp_seconds",
            "When the shard's certificate expires",
            labels=(),
        )
        if self._tls is not None:
            expiry.add_metric([], self._tls.expires_s())
        yield expiry
        yield from self._tiers()
        yield from self._namespaces()

    def _namespaces(self) -> Iterator[GaugeMetricFamily]:
        both = ["namespace", "resource"]
        used = GaugeMetricFamily(
            "kintsugi_store_namespace_used_bytes", "Chunk KV of a namespace with limits", labels=both
        )
        limit = GaugeMetricFamily(
            "kintsugi_store_namespace_limit_bytes", "Limit of a namespace's chunk KV", labels=both
        )
        for use in self._shard.table.namespace_uses():
            for resource, num_bytes in use.used_bytes.items():
                used.add_metric([use.name, resource], num_bytes)
            for resource, bytes_max in use.bytes_max.items():
                if bytes_max < float("inf"):
                    limit.add_metric([use.name, resource], bytes_max)
        yield from (used, limit)

    def _tiers(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        shard = self._shard
        used = GaugeMetricFamily("kintsugi_store_tier_used_bytes", "Bytes taken", labels=["tier"])
        capacity = GaugeMetricFamily("kintsugi_store_tier_capacity_bytes", "Capacity", labels=["tier"])
        failing = GaugeMetricFamily(
            "kintsugi_store_tier_failing",
            "1 if the last write to the tier, or the last read from it, failed",
            labels=["tier"],
        )
        chunks = GaugeMetricFamily("kintsugi_store_tier_chunks", "Chunks in the tier", labels=["tier"])
        evictions = CounterMetricFamily("kintsugi_store_evictions", "Chunks evicted", labels=["tier"])
        for tier in shard.tiers:
            used.add_metric([tier.name], tier.used_bytes)
            capacity.add_metric([tier.name], tier.capacity_bytes)
            chunks.add_metric([tier.name], tier.chunks)
            evictions.add_metric([tier.name], tier.evictions)
        failures = shard.tier_failures()
        queue = GaugeMetricFamily("kintsugi_store_queue_bytes", "Bytes to be written", labels=["tier"])
        for waiting in shard.table.queues:
            queue.add_metric([waiting.tier.name], waiting.queue_bytes)
        if shard.bucket is not None:
            queue.add_metric([shard.bucket.name], shard.bucket.staged_bytes)
        for tier in shard.lower_tiers:
            failing.add_metric([tier.name], float(tier.name in failures))
        faults = CounterMetricFamily(
            "kintsugi_store_bucket_faults",
            "Chunks that a bucket lost, refused or did not send",
            labels=["tier", "fault"],
        )
        for fault, count in shard.bucket_faults().items():
            faults.add_metric(["bucket", fault], count)
        yield from (used, capacity, failing, chunks, evictions, queue, faults)
