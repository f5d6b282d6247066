"""The RPCs of the gateway: their handlers, and the conversion of messages to and from the gateway's types.

Malformed messages raise `InvalidField`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.exchange import EngineDelta, EngineInfo
from kintsugi.core.namespaces import narrow_by_headers
from kintsugi.core.request import BlendOptions
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.erasing import Receipt
from kintsugi.gateway.fronts.errors import grpc_status_of
from kintsugi.gateway.fronts.limits import parse_object
from kintsugi.gateway.gateway import Gateway, GatewayChunk, Put
from kintsugi.gateway.prompts import Finished, GenerateCall, Resolved
from kintsugi.gateway.requests import REQUEST_ID, ServedRequest
from kintsugi.gateway.texts.segments import Segment
from kintsugi.precompute.documents import DocumentRef
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.protocol.access import Caller, identify_call
from kintsugi.store.protocol.grpc_server import build_handler, read_message
from kintsugi.store.protocol.grpc_status import abort_call
from kintsugi.store.protocol.messages import parse_message
from kintsugi.store.protocol.quota import BYTES, SLOTS, Quota

SERVICE = "kintsugi.rpc.v1.Kintsugi"
PAGE_DEFAULT = 100
KEY_CHARS = 64
"""Length of a chunk key in hexadecimal."""
EXTRA_JSON_BYTES_MAX = 64 << 10
_PLAN_FIELDS = tuple(field.name for field in pb.ExecutedPlan.DESCRIPTOR.fields)


class KintsugiService:
    """The handlers of the service's RPCs, which authenticate the caller before they read its message."""

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
            name: build_handler(self._unary(name, message, handler), _serialize_message)
            for name, (message, handler) in unary.items()
        }
        handlers["Generate"] = build_handler(self._generate, _serialize_message)
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
        caller = identify_call(self.gateway.access, context)
        served.caller = caller.name
        with self._slots.hold(caller.name):
            data = await read_message(context)
            with self._memory.hold(caller.name, len(data)):
                request = parse_message(message, data)
                if hasattr(request, "namespace"):
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
            call = call_of(request, served.request_id, served.trace)
            async with (
                aclosing(self.gateway.generate(caller, call)) as events,
                # The first message is sent while the request goes to the engine.
                _run_beside(_write_first(context, announced, resolved := await anext(events))) as first,
            ):
                served.keys = _find_keys(resolved)
                async for event in events:
                    await first
                    await context.write(event_to_wire(event))

    async def put_chunk(self, caller: Caller, request: pb.PutChunkRequest) -> pb.PutChunkResponse:
        try:
            (result,) = await self._put(caller, request, [segment_of(request.chunk, "chunk")])
        except InvalidField as error:
            raise InvalidField(error.field.replace("chunks[0]", "chunk"), error.problem) from None
        return pb.PutChunkResponse(result=result)

    async def put_chunks(self, caller: Caller, request: pb.PutChunksRequest) -> pb.PutChunksResponse:
        results = await self._put(caller, request, segments_of(request.chunks, "chunks"))
        return pb.PutChunksResponse(results=results)

    async def _put(self, caller: Caller, request: Any, chunks: Sequence[Segment]) -> list[pb.PutResult]:
        """Put chunks. ``request`` is a `PutChunkRequest` or a `PutChunksRequest`."""
        puts = await self.gateway.put_chunks(
            caller,
            request.namespace,
            chunks,
            wait=request.wait,
            ttl_s=ttl_of(request),
        )
        return [put_to_wire(put) for put in puts]

    async def get_chunk(self, caller: Caller, request: pb.GetChunkRequest) -> pb.GetChunkResponse:
        key = ChunkKey.from_hex(request.key, "key")
        chunk = await self.gateway.get_chunk(caller, request.namespace, key)
        return pb.GetChunkResponse(chunk=chunk_to_wire(chunk))

    async def delete_chunk(self, caller: Caller, request: pb.DeleteChunkRequest) -> pb.DeleteChunkResponse:
        key = ChunkKey.from_hex(request.key, "key")
        receipt = await self.gateway.delete_chunk(caller, request.namespace, key)
        return pb.DeleteChunkResponse(deleted=receipt.was_there, receipt=receipt_to_wire(receipt))

    async def delete_document(
        self, caller: Caller, request: pb.DeleteDocumentRequest
    ) -> pb.DeleteDocumentResponse:
        deleted, receipt = await self.gateway.delete_document(
            caller, request.namespace, request.corpus, request.document_id
        )
        return pb.DeleteDocumentResponse(deleted=deleted, receipt=receipt_to_wire(receipt))

    async def erase_namespace(
        self, caller: Caller, request: pb.EraseNamespaceRequest
    ) -> pb.EraseNamespaceResponse:
        receipt = await self.gateway.erase_namespace(caller, request.namespace)
        return pb.EraseNamespaceResponse(receipt=receipt_to_wire(receipt))

    async def list_chunks(self, caller: Caller, request: pb.ListChunksRequest) -> pb.ListChunksResponse:
        after = ChunkKey.from_hex(request.page_token, "page_token") if request.page_token else None
        size = request.page_size or PAGE_DEFAULT
        chunks = await self.gateway.list_chunks(caller, request.namespace, size, after)
        token = chunks[-1].manifest.key.hex if len(chunks) == size else ""
        return pb.ListChunksResponse(chunks=map(chunk_to_wire, chunks), next_page_token=token)

    async def prefetch(self, caller: Caller, request: pb.PrefetchChunksRequest) -> pb.PrefetchChunksResponse:
        segments = segments_of(request.segments, "segments")
        keys, accepted = await self.gateway.prefetch(caller, request.namespace, segments)
        return pb.PrefetchChunksResponse(keys=[key.hex if key else "" for key in keys], accepted=accepted)

    async def list_models(self, caller: Caller, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[model_to_wire(await self.gateway.recent_info.get())])

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        pieces = await self.gateway.tokenize(caller, request.namespace, list(request.texts))
        texts = [pb.TokenizedText(token_ids=piece.token_ids, key=piece.key.hex) for piece in pieces]
        return pb.TokenizeResponse(texts=texts)


