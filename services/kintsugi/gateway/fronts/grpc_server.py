"""The gateway on gRPC: service `Kintsugi`, health and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.errors import DeadlineExceeded, InvalidField, KintsugiError, Unavailable
from kintsugi.core.exchange import EngineDelta
from kintsugi.core.namespaces import check_sent_once, narrow_by_headers
from kintsugi.gateway.access import check_exposure
from kintsugi.gateway.addresses import format_address
from kintsugi.gateway.fronts import wire
from kintsugi.gateway.fronts.errors import grpc_status_of
from kintsugi.gateway.fronts.limits import BODY_READ_S, BYTES, SLOTS, Quota
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import Finished, Resolved
from kintsugi.gateway.recent_info import INFO_TTL_S
from kintsugi.gateway.requests import REQUEST_ID, ServedRequest
from kintsugi.gateway.texts.segments import Segment
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.protocol.access import identities_of_call
from kintsugi.store.protocol.callers import Caller, parse_bearer
from kintsugi.store.protocol.grpc_status import abort_call
from kintsugi.store.protocol.tls import SERVER_OPTIONS, ServerTls, TlsFiles, parse_address

log = logging.getLogger("kintsugi.gateway")

SERVICE = "kintsugi.rpc.v1.Kintsugi"
HEALTH_CHECK = f"/{HEALTH_SERVICE}/Check"
HEALTH_PERIOD_S = 1.0
STOP_GRACE_S = 10.0
"""Maximum time for which a stop waits for answers before it cancels them."""
STREAMS_MAX = 768
"""Maximum number of streams of one connection. It exceeds the slots of one caller, so that a refusal names
the limit. A call without a valid token needs 16 KiB until it is refused, so all streams of a connection need
12 MiB."""
IDLE_S = 30.0
"""Time after which a connection without a complete call is closed. Clients reconnect automatically."""
PAGE_DEFAULT = 100
KEY_CHARS = 64
"""Length of a chunk key in hexadecimal."""


class KintsugiService:
    """The handlers of the service's RPCs.

    All of them are registered as streams, which look the same on the wire. For a unary RPC, gRPC would
    receive the message before it calls the handler, and thus before the caller is authenticated. Messages are
    decoded here, because gRPC would report a malformed one as a server error.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        limits, shared = gateway.limits, gateway.access.has_tokens
        self._memory = Quota(limits.messages_bytes_max, BYTES, shared=shared)
        self._slots = Quota(limits.concurrent_max, SLOTS, shared=shared)

    def generic_handler(self) -> Any:
        unary: dict[str, tuple[Any, Callable[[Caller, Any], Awaitable[Any]]]] = {
            "PutChunk": (pb.PutChunkRequest, self.put_chunk),
            "PutChunks": (pb.PutChunksRequest, self.put_chunks),
            "GetChunk": (pb.GetChunkRequest, self.get_chunk),
            "DeleteChunk": (pb.DeleteChunkRequest, self.delete_chunk),
            "DeleteDocument": (pb.DeleteDocumentRequest, self.delete_document),
            "EraseNamespace": (pb.EraseNamespaceRequest, self.erase_namespace),
            "ListChunks": (pb.ListChunksRequest, self.list_chunks),
            "Prefetch": (pb.PrefetchChunksRequest, self.prefetch),
            "Tokenize": (pb.TokenizeRequest, self.tokenize),
            "ListModels": (pb.ListModelsRequest, self.list_models),
        }
        handlers = {
            name: _build_handler(self._unary(name, message, handler), _serialize_message)
            for name, (message, handler) in unary.items()
        }
        handlers["Generate"] = _build_handler(self._generate, _serialize_message)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _unary(
        self, method: str, message: Any, handler: Callable[[Caller, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[None]]:
        async def answer(requests: Any, context: Any) -> None:
            async with (
                self.serve(method, context) as (served, announced),
                self._receive(served, message, context) as (caller, request),
            ):
                served.keys = _find_keys(request)
                response = await handler(caller, request)
                served.keys = served.keys or _find_keys(response)
                await announced
                await context.write(response)

        return answer

    @asynccontextmanager
    async def _receive(
        self, served: ServedRequest, message: Any, context: Any
    ) -> AsyncIterator[tuple[Caller, Any]]:
        """Authenticate a call and receive its message. The call has a slot and the message's memory while the
        block runs."""
        access = self.gateway.access
        identities = identities_of_call(context) if access.has_certificates else ()
        caller = served.authenticate(access, identities)
        with self._slots.hold(caller.name):
            data = await _read_message(context)
            with self._memory.hold(caller.name, len(data)):
                request = _parse_message(message, data)
                if hasattr(request, "namespace"):
                    check_sent_once([name for name, _ in context.invocation_metadata() or ()])
                    request.namespace = narrow_by_headers(request.namespace, served.headers)
                    served.namespace = request.namespace
                yield caller, request

    @asynccontextmanager
    async def serve(
        self, method: str, context: Any
    ) -> AsyncIterator[tuple[ServedRequest, asyncio.Task[None]]]:
        """Record one call while the block runs. An error of the block becomes the call's status. Yields the
        request, and the task that sends the initial metadata, which must precede all messages."""
        metadata = _texts(context.invocation_metadata())
        served = ServedRequest(method, metadata, self.gateway.metrics, "OK", audit=self.gateway.audit)
        announcement = context.send_initial_metadata(((REQUEST_ID, served.request_id),))
        try:
            with served.record(grpc_status_of):
                async with _run_beside(announcement) as announced:
                    yield served, announced
        except KintsugiError as error:
            await abort_call(context, error)
        except Exception:  # noqa: BLE001  # `record` has logged it
            text = f"the gateway has a defect; see its log for request {served.request_id}"
            await context.abort(grpc.StatusCode.INTERNAL, text)

    async def _generate(self, requests: Any, context: Any) -> None:
        async with (
            self.serve("Generate", context) as (served, announced),
            self._receive(served, pb.GenerateRequest, context) as (caller, request),
        ):
            call = wire.call_of(request, served.request_id, served.trace)
            async with (
                aclosing(self.gateway.generate(caller, call)) as events,
                # The first message is sent while the request goes to the engine.
                _run_beside(_write_first(context, announced, resolved := await anext(events))) as first,
            ):
                served.keys = _find_keys(resolved)
                async for event in events:
                    await first
                    await context.write(wire.event_to_wire(event))

    async def put_chunk(self, caller: Caller, request: pb.PutChunkRequest) -> pb.PutChunkResponse:
        (result,) = await self._put(caller, request, [wire.segment_of(request.chunk, "chunk")])
        return pb.PutChunkResponse(result=result)

    async def put_chunks(self, caller: Caller, request: pb.PutChunksRequest) -> pb.PutChunksResponse:
        results = await self._put(caller, request, wire.segments_of(request.chunks, "chunks"))
        return pb.PutChunksResponse(results=results)

    async def _put(self, caller: Caller, request: Any, chunks: Sequence[Segment]) -> list[pb.PutResult]:
        """Put chunks. ``request`` is a `PutChunkRequest` or a `PutChunksRequest`."""
        puts = await self.gateway.put_chunks(
            caller,
            request.namespace,
            chunks,
            wait=request.wait,
            ttl_s=wire.ttl_of(request),
        )
        return [wire.put_to_wire(put) for put in puts]

    async def get_chunk(self, caller: Caller, request: pb.GetChunkRequest) -> pb.GetChunkResponse:
        key = wire.key_of(request.key, "key")
        chunk = await self.gateway.get_chunk(caller, request.namespace, key)
        return pb.GetChunkResponse(chunk=wire.chunk_to_wire(chunk))

    async def delete_chunk(self, caller: Caller, request: pb.DeleteChunkRequest) -> pb.DeleteChunkResponse:
        key = wire.key_of(request.key, "key")
        receipt = await self.gateway.delete_chunk(caller, request.namespace, key)
        return pb.DeleteChunkResponse(deleted=receipt.was_there, receipt=wire.receipt_to_wire(receipt))

    async def delete_document(
        self, caller: Caller, request: pb.DeleteDocumentRequest
    ) -> pb.DeleteDocumentResponse:
        deleted, receipt = await self.gateway.delete_document(
            caller, request.namespace, request.corpus, request.document_id
        )
        return pb.DeleteDocumentResponse(deleted=deleted, receipt=wire.receipt_to_wire(receipt))

    async def erase_namespace(
        self, caller: Caller, request: pb.EraseNamespaceRequest
    ) -> pb.EraseNamespaceResponse:
        receipt = await self.gateway.erase_namespace(caller, request.namespace)
        return pb.EraseNamespaceResponse(receipt=wire.receipt_to_wire(receipt))

    async def list_chunks(self, caller: Caller, request: pb.ListChunksRequest) -> pb.ListChunksResponse:
        after = wire.key_of(request.page_token, "page_token") if request.page_token else None
        size = request.page_size or PAGE_DEFAULT
        chunks = await self.gateway.list_chunks(caller, request.namespace, size, after)
        token = chunks[-1].manifest.key.hex if len(chunks) == size else ""
        return pb.ListChunksResponse(chunks=map(wire.chunk_to_wire, chunks), next_page_token=token)

    async def prefetch(self, caller: Caller, request: pb.PrefetchChunksRequest) -> pb.PrefetchChunksResponse:
        segments = wire.segments_of(request.segments, "segments")
        keys, accepted = await self.gateway.prefetch(caller, request.namespace, segments)
        return pb.PrefetchChunksResponse(keys=[key.hex if key else "" for key in keys], accepted=accepted)

    async def list_models(self, caller: Caller, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[wire.model_to_wire(await self.gateway.recent_info.get())])

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        pieces = await self.gateway.tokenize(caller, request.namespace, list(request.texts))
        texts = [pb.TokenizedText(token_ids=piece.token_ids, key=piece.key.hex) for piece in pieces]
        return pb.TokenizeResponse(texts=texts)


async def _write_first(
    context: Any, announced: asyncio.Task[None], event: Resolved | EngineDelta | Finished
) -> None:
    await announced
    await context.write(wire.event_to_wire(event))


@asynccontextmanager
async def _run_beside(work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``work`` concurrently with the block, and wait for its end. Raises its error unless the block
    raises."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await asyncio.gather(task, return_exceptions=True)
    await task


def _find_keys(message: Any) -> list[str]:
    """Return the hexadecimal keys of the chunks that a request, or the answer to a put or prompt, names."""
    match message:
        case pb.GetChunkRequest() | pb.DeleteChunkRequest():
            return [message.key[:KEY_CHARS]]
        case pb.PutChunkResponse():
            return [message.result.key]
        case pb.PutChunksResponse():
            return [result.key for result in message.results]
        case Resolved():
            return [span.key.hex for span in message.segments if span.key is not None]
    return []


async def _read_message(context: Any) -> bytes:
    """Return the message of a request. Raises `InvalidField` if there is none, and `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(BODY_READ_S):
            data = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"no message arrived within {BODY_READ_S:.0f} s; send it faster") from None
    if data is grpc.aio.EOF:
        raise InvalidField("request", "was not sent; send one message")
    return bytes(data)


def _serialize_message(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _parse_message(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise InvalidField(
            "request", f"is not a valid {message.DESCRIPTOR.full_name} ({error}); use stubs of this proto"
        ) from None


def _texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the metadata by name, without binary values."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Requires a token for health and reflection, whose services do not require one themselves.

    Only the health check needs no token, because Kubernetes' probes have none. Client certificates do not
    count, because an interceptor cannot see them. Watches and reflection streams can stay open forever, so
    they have their own slots.
    """

    def __init__(self, gateway: Gateway, health: Any) -> None:
        self._access = gateway.access
        self._health = health
        self._slots = Quota(gateway.limits.watches_max, SLOTS, shared=gateway.access.has_tokens)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(f"/{SERVICE}/"):
            return handler
        try:
            token = parse_bearer(_texts(details.invocation_metadata).get("authorization"))
            caller = self._access.caller(token)
        except KintsugiError as error:
            if details.method == HEALTH_CHECK:
                return _build_handler(self._answer_health, HealthCheckResponse.SerializeToString)
            return _build_handler(_refuse_with(error))
        return self._bound(handler, caller)

    async def _answer_health(self, requests: Any, context: Any) -> None:
        """Report the gateway's health without reading the message of the unauthenticated caller."""
        await context.write(await self._health.Check(HealthCheckRequest(), context))

    def _bound(self, handler: Any, caller: Caller) -> Any:
        async def answer(requests: Any, context: Any) -> None:
            try:
                with self._slots.hold(caller.name):
                    await _run_handler(handler, requests, context)
            except KintsugiError as error:
                await abort_call(context, error)

        parse = handler.request_deserializer if handler.request_streaming else None
        return _build_handler(answer, handler.response_serializer, parse)


async def _run_handler(handler: Any, requests: Any, context: Any) -> None:
    """Run a handler of grpcio's own services. Raises `InvalidField` and `DeadlineExceeded`."""
    if handler.request_streaming:
        async for response in handler.stream_stream(requests, context):
            await context.write(response)
        return
    data = await _read_message(context)
    try:
        request = handler.request_deserializer(data)
    except DecodeError as error:
        raise InvalidField("request", f"is not a valid message of this method ({error})") from None
    if handler.response_streaming:
        await handler.unary_stream(request, context)
    else:
        await context.write(await handler.unary_unary(request, context))


def _refuse_with(error: KintsugiError) -> Callable[[Any, Any], Awaitable[None]]:
    async def refuse(requests: Any, context: Any) -> None:
        await abort_call(context, error)

    return refuse


def _build_handler(
    answer: Callable[[Any, Any], Awaitable[None]], serialize: Any = None, parse: Any = None
) -> Any:
    """Build a handler that is called before a message is received. Flow control holds a stream's messages
    back until they are read."""
    return grpc.stream_stream_rpc_method_handler(answer, parse, serialize)


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
            interceptors=(_Guard(self.gateway, self._watched),),
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
