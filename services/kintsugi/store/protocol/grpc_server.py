"""A gRPC server with the limits, TLS, health and reflection of every port.

This module bounds what a peer can send before its caller is authenticated. Compression is off: a small
message could decompress to a large one. gRPC refuses a message that exceeds the limit by the length in front
of it, and flow control holds a stream's messages back until its handler reads. Every handler is therefore
registered as a stream (unary calls look the same on the wire), authenticates its caller, reads, and parses:
gRPC would report a malformed message as a server error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    Unauthenticated,
    Unavailable,
)
from kintsugi.store.protocol.access import Access, identify_call
from kintsugi.store.protocol.grpc_status import abort_call
from kintsugi.store.protocol.quota import SLOTS, Quota
from kintsugi.store.protocol.tls import ServerTls, TlsFiles
from kintsugi.store.protocol.wire import PING_OPTIONS, PING_S

METADATA_BYTES_MAX = 8 << 10
HANDSHAKE_S = 10.0
"""Maximum time for the TLS and HTTP/2 handshakes."""
IDLE_S = 30.0
"""Time after which a connection without a complete call is closed. Clients reconnect automatically."""
STREAMS_MAX = 768
"""Maximum number of streams of one connection. It exceeds the slots of one caller, so that a refusal names
the limit. A call without a valid token needs 16 KiB until it is refused, so all streams of a connection need
12 MiB."""
MESSAGE_READ_S = 30.0
"""Maximum time until a whole message has arrived."""
WATCHES_MAX = 512
"""Maximum number of health watches and reflection streams, which can stay open forever."""
HEALTH_CHECK = f"/{HEALTH_SERVICE}/Check"
_IDENTITY_ALONE = 1
"""Bit set of the enabled compression algorithms: only `identity`."""


class GrpcServer:
    """One listening address. For the event loop that starts it."""

    def __init__(
        self,
        listen: str,
        tls: TlsFiles | None,
        access: Access,
        *,
        message_bytes_max: int,
        watches_max: int = WATCHES_MAX,
        setting: str = "address",
    ) -> None:
        """`listen`: `host:port`; port 0: any free one. `access` identifies the callers of health and
        reflection. `setting`: the name of the address's setting, for errors."""
        self._listen = listen
        self._tls = tls
        self._setting = setting
        self._message_bytes_max = message_bytes_max
        self._health = _Health()
        self._guard = _Guard(access, self._health, watches_max)
        self._server: Any = None
        self.address = ""
        """Address `host:port`; empty before `start`."""

    async def start(self, service: str, handler: Any) -> None:
        """Serve the generic handler of a service. Raises `Unavailable` if the address cannot be bound,
        `InvalidField` for unreadable TLS files."""
        server = grpc.aio.server(interceptors=(self._guard,), options=self._options())
        server.add_generic_rpc_handlers((handler,))
        add_HealthServicer_to_server(self._health, server)
        enable_server_reflection([service, HEALTH_SERVICE, REFLECTION_SERVICE], server)
        try:
            if self._tls is None:
                port = server.add_insecure_port(self._listen)
            else:
                port = server.add_secure_port(self._listen, ServerTls(self._tls).credentials)
        except RuntimeError as error:
            hint = "" if self._tls is None else " (or the TLS files are not matching PEM files)"
            raise Unavailable(
                f"cannot listen on {self._listen}: {error}{hint}; name another {self._setting} (port 0: any "
                "free one)"
            ) from error
        self.address = f"{self._listen.rsplit(':', 1)[0]}:{port}"
        await server.start()
        self._server = server

    def _options(self) -> tuple[tuple[str, int], ...]:
        return (
            ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ALONE),
            ("grpc.max_receive_message_length", self._message_bytes_max),
            ("grpc.max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
            # A limit for all calls would also count unauthenticated ones; a `Quota` limits the others.
            ("grpc.max_concurrent_streams", STREAMS_MAX),
            ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
            ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
            *PING_OPTIONS,
            # gRPC's 5 minutes would make a server disconnect clients that ping as often as it does.
            ("grpc.http2.min_ping_interval_without_data_ms", int(PING_S * 500)),
            # Otherwise a second server on the same port would silently take some of the connections.
            ("grpc.so_reuseport", 0),
        )

    async def set_health(self, service: str, is_serving: bool) -> None:
        """Report the health of a service; an empty name stands for the server."""
        status = HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Stop the server, and wait up to `grace_s` for calls to end. Idempotent."""
        if self._server is not None:
            stopped = asyncio.create_task(self._server.stop(grace_s))
            await asyncio.sleep(0)  # from now on no watch begins
            self._health.end()
            await stopped


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


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Authenticates the callers of health and reflection, whose services do not.

    Only the health check needs no token, because Kubernetes' probes have none.
    """

    def __init__(self, access: Access, health: _Health, watches_max: int) -> None:
        self._access = access
        self._health = health
        self._slots = Quota(watches_max, SLOTS, shared=access.has_tokens)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        service = details.method.rpartition("/")[0]
        if handler is None or service not in (f"/{HEALTH_SERVICE}", f"/{REFLECTION_SERVICE}"):
            return handler

        async def answer(requests: Any, context: Any) -> None:
            try:
                await self._answer(handler, details.method, requests, context)
            except KintsugiError as error:
                await abort_call(context, error)

        return build_handler(answer, handler.response_serializer)

    async def _answer(self, handler: Any, method: str, requests: Any, context: Any) -> None:
        try:
            caller = identify_call(self._access, context)
        except Unauthenticated:
            if method != HEALTH_CHECK:
                raise
            # The message is not read.
            await context.write(await self._health.Check(HealthCheckRequest(), context))
            return
        with self._slots.hold(caller.name):
            await _run_handler(handler, requests, context)


async def _run_handler(handler: Any, requests: Any, context: Any) -> None:
    """Run a handler of grpcio's own services. Raises `InvalidField` and `DeadlineExceeded`."""
    parse = handler.request_deserializer
    if handler.request_streaming:
        async for response in handler.stream_stream(_parse_all(parse, requests), context):
            await context.write(response)
        return
    request = _parse(parse, await read_message(context))
    if handler.response_streaming:
        await handler.unary_stream(request, context)
    else:
        await context.write(await handler.unary_unary(request, context))


async def _parse_all(parse: Callable[[bytes], Any], messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parse(parse, message)


def _parse(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidField("request", f"is not a valid message of this method ({error})") from None


async def read_message(context: Any) -> bytes:
    """Return the message of a call. Raises `InvalidField` if there is none, and `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(MESSAGE_READ_S):
            data = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"no message arrived within {MESSAGE_READ_S:.0f} s; send it faster") from None
    if data is grpc.aio.EOF:
        raise InvalidField("request", "was not sent; send one message")
    return bytes(data)


def build_handler(answer: Callable[[Any, Any], Awaitable[None]], serialize: Any = None) -> Any:
    """Build the handler of a method, which is called with an iterator of the messages (bytes) and the call's
    context before a message is received."""
    return grpc.stream_stream_rpc_method_handler(answer, None, serialize)