async def _write_first(
    context: Any, announced: asyncio.Task[None], event: Resolved | EngineDelta | Finished
) -> None:
    await announced
    await context.write(event_to_wire(event))


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


def _serialize_message(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _texts(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the metadata by name, without binary values."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def segments_of(wires: Iterable[pb.Content | pb.Segment], where: str) -> tuple[Segment, ...]:
    return tuple(segment_of(wire, f"{where}[{index}]") for index, wire in enumerate(wires))


def segment_of(wire: pb.Content | pb.Segment, where: str) -> Segment:
    """Convert a segment, or a content, which is a text or token ids."""
    kind, plain = wire.WhichOneof("content"), getattr(wire, "plain", False)
    if kind == "text":
        return Segment(text=wire.text, plain=plain)
    if kind == "tokens":
        return Segment(token_ids=TokenIds.of(wire.tokens.ids), plain=plain)
    if isinstance(wire, pb.Content):
        raise InvalidField(where, "is mandatory; give a text or tokens")
    if kind == "chunk_key":
        return Segment(key=ChunkKey.from_hex(wire.chunk_key, f"{where}.chunk_key"), plain=plain)
    if kind == "document":
        document = wire.document
        version = document.version if document.HasField("version") else None
        try:
            ref = DocumentRef(document.document_id, document.index, version)
        except InvalidField as error:
            raise error.within(f"{where}.document") from None
        return Segment(document=(document.corpus, ref), plain=plain)
    raise InvalidField(where, "is empty; give a text, tokens, a chunk key or a document's chunk")


def call_of(wire: pb.GenerateRequest, request_id: str, trace: Mapping[str, str]) -> GenerateCall:
    return GenerateCall(
        namespace=wire.namespace,
        segments=segments_of(wire.segments, "segments"),
        question=segment_of(wire.question, "question"),
        sampling=sampling_of(wire.sampling),
        # Only fields that were set are listed.
        options=BlendOptions.from_mapping({field.name: value for field, value in wire.ListFields()}),
        explain=wire.explain,
        no_blend=wire.no_blend,
        ttl_s=ttl_of(wire),
        priority=wire.priority,
        model=wire.model,
        request_id=request_id,
        trace=trace,
    )


def ttl_of(wire: pb.GenerateRequest | pb.PutChunkRequest | pb.PutChunksRequest) -> float | None:
    return wire.ttl_s if wire.HasField("ttl_s") else None


def sampling_of(wire: pb.Sampling) -> dict[str, Any]:
    """Return the fields that the client has set, by their names in vLLM's `SamplingParams`."""
    sampling = _extra(wire.extra_json)
    for descriptor, value in wire.ListFields():  # only fields that were set
        if descriptor.name != "extra_json":
            sampling[descriptor.name] = list(value) if descriptor.name.startswith("stop") else value
    return sampling


def _extra(text: str) -> dict[str, Any]:
    if len(text) > EXTRA_JSON_BYTES_MAX:
        raise InvalidField(
            "sampling.extra_json", f"has {len(text)} characters; at most {EXTRA_JSON_BYTES_MAX} are allowed"
        )
    return parse_object(text, "sampling.extra_json") if text else {}


def event_to_wire(event: Resolved | EngineDelta | Finished) -> pb.GenerateResponse:
    if isinstance(event, EngineDelta):
        response = pb.GenerateResponse()  # filled in place, to avoid a copy for every token
        response.delta.token_ids.extend(event.token_ids)
        response.delta.text = event.text
        return response
    if isinstance(event, Resolved):
        segments = [
            pb.ResolvedSegment(start=span.start, end=span.end, key=span.key.hex if span.key else "")
            for span in event.segments
        ]
        resolved = pb.Resolved(
            request_id=event.request_id, segments=segments, prompt_tokens=event.prompt_tokens
        )
        return pb.GenerateResponse(resolved=resolved)
    return pb.GenerateResponse(finished=_finish_to_wire(event))


def _finish_to_wire(event: Finished) -> pb.Finished:
    plan = {name: event.accounting[name] for name in _PLAN_FIELDS if name in event.accounting}
    return pb.Finished(
        finish_reason=event.finish_reason,
        plan=pb.ExecutedPlan(**plan),
        accounting=_struct(event.accounting),
        usage=pb.Usage(**vars(event.usage)),
        ttft_ms=event.ttft_ms,
    )


def _struct(accounting: Mapping[str, Any]) -> Struct:
    """Return the accounting as a `Struct`. `Struct.update` would take three times as long."""
    struct = Struct()
    for name, value in accounting.items():
        if isinstance(value, str):
            struct.fields[name].string_value = value
        elif type(value) in (int, float):  # not a bool
            struct.fields[name].number_value = value
        else:  # through JSON, which turns layer numbers into strings
            struct[name] = json.loads(json.dumps(value))
    return struct


def model_to_wire(info: EngineInfo) -> pb.ServedModel:
    return pb.ServedModel(
        id=info.model,
        aliases=info.aliases,
        max_model_len=info.max_model_len,
        fingerprint=info.fingerprint,
        blending=info.blending,
    )


def put_to_wire(put: Put) -> pb.PutResult:
    return pb.PutResult(
        key=put.key.hex,
        num_tokens=put.num_tokens,
        new=put.new,
        state=pb.PutState.Value(f"PUT_STATE_{put.state.name}"),
        reason=put.reason,
    )


def receipt_to_wire(receipt: Receipt) -> pb.ErasureReceipt:
    return pb.ErasureReceipt(
        namespace=receipt.namespace,
        asked_at_s=receipt.asked_at_s,
        gone_at_s=receipt.gone_at_s,
        places=[pb.ErasedPlace(**vars(place)) for place in receipt.places],
    )


def chunk_to_wire(chunk: GatewayChunk) -> pb.ChunkInfo:
    manifest = chunk.manifest
    return pb.ChunkInfo(
        key=manifest.key.hex,
        num_tokens=manifest.num_tokens,
        size_bytes=manifest.chunk_bytes,
        codec=manifest.codec.name.lower(),
        model=manifest.fingerprint.hex,
        tier=chunk.tier,
        known=chunk.known,
    )
