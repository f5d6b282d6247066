"""The deployment `GatewayReplica`: gRPC and HTTP on its own ports, and the engines through Serve's handle.

No request passes through Serve's proxy. A changed gateway configuration closes the ports and opens them again
in the same process, without effect on engines.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Mapping
from typing import Any

from kintsugi.core.deploy import DRAIN_S, GatewaySpec, ModelSpec
from kintsugi.core.errors import Unavailable
from kintsugi.core.exchange import EngineBackend
from kintsugi.core.namespaces import NamespaceRules
from kintsugi.core.schema import load
from kintsugi.gateway.fronts.grpc_server import STOP_GRACE_S, GatewayServer, load_gateway_tls
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.gateway import Gateway as Front
from kintsugi.gateway.logs import write_json_lines
from kintsugi.gateway.repeating import Repeating
from kintsugi.gateway.tracing import start_export
from kintsugi.serving.directory import reachable
from kintsugi.serving.lost_parts import LostParts
from kintsugi.serving.ray_backend import RayBackend
from kintsugi.serving.replica_ports import keep_replica_on_loopback

log = logging.getLogger(__name__)

OPEN_FILES_MAX = 1 << 16
LOST_PERIOD_S = 2.0
"""Interval between searches for lost processes; a search takes about 2 ms."""


def raise_file_limit() -> None:
    """Increase this process's limit of open files, so that unauthenticated connections cannot exhaust it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class OpenGateway:
    """A gateway with open ports, until `close`."""

    def __init__(self, front: Front, grpc: GatewayServer, http: HttpServer) -> None:
        self.front = front
        self.grpc = grpc
        self.http = http

    @staticmethod
    async def open(
        spec: GatewaySpec,
        backend: EngineBackend,
        store_url: str,
        model: str,
        rules: NamespaceRules | None = None,
    ) -> OpenGateway:
        """Open both ports. Raises `Unavailable` if one cannot be bound, `InvalidField` for an invalid
        `spec`."""
        front = await Front.open(spec, backend, store_url, model, rules)
        grpc = GatewayServer(front, spec)
        http = HttpServer(HttpFront(front).app, spec.host, spec.http_port, load_gateway_tls(spec))
        opened = OpenGateway(front, grpc, http)
        try:
            await grpc.start()
            await http.start()
        except BaseException:
            await opened.close()
            raise
        return opened

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Close the ports, and let running answers finish for at most `grace_s`. Idempotent."""
        await asyncio.gather(self.http.stop(grace_s), self.grpc.stop(grace_s))
        await self.front.close()


class GatewayReplica:
    """A replica of the gateway."""

    def __init__(self, engines: Any, model: Mapping[str, Any], store_url: str) -> None:
        write_json_lines()
        keep_replica_on_loopback()
        raise_file_limit()
        if start_export():
            log.info("traces are exported as configured by the OTEL_* variables")
        self._lost = LostParts()
        self._backend = RayBackend(engines, self._lost)
        self._watch = Repeating("lost-parts", self._report_losses, LOST_PERIOD_S)
        self._model = load(ModelSpec, model, "model").path
        self._store_url = reachable(store_url)
        self._spec: GatewaySpec | None = None
        self._opened: OpenGateway | None = None

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """Serve calls it at start and when `user_config` changes."""
        spec = load(GatewaySpec, config["gateway"], "gateway")
        given = {name: config[name] for name in ("limits", "privacy") if name in config}
        rules = load(NamespaceRules, given)
        if spec == self._spec and self._opened is not None:
            self._opened.front.set_rules(rules)
            return
        await self._close()
        self._opened = await OpenGateway.open(spec, self._backend, self._store_url, self._model, rules)
        if self._spec is None:
            self._watch.start()
        self._spec = spec
        log.info("listening on %s", self.addresses())

    async def _report_losses(self) -> None:
        for lost in await asyncio.to_thread(self._lost.find_new):
            if self._opened is not None:
                self._opened.front.report_loss(lost)

    def addresses(self) -> dict[str, str]:
        """Return `host:port` by protocol. Raises `Unavailable` while no port is open."""
        if self._opened is None:
            raise Unavailable("the gateway is not open")
        return {"grpc": self._opened.grpc.address, "http": self._opened.http.address}

    def check_health(self) -> None:
        self.addresses()

    async def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close(DRAIN_S)

    async def __del__(self) -> None:
        await self._watch.close()
        await self._close()
