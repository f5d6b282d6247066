"""Metrics of this process and of each object that it reconciles, and the HTTP pages for probes and
Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kintsugi_operator.api.status import Condition, ConditionStatus
from kintsugi_operator.controller.queue import ObjectKey
from kintsugi_operator.objects.pods import Manifest
from kintsugi_operator.observed import conditions as c

logger = logging.getLogger(__name__)

READS = ("get", "list", "watch")
WRITES = ("delete", "patch", "post", "put")
OBJECTS_MAX = 1000
"""Maximum number of objects with their own metrics. Each has about 25 series; further objects have none."""
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LABELS = ("kind", "namespace", "name")


@dataclass
class _Seen:
    """The state of one object from which its metrics were last computed."""

    generation: int = 0
    generation_since_s: float = 0.0
    is_awaited: bool = False
    error: str = ""
    conditions: frozenset[str] = frozenset()
    """Types of the conditions that are exported."""


class OperatorMetrics:
    """Counts of requests and looks, and durations, errors, generations and conditions by object.

    A look is one reconciliation of one object. An object's metrics are dropped with the object.
    """

    def __init__(self) -> None:
        self.is_leader = False
        self.registry = CollectorRegistry()
        self._seen: dict[ObjectKey, _Seen] = {}

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"kintsugi_operator_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"kintsugi_operator_{name}", text, labels, registry=self.registry)

        gauge("leader", "Whether this operator leads").set_function(lambda: self.is_leader)
        self._waiting = gauge("waiting", "Objects that are queued for a look")
        self._looks = counter("looks", "Looks at objects: each reconciles one object once")
        self._failures = counter("failures", "Looks that failed")
        self._writes = counter("writes", "Write requests to the API server")
        self._requests = counter("requests", "Requests to the API server, except for the Lease", ["verb"])
        for verb in (*READS, *WRITES):
            self._requests.labels(verb)
        self._durations = Histogram(
            "kintsugi_operator_reconcile_seconds",
            "Duration of a look at the object",
            LABELS,
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._object_failures = counter("reconcile_failures", "Looks at the object that failed", LABELS)
        self._errors = gauge(
            "last_error_timestamp_seconds", "Time of the last failed look, by error", (*LABELS, "error")
        )
        self._ready = gauge("time_to_ready_seconds", "Time from the latest generation to ready", LABELS)
        self._lag = gauge(
            "generation_lag", "Number of generations by which the status is behind the spec", LABELS
        )
        self._conditions = gauge(
            "condition", "1 if the condition is true, 0 if false; absent if unknown", (*LABELS, "condition")
        )

    def count_request(self, verb: str) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb).inc()
        if verb in WRITES:
            self._writes.inc()

    def show_waiting(self, count: Callable[[], int]) -> None:
        """Export the result of `count` as the number of queued objects."""
        self._waiting.set_function(count)

    def count(self, name: str) -> int:
        """The value of one of the process's counters, such as `looks`."""
        return int(self.registry.get_sample_value(f"kintsugi_operator_{name}_total") or 0)

    @contextmanager
    def time_look(self, key: ObjectKey) -> Iterator[None]:
        """Measure one look at an object, and count it as failed if it raises."""
        self._looks.inc()
        seen, begun_s = self._seen_of(key), time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failures.inc()
            if seen is not None:
                self._object_failures.labels(*key).inc()
                self._set_error(key, seen, type(error).__name__)
            raise
        finally:
            # An object that was forgotten during the look has no metrics any more.
            if seen is not None and self._seen.get(key) is seen:
                self._durations.labels(*key).observe(time.perf_counter() - begun_s)

    def see(
        self, live: Manifest, observed_generation: int, conditions: Sequence[Condition], now: datetime
    ) -> None:
        """Update the metrics from an object's status. The time to ready begins when the object is created, or
        when a later generation of it is first seen."""
        metadata = live["metadata"]
        key = ObjectKey(live["kind"], metadata["namespace"], metadata["name"])
        if (seen := self._seen_of(key)) is None:
            return
        generation, is_first_sight = int(metadata.get("generation", 0)), not seen.generation
        lag = max(generation - max(observed_generation, 0), 0)
        self._lag.labels(*key).set(lag)
        self._set_conditions(key, seen, conditions)
        is_ready = lag == 0 and is_settled(conditions)
        if generation != seen.generation:
            since = datetime.fromisoformat(str(metadata.get("creationTimestamp") or now.isoformat()))
            seen.generation = generation
            seen.generation_since_s = (since if generation <= 1 else now).timestamp()
            # An operator that has just started cannot know how long a ready object took.
            seen.is_awaited = not (is_first_sight and is_ready)
        if seen.is_awaited and is_ready:
            seen.is_awaited = False
            self._ready.labels(*key).set(max(now.timestamp() - seen.generation_since_s, 0.0))

    def forget(self, key: ObjectKey) -> None:
        """Drop the metrics of an object that is gone."""
        if self._seen.pop(key, None) is None:
            return
        labels = dict(zip(LABELS, key, strict=True))
        of_objects = (self._durations, self._object_failures, self._errors, self._ready, self._lag)
        for family in (*of_objects, self._conditions):
            family.remove_by_labels(labels)

    def _seen_of(self, key: ObjectKey) -> _Seen | None:
        """The state of an object; None beyond `OBJECTS_MAX` objects."""
        if key not in self._seen:
            if len(self._seen) >= OBJECTS_MAX:
                logger.debug("more than %d objects: %s has no metrics", OBJECTS_MAX, key)
                return None
            self._seen[key] = _Seen()
            self._object_failures.labels(*key)
            self._lag.labels(*key)
        return self._seen[key]

    def _set_error(self, key: ObjectKey, seen: _Seen, error: str) -> None:
        if seen.error not in ("", error):
            self._errors.remove(*key, seen.error)
        seen.error = error
        self._errors.labels(*key, error).set_to_current_time()

    def _set_conditions(self, key: ObjectKey, seen: _Seen, conditions: Sequence[Condition]) -> None:
        known = [one for one in conditions if one.status is not ConditionStatus.UNKNOWN]
        for one in known:
            self._conditions.labels(*key, one.type).set(one.status is ConditionStatus.TRUE)
        types = frozenset(one.type for one in known)
        for type_ in seen.conditions - types:
            self._conditions.remove(*key, type_)
        seen.conditions = types

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


def is_settled(conditions: Sequence[Condition]) -> bool:
    """Whether an object is ready, and no change of its spec is still in progress."""
    status = {one.type: one.status for one in conditions}
    return (status.get(c.READY), status.get(c.RECONCILING)) == (ConditionStatus.TRUE, ConditionStatus.FALSE)
