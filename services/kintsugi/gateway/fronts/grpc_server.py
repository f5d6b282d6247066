"""The gateway on gRPC: its address, TLS and health."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.gateway.access import check_exposure
from kintsugi.gateway.addresses import format_address
from kintsugi.gateway.chunks import INFO_TTL_S
from kintsugi.gateway.fronts.grpc_service import SERVICE, KintsugiService
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.grpc_server import GrpcServer
from kintsugi.store.protocol.tls import TlsFiles, parse_address

log = logging.getLogger("kintsugi.gateway")

HEALTH_PERIOD_S = 1.0
STOP_GRACE_S = 10.0
"""Maximum time for which a stop waits for answers before it cancels them."""


class GatewayServer:
    """One gRPC server around a gateway, on the running event loop."""

    def __init__(self, gateway: Gateway, spec: GatewaySpec) -> None:
        """Raises `InvalidField` for an invalid address, or one beyond loopback without tokens and TLS."""
        self.gateway = gateway
        self._listen = format_address(spec.host, spec.grpc_port)
        parse_address("gateway", self._listen)
        self._tls = load_gateway_tls(spec)
        check_exposure(self._listen, gateway.access.has_tokens, self._tls is not None, spec.insecure)
        gateway.metrics.certificate.read_s = None if self._tls is None else self._tls.expires_s
        self._health: asyncio.Task[None] | None = None
        self.address = ""
        """Address `host:port`; empty before `start`."""

    async def start(self) -> None:
        """Raises `Unavailable` if the address cannot be bound, `InvalidField` for unreadable TLS files."""
        limits = self.gateway.limits
        self._server = GrpcServer(
            self._listen,
            self._tls,
            self.gateway.access,
            message_bytes_max=limits.message_bytes_max,
            watches_max=limits.watches_max,
            setting="gateway.grpc_port",
        )
        await self._server.start(SERVICE, KintsugiService(self.gateway).generic_handler())
        self.address = self._server.address
        self._health = asyncio.create_task(self._report_health())

    async def _report_health(self) -> None:
        """Report `SERVING` while an engine answers."""
        while True:
            try:
                await self.gateway.recent_info.get(INFO_TTL_S)
                is_serving = True
            except KintsugiError:
                is_serving = False
            except Exception:
                log.exception("the engines' health cannot be determined")
                is_serving = False
            for service in ("", SERVICE):
                await self._server.set_health(service, is_serving)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the server, and wait up to ``grace_s`` for answers to end. Idempotent."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
            self._health = None
            await self._server.stop(grace_s)


def load_gateway_tls(spec: GatewaySpec) -> TlsFiles | None:
    """Return the gateway's TLS files; None without TLS. Raises `InvalidField`."""
    if not (spec.tls_cert or spec.tls_key or spec.expert.tls_client_ca):
        return None
    if not (spec.tls_cert and spec.tls_key):
        raise InvalidField("gateway", "tls_cert and tls_key belong together, and tls_client_ca needs both")
    client_ca = Path(spec.expert.tls_client_ca) if spec.expert.tls_client_ca else None
    return TlsFiles(client_ca, Path(spec.tls_cert), Path(spec.tls_key))
