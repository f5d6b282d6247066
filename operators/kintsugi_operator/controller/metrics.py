"""Metrics of this process and of each object that it reconciles, and the HTTP pages for probes and
Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kintsugi_operator.api.status import Condition, ConditionStatus
from kintsugi_operator.controller.queue import ObjectKey

logger = logging.getLogger(__name__)

READS = ("get", "list", "watch")
WRITES = ("delete", "patch", "post", "put")
OBJECTS_MAX = 1000
"""Maximum number of objects with their own metrics. Each has about 12 series; further objects have none."""
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LABELS = ("kind", "namespace", "name")


class OperatorMetrics:
    """Requests and reconciliations of this process; failed reconciliations and conditions by object.

    An object's metrics are dropped with the object.
    """

    def __init__(self) -> None:
        self.is_leader = False
        self.registry = CollectorRegistry()
        self._objects: set[ObjectKey] = set()

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"kintsugi_operator_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(f"kintsugi_operator_{name}", text, labels, registry=self.registry)

        gauge("leader", "Whether this operator leads").set_function(lambda: self.is_leader)
        self._waiting = gauge("waiting", "Objects that are queued for reconciliation")
        self._requests = counter("requests", "Requests to the API server, except for the Lease", ["verb"])
        for verb in (*READS, *WRITES):
            self._requests.labels(verb)
        self._durations = Histogram(
            "kintsugi_operator_reconcile_seconds",
            "Duration of one reconciliation of one object",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._failures = counter(
            "reconcile_failures", "Failed reconciliations of the object", (*LABELS, "error")
        )
        self._conditions = gauge(
            "condition", "1 if the condition is true, 0 if false; absent if unknown", (*LABELS, "condition")
        )

    def count_request(self, verb: str) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb).inc()

    def show_waiting(self, count: Callable[[], int]) -> None:
        """Export the result of `count` as the number of queued objects."""
        self._waiting.set_function(count)

    @contextmanager
    def time_look(self, key: ObjectKey) -> Iterator[None]:
        """Measure one reconciliation of an object, and count it as failed if it raises."""
        begun_s = time.perf_counter()
        try:
            yield
        except Exception as error:
            if self._has_metrics(key):
                self._failures.labels(*key, type(error).__name__).inc()
            raise
        finally:
            self._durations.observe(time.perf_counter() - begun_s)

    def see(self, key: ObjectKey, conditions: Sequence[Condition]) -> None:
        """Export the conditions of an object."""
        if not self._has_metrics(key):
            return
        for one in conditions:
            if one.status is ConditionStatus.UNKNOWN:
                self._conditions.remove(*key, one.type)
            else:
                self._conditions.labels(*key, one.type).set(one.status is ConditionStatus.TRUE)

    def forget(self, key: ObjectKey) -> None:
        """Drop the metrics of an object that is gone."""
        if key in self._objects:
            self._objects.remove(key)
            for family in (self._failures, self._conditions):
                family.remove_by_labels(dict(zip(LABELS, key, strict=True)))

    def _has_metrics(self, key: ObjectKey) -> bool:
        """Whether an object has metrics; False beyond `OBJECTS_MAX` objects."""
        if key not in self._objects and len(self._objects) >= OBJECTS_MAX:
            logger.debug("more than %d objects: %s has no metrics", OBJECTS_MAX, key)
            return False
        self._objects.add(key)
        return True

    async def serve(self, port: int) -> web.AppRunner:
        """Serve `/healthz`, `/leader` and `/metrics` at the pod's address, which the kubelet and Prometheus
        call. `/healthz` answers while the event loop runs, also on a standby. `/leader` answers 200 only on
        the leader."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/leader", self._leader)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port).start()
        return runner

    def text(self) -> str:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _leader(self, request: web.Request) -> web.Response:
        return web.json_response({"leader": self.is_leader}, status=200 if self.is_leader else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.text(), headers={"Content-Type": "text/plain; version=0.0.4"})
