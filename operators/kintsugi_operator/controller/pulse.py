"""Whether this process is alive, whether it leads, and what it has done: for probes and Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from kintsugi_operator.controller.cluster import Cluster, Resource
from kintsugi_operator.objects.pods import Manifest


class Pulse:
    """Counts, and the pages that show them."""

    def __init__(self) -> None:
        self.is_leader = False
        self.looks = 0
        self.failures = 0
        self.writes = 0
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

    def text(self) -> str:
        """In Prometheus' format."""
        rows = (
            ("leader", "gauge", "Whether this operator leads", int(self.is_leader)),
            ("looks_total", "counter", "Objects that were looked at", self.looks),
            ("failures_total", "counter", "Looks that failed", self.failures),
            ("writes_total", "counter", "Requests that changed the cluster", self.writes),
            ("waiting", "gauge", "Objects that will be looked at again", self.waiting()),
        )
        lines = []
        for name, kind, help_text, value in rows:
            full = f"kintsugi_operator_{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return "\n".join(lines) + "\n"

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _leader(self, request: web.Request) -> web.Response:
        return web.json_response({"leader": self.is_leader}, status=200 if self.is_leader else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


class Counted(Cluster):
    """A cluster whose writes are counted."""

    def __init__(self, inner: Cluster, pulse: Pulse) -> None:
        self._inner = inner
        self._pulse = pulse

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        return await self._inner.get(resource, namespace, name)

    async def list(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> list[Manifest]:
        return await self._inner.list(resource, namespace, labels)

    async def served(self, api_version: str) -> frozenset[str]:
        return await self._inner.served(api_version)

    async def apply(self, manifest: Manifest) -> Manifest:
        self._pulse.writes += 1
        return await self._inner.apply(manifest)

    async def apply_status(self, manifest: Manifest) -> None:
        self._pulse.writes += 1
        await self._inner.apply_status(manifest)

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Manifest) -> None:
        self._pulse.writes += 1
        await self._inner.merge(resource, namespace, name, patch)

    async def create(self, manifest: Manifest) -> None:
        self._pulse.writes += 1
        await self._inner.create(manifest)

    async def replace(self, manifest: Manifest) -> None:
        self._pulse.writes += 1
        await self._inner.replace(manifest)

    async def delete(self, resource: Resource, namespace: str, name: str) -> None:
        self._pulse.writes += 1
        await self._inner.delete(resource, namespace, name)

    async def evict(self, namespace: str, pod: str) -> bool:
        self._pulse.writes += 1
        return await self._inner.evict(namespace, pod)
