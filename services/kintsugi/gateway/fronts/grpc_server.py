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
from kintsugi.core.errors import InvalidField, KintsugiError, Unavailable
from kintsugi.core.exchange import EngineDelta
from kintsugi.gateway.access import check_exposure
from kintsugi.gateway.addresses import format_address
from kintsugi.gateway.fronts import wire
from kintsugi.gateway.fronts.errors import grpc_status_of
from kintsugi.gateway.fronts.limits import ByteBudget
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import Finished, Resolved
from kintsugi.gateway.recent_info import INFO_TTL_S
from kintsugi.gateway.requests import REQUEST_ID, ServedRequest
from kintsugi.gateway.texts.segments import Segment
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.protocol.access import identities_of_call
from kintsugi.store.protocol.callers import Caller, parse_bearer
from kintsugi.store.protocol.status import abort_call
from kintsugi.store.protocol.tls import ServerTls, TlsFiles, parse_address

log = logging.getLogger("kintsugi.gateway")

SERVICE = "kintsugi.rpc.v1.Kintsugi"
HEALTH_CHECK = f"/{HEALTH_SERVICE}/Check"
HEALTH_PERIOD_S = 1.0
STOP_GRACE_S = 10.0
"""Time in which answers under way may end before they are cancelled."""
PAGE_DEFAULT = 100
KEY_CHARS = 64
"""Length of a chunk key in hexadecimal."""


