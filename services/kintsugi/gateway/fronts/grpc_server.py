"""The gateway on gRPC: its address, TLS and limits, and the services `Kintsugi`, health and reflection."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.errors import InvalidField, KintsugiError, Unavailable
from kintsugi.gateway.access import check_exposure
from kintsugi.gateway.addresses import format_address
from kintsugi.gateway.chunks import INFO_TTL_S
from kintsugi.gateway.fronts.grpc_service import SERVICE, Guard, KintsugiService
from kintsugi.gateway.gateway import Gateway
from kintsugi.store.protocol.tls import SERVER_OPTIONS, ServerTls, TlsFiles, parse_address

log = logging.getLogger("kintsugi.gateway")

HEALTH_PERIOD_S = 1.0
STOP_GRACE_S = 10.0
"""Maximum time for which a stop waits for answers before it cancels them."""
STREAMS_MAX = 768
"""Maximum number of streams of one connection. It exceeds the slots of one caller, so that a refusal names
the limit. A call without a valid token needs 16 KiB until it is refused, so all streams of a connection need
12 MiB."""
IDLE_S = 30.0
"""Time after which a connection without a complete call is closed. Clients reconnect automatically."""


class _Health(health_aio.HealthServicer):  # type: ignore[misc]
    """The health service, whose watches do not delay a stop."""

    def __init__(self) -> None:
        super().__init__()
        self._watching: set[asyncio.Task[None]] = set()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  # gRPC calls it so
        watching = asyncio.ensure_future(super().Watch(request, context))
        self._watching.add(watching)
        try:
            # Cancelling the call's own task would leave the client without a status.
            await asyncio.wait((watching,))
            if not watching.cancelled():
                watching.result()
        finally:
            self._watching.discard(watching)
            watching.cancel()

    def end(self) -> None:
        for watching in self._watching:
            watching.cancel()


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
        service, self._watched = KintsugiService(self.gateway), _Health()
        self._server = grpc.aio.server(
            interceptors=(Guard(self.gateway, self._watched),),
            # A limit for all calls would also count unauthenticated ones; a `Quota` limits the others.
            options=(
                *SERVER_OPTIONS,
                ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
                ("grpc.max_receive_message_length", limits.message_bytes_max),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
            ),
        )
        self._server.add_generic_rpc_handlers((service.generic_handler(),))
        add_HealthServicer_to_server(self._watched, self._server)
        enable_server_reflection([SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE], self._server)
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(self._listen)
            else:
                port = self._server.add_secure_port(self._listen, ServerTls(self._tls).credentials)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {self._listen}: {error}; name another gateway.grpc_port (0: any free one)"
            ) from error
        self.address = f"{self._listen.rsplit(':', 1)[0]}:{port}"
        await self._server.start()
        self._health = asyncio.create_task(self._report_health())

    async def _report_health(self) -> None:
        """Report `SERVING` while an engine answers."""
        while True:
            try:
                await self.gateway.recent_info.get(INFO_TTL_S)
                status = HealthCheckResponse.SERVING
            except KintsugiError:
                status = HealthCheckResponse.NOT_SERVING
            except Exception:
                log.exception("the engines' health cannot be determined")
                status = HealthCheckResponse.NOT_SERVING
            for service in ("", SERVICE):
                await self._watched.set(service, status)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the server, and wait up to ``grace_s`` for answers to end. Idempotent."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
            self._health = None
            stopped = asyncio.create_task(self._server.stop(grace_s))
            await asyncio.sleep(0)  # from now on no watch begins
            self._watched.end()
            await stopped


def load_gateway_tls(spec: GatewaySpec) -> TlsFiles | None:
    """Return the gateway's TLS files; None without TLS. Raises `InvalidField`."""
    if not (spec.tls_cert or spec.tls_key or spec.expert.tls_client_ca):
        return None
    if not (spec.tls_cert and spec.tls_key):
        raise InvalidField("gateway", "tls_cert and tls_key belong together, and tls_client_ca needs both")
    client_ca = Path(spec.expert.tls_client_ca) if spec.expert.tls_client_ca else None
    return TlsFiles(client_ca, Path(spec.tls_cert), Path(spec.tls_key))
