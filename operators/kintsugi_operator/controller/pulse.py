"""Health, leadership and counts of this process, for probes and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

READS = ("get", "list", "watch")
WRITES = ("delete", "patch", "post", "put")


class Pulse(Collector):
    """Counts, and the HTTP pages that show them."""

    def __init__(self) -> None:
        self.is_leader = False
        self.looks = 0
        self.failures = 0
        self.requests = Counter(dict.fromkeys((*READS, *WRITES), 0))
        """By verb. The Lease's are not among them."""
        self.waiting: Callable[[], int] = lambda: 0

    async def serve(self, port: int) -> web.AppRunner:
        """`/healthz` answers while the loop runs, which a standby's does too; `/leader` tells them apart;
        `/metrics`. The kubelet and Prometheus ask at the pod's address."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/leader", self._leader)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port).start()
        return runner

    def count_request(self, verb: str) -> None:
        """Count a request to the API server."""
        self.requests[verb] += 1

    @property
    def writes(self) -> int:
        """Number of requests that may have changed the cluster."""
        return sum(self.requests[verb] for verb in WRITES)

    def collect(self) -> Iterator[Metric]:
        """The metrics, as Prometheus' client wants them."""
        name = "kintsugi_operator_{}".format
        yield GaugeMetricFamily(name("leader"), "Whether this operator leads", int(self.is_leader))
        yield CounterMetricFamily(name("looks"), "Objects that were looked at", self.looks)
        yield CounterMetricFamily(name("failures"), "Looks that failed", self.failures)
        yield CounterMetricFamily(name("writes"), "Requests that changed the cluster", self.writes)
        requests = CounterMetricFamily(
            name("requests"), "Requests to the API server, the Lease's apart", labels=["verb"]
        )
        for verb, count in sorted(self.requests.items()):
            requests.add_metric([verb], count)
        yield requests
        yield GaugeMetricFamily(name("waiting"), "Objects that will be looked at again", self.waiting())

    def text(self) -> str:
        """The metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _leader(self, request: web.Request) -> web.Response:
        return web.json_response({"leader": self.is_leader}, status=200 if self.is_leader else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.text(), headers={"Content-Type": "text/plain; version=0.0.4"})