class KintsugiService:
    """The handlers of the service's RPCs. Requests arrive as bytes: gRPC's own decoding would report a
    malformed message as a server error."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._budget = ByteBudget(gateway.limits.messages_bytes_max)

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
        async def answer(data: bytes, context: Any) -> Any:
            async with self.serve(method, context) as (served, _):
                caller = self._authenticate(served, context)
                with self._budget.reserve(len(data)):
                    request = _parse_message(message, data)
                    served.namespace = request.namespace
                    served.keys = _find_keys(request)
                    response = await handler(caller, request)
                    served.keys = served.keys or _find_keys(response)
                    return response

        return answer

    def _authenticate(self, served: ServedRequest, context: Any) -> Caller:
        """Raises `Unauthenticated`."""
        access = self.gateway.access
        identities = identities_of_call(context) if access.has_certificates else ()
        return served.authenticate(access, identities)

    @asynccontextmanager
    async def serve(
        self, method: str, context: Any
    ) -> AsyncIterator[tuple[ServedRequest, asyncio.Task[None]]]:
        """Serves one call; the task sends its initial metadata, which go before everything else. An error
        that the block raises becomes the call's status."""
        metadata = _texts(context.invocation_metadata())
        served = ServedRequest(method, metadata, self.gateway.metrics.grpc, "OK", audit=self.gateway.audit)
        announcement = context.send_initial_metadata(((REQUEST_ID, served.request_id),))
        try:
            with served.record(grpc_status_of):
                async with _run_beside(announcement) as announced:
                    yield served, announced
        except KintsugiError as error:
            await abort_call(context, error)
        except Exception:  # noqa: BLE001  # `record` has logged it
            text = f"a defect of the gateway; its log has request {served.request_id}"
            await context.abort(grpc.StatusCode.INTERNAL, text)

    async def _generate(self, data: bytes, context: Any) -> None:
        """Writes its messages itself: a cancelled call is then cancelled here, and ends in the engine."""
        async with self.serve("Generate", context) as (served, announced):
            caller = self._authenticate(served, context)
            with self._budget.reserve(len(data)):
                request = _parse_message(pb.GenerateRequest, data)
                served.namespace = request.namespace
                call = wire.call_of(request, served.request_id, served.trace)
                async with (
                    aclosing(self.gateway.generate(caller, call)) as events,
                    # The engine is asked while the first message is on its way.
                    _run_beside(_write_first(context, announced, resolved := await anext(events))) as first,
                ):
                    served.keys = _find_keys(resolved)
                    async for event in events:
                        await first
                        await context.write(wire.event_to_wire(event))

    async def put_chunk(self, caller: Caller, request: pb.PutChunkRequest) -> pb.PutChunkResponse:
        (result,) = await self._put(caller, request, [wire.content_of(request.chunk, "chunk")])
        return pb.PutChunkResponse(result=result)

    async def put_chunks(self, caller: Caller, request: pb.PutChunksRequest) -> pb.PutChunksResponse:
        results = await self._put(caller, request, wire.contents_of(request.chunks, "chunks"))
        return pb.PutChunksResponse(results=results)

    async def _put(self, caller: Caller, request: Any, chunks: Sequence[Segment]) -> list[pb.PutResult]:
        """``request`` is a `PutChunkRequest` or a `PutChunksRequest`."""
        puts = await self.gateway.put_chunks(
            caller, request.namespace, chunks, tier=request.tier, wait=request.wait
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
        segments = wire.segments_of(request.segments)
        keys, accepted = await self.gateway.prefetch(caller, request.namespace, segments)
        return pb.PrefetchChunksResponse(keys=[key.hex if key else "" for key in keys], accepted=accepted)

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
    """Runs ``work`` beside the block and waits for its end. Raises its error unless the block raised one."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await asyncio.gather(task, return_exceptions=True)
    await task


def _find_keys(message: Any) -> list[str]:
    """The chunks that a request names, or the answer to a put or a prompt; hexadecimal."""
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
    """Metadata by name, without binary values."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks tokens before a message is received: a stranger's message is neither kept nor parsed.

    Kubernetes' probes have no token and may check the health; everything else needs one, because health
    watches and reflection streams can hold a place among the concurrent requests forever. A client
    certificate is seen only with the call itself, so a caller who shows one instead of a token is identified
    by the handler: the authority of the TLS files has vouched for it by then.
    """

    def __init__(
        self, gateway: Gateway, service: KintsugiService, health: Any, asks_certificates: bool
    ) -> None:
        """``asks_certificates``: every connection has shown a certificate."""
        self._asks_certificates = asks_certificates
        self._gateway = gateway
        self._service = service
        self._health = health

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return handler
        access = self._gateway.access
        token = parse_bearer(_texts(details.invocation_metadata).get("authorization"))
        if not token and self._asks_certificates and access.has_certificates and _is_ours(details.method):
            return handler
        try:
            access.caller(token)
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
            if not _is_ours(path):
                await abort_call(context, error)
            async with self._service.serve(path.rpartition("/")[2], context):
                raise error

        return refuse


def _is_ours(path: str) -> bool:
    """Whether an RPC is one of the service `Kintsugi`, whose handlers authenticate."""
    return path.startswith(f"/{SERVICE}/")


def _build_refusal_handler(answer: Callable[[Any, Any], Awaitable[None]], serialize: Any = None) -> Any:
    """A handler that ends a call without receiving its messages. gRPC reads a unary request's message before
    it calls the handler; a stream's messages are held back by flow control until they are asked for."""
    return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)


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
        """Raises `InvalidField` for an address that is invalid, or beyond loopback without tokens and TLS."""
        self.gateway = gateway
        self._listen = format_address(spec.host, spec.grpc_port)
        parse_address("gateway", self._listen)
        self._tls = load_gateway_tls(spec)
        check_exposure(self._listen, gateway.access.has_tokens, self._tls is not None, spec.insecure)
        gateway.metrics.certificate.read_s = None if self._tls is None else self._tls.expires_s
        self._health: asyncio.Task[None] | None = None
        self.address = ""
        """`host:port` that it listens on, once started."""

    async def start(self) -> None:
        """Raises `Unavailable` if the address cannot be bound, `InvalidField` for unreadable TLS files."""
        limits = self.gateway.limits
        service, self._watched = KintsugiService(self.gateway), _Health()
        asks_certificates = self._tls is not None and self._tls.ca is not None
        self._server = grpc.aio.server(
            interceptors=(_Guard(self.gateway, service, self._watched, asks_certificates),),
            maximum_concurrent_rpcs=limits.concurrent_max,
            options=(
                ("grpc.max_receive_message_length", limits.message_bytes_max),
                ("grpc.so_reuseport", 0),
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
            raise Unavailable(f"cannot listen on {self._listen}: {error}") from error
        self.address = f"{self._listen.rsplit(':', 1)[0]}:{port}"
        await self._server.start()
        self._health = asyncio.create_task(self._report_health())

    async def _report_health(self) -> None:
        """Reports `SERVING` while an engine answers."""
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
        """Waits up to ``grace_s`` for answers to end. Idempotent."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
            self._health = None
            stopped = asyncio.create_task(self._server.stop(grace_s))
            await asyncio.sleep(0)  # from here on there are no new watches
            self._watched.end()
            await stopped


def load_gateway_tls(spec: GatewaySpec) -> TlsFiles | None:
    """The gateway's TLS files; None without TLS. Raises `InvalidField`."""
    if not (spec.tls_cert or spec.tls_key or spec.tls_client_ca):
        return None
    if not (spec.tls_cert and spec.tls_key):
        raise InvalidField("gateway", "tls_cert and tls_key belong together, and tls_client_ca needs both")
    client_ca = Path(spec.tls_client_ca) if spec.tls_client_ca else None
    return TlsFiles(client_ca, Path(spec.tls_cert), Path(spec.tls_key))
