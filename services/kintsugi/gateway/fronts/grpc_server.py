"""The gateway on gRPC: service `Kintsugi`, health, reflection, and `Precompute` where it is mounted."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.errors import InvalidField, KintsugiError, PermissionDenied, Unavailable
from kintsugi.core.exchange import EngineDelta
from kintsugi.gateway.access import Caller, OpenAccess, check_exposure
from kintsugi.gateway.addresses import format_address
from kintsugi.gateway.byte_budget import ByteBudget
from kintsugi.gateway.fronts import wire
from kintsugi.gateway.gateway import INFO_TTL_S, Finished, Gateway, Resolved
from kintsugi.gateway.logs import RequestLine
from kintsugi.gateway.tracing import TRACE_HEADERS
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.protocol.status import DETAIL_CHARS_MAX, ERROR_METADATA, error_name, status_of
from kintsugi.store.protocol.tls import ServedFiles, ServerTls, parse_address

log = logging.getLogger("kintsugi.gateway")

SERVICE = "kintsugi.rpc.v1.Kintsugi"
PRECOMPUTE_SERVICE = "kintsugi.rpc.v1.Precompute"
HEALTH_CHECK = f"/{HEALTH_SERVICE}/Check"
REQUEST_ID = "x-request-id"
HEALTH_PERIOD_S = 1.0
STOP_GRACE_S = 10.0
"""Answers under way may end; then they are cancelled."""
PAGE_DEFAULT = 100
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

Answer = TypeVar("Answer")


@dataclass
class _Call:
    """One RPC on its way."""

    method: str
    request_id: str
    metadata: Mapping[str, str]
    """What came with it."""
    began_s: float
    namespace: str = ""
    announced: asyncio.Task[None] = field(init=False)
    """Sends the initial metadata, which go before everything else."""


class KintsugiService:
    """Handlers by RPC name. Requests arrive as bytes: one that is no message is the client's mistake, which
    gRPC's own decoding would report as ours."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._budget = ByteBudget(gateway.limits.messages_bytes_max)

    def generic_handler(self) -> Any:
        unary: dict[str, tuple[Any, Callable[[Caller, Any], Awaitable[Any]]]] = {
            "PutChunk": (pb.PutChunkRequest, self.put_chunk),
            "PutChunks": (pb.PutChunksRequest, self.put_chunks),
            "GetChunk": (pb.GetChunkRequest, self.get_chunk),
            "DeleteChunk": (pb.DeleteChunkRequest, self.delete_chunk),
            "ListChunks": (pb.ListChunksRequest, self.list_chunks),
            "Prefetch": (pb.PrefetchChunksRequest, self.prefetch),
            "Tokenize": (pb.TokenizeRequest, self.tokenize),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name, message, handler), response_serializer=_serialize_message
            )
            for name, (message, handler) in unary.items()
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            self._generate, response_serializer=_serialize_message
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _unary(
        self, method: str, message: Any, handler: Callable[[Caller, Any], Awaitable[Any]]
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def answered(data: bytes, context: Any) -> Any:
            async with self.guarded(method, context) as call:
                caller = self._caller(call)
                with self._budget.held(len(data)):
                    request = _parsed(message, data)
                    call.namespace = request.namespace
                    return await handler(caller, request)

        return answered

    @asynccontextmanager
    async def guarded(self, method: str, context: Any) -> AsyncIterator[_Call]:
        """Our errors become statuses; every call is counted and logged."""
        call = _begin_call(method, context)
        announcement = context.send_initial_metadata(((REQUEST_ID, call.request_id),))
        try:
            async with _beside(announcement) as call.announced:
                yield call
        except KintsugiError as error:
            self._record_call(call, status_of(error).name, error)
            await _refuse(context, error)
        except asyncio.CancelledError:
            self._record_call(call, "CANCELLED")
            raise
        except Exception as defect:
            self._record_call(call, "INTERNAL", defect)
            log.exception("request %s met a defect", call.request_id)
            await context.abort(
                grpc.StatusCode.INTERNAL, f"a defect of the gateway; its log has request {call.request_id}"
            )
        else:
            self._record_call(call, "OK")

    def _record_call(self, call: _Call, status: str, error: Exception | None = None) -> None:
        """One metric and one line of JSON: never what was asked or answered."""
        self.gateway.metrics.ended(call.method, status)
        if not log.isEnabledFor(logging.INFO):
            return
        log.info(RequestLine.of(call.request_id, call.method, call.namespace, status, call.began_s, error))

    def _caller(self, call: _Call) -> Caller:
        return self.gateway.access.caller(bearer_of(call.metadata.get("authorization")))

    async def _generate(self, data: bytes, context: Any) -> None:
        """Writes its messages itself: a cancelled call is then cancelled here, and ends in the engine."""
        async with self.guarded("Generate", context) as call:
            caller = self._caller(call)
            with self._budget.held(len(data)):
                await self._answer(call, caller, data, context)

    async def _answer(self, call: _Call, caller: Caller, data: bytes, context: Any) -> None:
        request = _parsed(pb.GenerateRequest, data)
        call.namespace = request.namespace
        headers = {name: call.metadata[name] for name in TRACE_HEADERS if name in call.metadata}
        asked = wire.call_of(request, call.request_id, headers)
        async with (
            aclosing(self.gateway.generate(caller, asked)) as events,
            # The engine is asked while the first message is on its way.
            _beside(_first_written(call, context, await anext(events))) as first,
        ):
            async for event in events:
                await first
                await context.write(wire.event_to_wire(event))

    async def put_chunk(self, caller: Caller, request: pb.PutChunkRequest) -> pb.PutChunkResponse:
        (put,) = await self.gateway.put_chunks(
            caller,
            request.namespace,
            [wire.content_of(request.chunk, "chunk")],
            tier=request.tier,
            wait=request.wait,
        )
        return pb.PutChunkResponse(result=wire.put_to_wire(put))

    async def put_chunks(self, caller: Caller, request: pb.PutChunksRequest) -> pb.PutChunksResponse:
        puts = await self.gateway.put_chunks(
            caller,
            request.namespace,
            wire.contents_of(request.chunks, "chunks"),
            tier=request.tier,
            wait=request.wait,
        )
        return pb.PutChunksResponse(results=map(wire.put_to_wire, puts))

    async def get_chunk(self, caller: Caller, request: pb.GetChunkRequest) -> pb.GetChunkResponse:
        key = wire.key_of(request.key, "key")
        chunk = await self.gateway.get_chunk(caller, request.namespace, key)
        return pb.GetChunkResponse(chunk=wire.chunk_to_wire(chunk))

    async def delete_chunk(self, caller: Caller, request: pb.DeleteChunkRequest) -> pb.DeleteChunkResponse:
        key = wire.key_of(request.key, "key")
        deleted = await self.gateway.delete_chunk(caller, request.namespace, key)
        return pb.DeleteChunkResponse(deleted=deleted)

    async def list_chunks(self, caller: Caller, request: pb.ListChunksRequest) -> pb.ListChunksResponse:
        after = wire.key_of(request.page_token, "page_token") if request.page_token else None
        size = request.page_size or PAGE_DEFAULT
        chunks = await self.gateway.list_chunks(caller, request.namespace, size, after)
        token = chunks[-1].manifest.key.hex if len(chunks) == size else ""
        return pb.ListChunksResponse(chunks=map(wire.chunk_to_wire, chunks), next_page_token=token)

    async def prefetch(self, caller: Caller, request: pb.PrefetchChunksRequest) -> pb.PrefetchChunksResponse:
        segments = wire.segments_of(request.segments)
        keys, accepted = await self.gateway.prefetch(caller, request.namespace, segments)
        return pb.PrefetchChunksResponse(keys=[key.hex if key else "" for key in keys], accepted=accepted)

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        pieces = await self.gateway.tokenize(caller, request.namespace, list(request.texts))
        texts = [pb.TokenizedText(token_ids=piece.token_ids, key=piece.key.hex) for piece in pieces]
        return pb.TokenizeResponse(texts=texts)


def _begin_call(method: str, context: Any) -> _Call:
    metadata = _texts(context.invocation_metadata())
    given = metadata.get(REQUEST_ID, "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return _Call(method, request_id, metadata, time.perf_counter())


async def _first_written(call: _Call, context: Any, event: Resolved | EngineDelta | Finished) -> None:
    await call.announced
    await context.write(wire.event_to_wire(event))


@asynccontextmanager
async def _beside(work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    """It runs while the block does, and has ended when the block has. Raises what it raises, where the block
    does not raise itself."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await asyncio.gather(task, return_exceptions=True)
    await task


def _serialize_message(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _parsed(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise InvalidField(
            "request", f"is no {message.DESCRIPTOR.full_name} ({error}); use stubs of this proto"
        ) from None


def _texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Metadata by name, without what is no text. Asking gRPC for it makes it anew."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def bearer_of(header: str | None) -> str | None:
    """The token in `Bearer TOKEN`; None for anything else."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def _refuse(context: Any, error: KintsugiError) -> None:
    context.set_trailing_metadata(((ERROR_METADATA, error_name(error)),))
    await context.abort(status_of(error), str(error)[:DETAIL_CHARS_MAX])


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Tokens, before a message is received: what a stranger sends is neither kept nor parsed.

    Jobs read any file that the server may and write into any namespace: they need a token for all.
    Kubernetes' probes, which have none, check the health; everything else needs a token. A watch of the
    health and reflection hold one of the bounded places for as long as they like.
    """

    def __init__(self, gateway: Gateway, service: KintsugiService, health: Any) -> None:
        self._gateway = gateway
        self._service = service
        self._health = health

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return handler
        try:
            token = bearer_of(_texts(details.invocation_metadata).get("authorization"))
            caller = self._gateway.access.caller(token)
            if details.method.startswith(f"/{PRECOMPUTE_SERVICE}/") and not caller.unrestricted:
                raise PermissionDenied("jobs may use every namespace: they need a token bound to `*`")
        except KintsugiError as error:
            if details.method == HEALTH_CHECK:
                return _build_refusal_handler(self._answer_health, HealthCheckResponse.SerializeToString)
            return _build_refusal_handler(self._refuse_path(details.method, error))
        return handler

    async def _answer_health(self, requests: Any, context: Any) -> None:
        """The whole gateway's health, whatever the stranger's message asks for."""
        await context.write(await self._health.Check(HealthCheckRequest(), context))

    def _refuse_path(self, path: str, error: KintsugiError) -> Callable[[Any, Any], Awaitable[None]]:
        async def refuse(requests: Any, context: Any) -> None:
            _, service, method = path.split("/")
            if service != SERVICE:
                await _refuse(context, error)
            async with self._service.guarded(method, context):
                raise error

        return refuse


def _build_refusal_handler(answer: Callable[[Any, Any], Awaitable[None]], serialize: Any = None) -> Any:
    """A handler that ends a call without its messages. gRPC reads one that it knows to be single before it
    asks the handler; a stream's only when they are asked for: until then flow control holds them back."""
    return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)


class _Health(health_aio.HealthServicer):  # type: ignore[misc]
    """Whoever watches is no answer that a stop has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._watching: set[asyncio.Task[None]] = set()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  # gRPC calls it so
        watching = asyncio.ensure_future(super().Watch(request, context))
        self._watching.add(watching)
        try:
            # To cancel the call's own task would leave the client without a status.
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

    def __init__(self, gateway: Gateway, spec: GatewaySpec, precompute: Any = None) -> None:
        """``precompute``: a `precompute.service.PrecomputeServicer` to serve as well.

        Raises `InvalidField` for what is no address, and for one beyond loopback without tokens and TLS.
        """
        self.gateway = gateway
        self._listen = format_address(spec.host, spec.grpc_port)
        parse_address("gateway", self._listen)
        self._tls = load_gateway_tls(spec)
        has_tokens = not isinstance(gateway.access, OpenAccess)
        check_exposure(self._listen, has_tokens, self._tls is not None, spec.insecure)
        self._precompute = precompute
        self._health: asyncio.Task[None] | None = None
        self.address = ""
        """`host:port` that it listens on, once started."""

    async def start(self) -> None:
        """Raises `Unavailable` where the address cannot be had, `InvalidField` for unreadable TLS files."""
        limits = self.gateway.limits
        service, self._watched = KintsugiService(self.gateway), _Health()
        self._server = grpc.aio.server(
            interceptors=(_Guard(self.gateway, service, self._watched),),
            maximum_concurrent_rpcs=limits.concurrent_max,
            options=(
                ("grpc.max_receive_message_length", limits.message_bytes_max),
                ("grpc.so_reuseport", 0),
            ),
        )
        services = [SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE]
        self._server.add_generic_rpc_handlers((service.generic_handler(),))
        if self._precompute is not None:
            from kintsugi.rpc.v1.precompute_pb2_grpc import add_PrecomputeServicer_to_server

            add_PrecomputeServicer_to_server(self._precompute, self._server)
            services.append(PRECOMPUTE_SERVICE)
        add_HealthServicer_to_server(self._watched, self._server)
        enable_server_reflection(services, self._server)
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(self._listen)
            else:
                port = self._server.add_secure_port(self._listen, ServerTls(self._tls).credentials)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._listen}: {error}") from error
        self.address = f"{self._listen.rsplit(':', 1)[0]}:{port}"
        await self._server.start()
        self._health = asyncio.create_task(self._report_health())

    async def _report_health(self) -> None:
        """Serving while an engine answers."""
        while True:
            try:
                await self.gateway.recent_info.get(INFO_TTL_S)
                status = HealthCheckResponse.SERVING
            except KintsugiError:
                status = HealthCheckResponse.NOT_SERVING
            except Exception:
                log.exception("no engine can be asked what it serves")
                status = HealthCheckResponse.NOT_SERVING
            for service in ("", SERVICE):
                await self._watched.set(service, status)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Let answers end for `grace_s`. Idempotent."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
            self._health = None
            stopped = asyncio.create_task(self._server.stop(grace_s))
            await asyncio.sleep(0)  # nobody comes to watch any more
            self._watched.end()
            await stopped


def load_gateway_tls(spec: GatewaySpec) -> ServedFiles | None:
    """The gateway's TLS files; None without. Raises `InvalidField`."""
    if not (spec.tls_cert or spec.tls_key or spec.tls_client_ca):
        return None
    if not (spec.tls_cert and spec.tls_key):
        raise InvalidField("gateway", "tls_cert and tls_key belong together, and tls_client_ca needs both")
    client_ca = Path(spec.tls_client_ca) if spec.tls_client_ca else None
    return ServedFiles(Path(spec.tls_cert), Path(spec.tls_key), client_ca)


async def serve(
    gateway: Gateway,
    spec: GatewaySpec,
    until: Callable[[], Awaitable[Any]],
    *,
    on_ready: Callable[[str], None] = lambda address: None,
    precompute: Any = None,
) -> None:
    """Serve gRPC until ``until`` returns, then close the gateway. HTTP beside it is `openai_server`'s.

    ``on_ready`` is told the `host:port`. Raises what `GatewayServer` raises.
    """
    server = GatewayServer(gateway, spec, precompute)
    try:
        await server.start()
        on_ready(server.address)
        await until()
    finally:
        await server.stop()
        await gateway.close()
