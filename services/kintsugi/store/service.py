"""The gRPC face of a shard: service `ChunkStore`.

One event loop serves every connection: a thousand idle clients or slow readers cost no thread. What could
block it (disk, waiting for room, verification of whole chunks) runs elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

import grpc

from kintsugi.client import wire
from kintsugi.client.status import ERROR_METADATA, error_name, status_of
from kintsugi.core.errors import InvalidField, KintsugiError, VersionMismatch
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import FORMAT_VERSION, ChunkKey, ModelFingerprint
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.entry import Entry
from kintsugi.store.put import ChunkPut
from kintsugi.store.shard import PutOptions, Shard

PUT_IDLE_S_MAX = 30.0
"""A client that sends nothing for so long has died in the middle of its put."""
WRITE_STALL_S_MAX = 60.0
"""A reader that takes nothing for so long loses its stream, and what that held in place."""
REPORT_NAME_CHARS_MAX = 128


def _checked_protocol(context: Any) -> None:
    metadata = dict(context.invocation_metadata() or ())
    version = metadata.get(wire.PROTOCOL_METADATA, str(wire.PROTOCOL_VERSION))
    if version not in {str(spoken) for spoken in wire.PROTOCOLS_SPOKEN}:
        raise VersionMismatch(
            f"protocol {version!r} is not spoken here; this shard speaks "
            f"{', '.join(map(str, sorted(wire.PROTOCOLS_SPOKEN)))}"
        )


async def _refuse(context: Any, error: KintsugiError) -> None:
    context.set_trailing_metadata(((ERROR_METADATA, error_name(error)),))
    await context.abort(status_of(error), str(error))


def _answers(
    handler: Callable[[Any, Any, Any], Awaitable[Any]],
) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    """Our errors become statuses. A stream's handler writes its responses itself."""

    @wraps(handler)
    async def guarded(self: Any, request: Any, context: Any) -> Any:
        try:
            _checked_protocol(context)
            return await handler(self, request, context)
        except KintsugiError as error:
            await _refuse(context, error)

    return guarded


class ChunkStoreService:
    """Handlers by RPC name; `generic_handler` registers them."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    @_answers
    async def lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        keys = wire.keys_from_wire(request.keys)
        return pb.LookupResponse(found=map(_found, self.shard.lookup(request.namespace, keys)))

    @_answers
    async def lookup_anchors(
        self, request: pb.LookupAnchorsRequest, context: Any
    ) -> pb.LookupAnchorsResponse:
        if len(request.anchors) > wire.KEYS_MAX:
            raise InvalidField(
                "anchors", f"{len(request.anchors)} anchors; at most {wire.KEYS_MAX} are answered per call"
            )
        found = self.shard.lookup_anchors(request.namespace, request.space_digest, request.anchors)
        return pb.LookupAnchorsResponse(
            candidates=[
                pb.AnchorCandidates(anchor=anchor, manifests=map(wire.manifest_to_wire, manifests))
                for anchor, manifests in found.items()
            ]
        )

    @_answers
    async def put_chunk_kv(self, messages: AsyncIterator[bytes], context: Any) -> pb.PutChunkKVResponse:
        put = await self._begun_put(messages)
        if put is None:
            return pb.PutChunkKVResponse(inserted=False)
        try:
            while not await self._take(put, await _next_message(messages)):
                pass
        except BaseException:
            self.shard.abort(put)
            raise
        return pb.PutChunkKVResponse(inserted=self.shard.commit(put))

    async def _begun_put(self, messages: AsyncIterator[bytes]) -> ChunkPut | None:
        first, payload = wire.parse_put(await _next_message(messages))
        if not first.HasField("header") or payload:
            raise InvalidField("header", "the first message of a put carries the header and no frames")
        header = first.header
        manifest = wire.manifest_from_wire(header.manifest)
        options = PutOptions(recompute_ms=header.recompute_ms)
        if header.ttl_s:
            options = PutOptions(ttl_s=header.ttl_s, recompute_ms=header.recompute_ms)
        return self.shard.begin_put(manifest, options)

    @staticmethod
    async def _take(put: ChunkPut, message: bytes) -> bool:
        """Write one message's frames; True once it commits."""
        request, payload = wire.parse_put(message)
        if payload:
            put.write(request.first_layer, payload)
        return request.commit

    @_answers
    async def stream_layers(self, request: pb.StreamLayersRequest, context: Any) -> None:
        keys = wire.keys_from_wire(request.keys)
        layers = range(request.layer_start, request.layer_stop)
        heads = HeadRange(request.head_start, request.head_stop)
        reading = self.shard.open(request.namespace, keys, layers, heads)
        try:
            batch = _Batch()
            for layer in layers:
                for index, chunk in enumerate(reading.chunks):
                    if chunk is not None:
                        if batch.add(index, layer, chunk.frame(layer)):
                            await _written(context, batch.taken())
                    elif layer == layers.start:
                        batch.add_lost(index, layer, "absent")
            if batch:
                await _written(context, batch.taken())
        finally:
            self.shard.close_reading(reading)

    @_answers
    async def delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        keys = wire.keys_from_wire(request.keys)
        return pb.DeleteResponse(deleted=self.shard.delete(request.namespace, keys))

    @_answers
    async def list(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        limit = min(request.limit or wire.LIST_MAX, wire.LIST_MAX)
        after = ChunkKey(request.after) if request.HasField("after") else None
        return pb.ListResponse(found=map(_found, self.shard.list(request.namespace, limit, after)))

    @_answers
    async def clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        return pb.ClearResponse(deleted=self.shard.clear(request.namespace))

    @_answers
    async def put_report(self, request: pb.PutReportRequest, context: Any) -> pb.PutReportResponse:
        self.shard.put_report(*_report_address(request), request.document)
        return pb.PutReportResponse()

    @_answers
    async def get_report(self, request: pb.GetReportRequest, context: Any) -> pb.GetReportResponse:
        return pb.GetReportResponse(document=self.shard.get_report(*_report_address(request)))

    @_answers
    async def stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        shard = self.shard
        return pb.StatsResponse(
            shard_id=shard.shard_id,
            protocol_version=wire.PROTOCOL_VERSION,
            format_version=FORMAT_VERSION,
            chunks=len(shard),
            tiers=[
                pb.TierStats(
                    name=shard.ram.name,
                    chunks=len(shard),
                    bytes_used=shard.ram.allocator.used_bytes,
                    bytes_capacity=shard.ram.capacity_bytes,
                    evictions=shard.ram.evictions,
                )
            ],
            hits=shard.hits,
            misses=shard.misses,
            quarantined=shard.quarantined,
        )

    @_answers
    async def verify(self, request: pb.VerifyRequest, context: Any) -> pb.VerifyResponse:
        keys = wire.keys_from_wire(request.keys)
        intact = await asyncio.to_thread(self.shard.verify, request.namespace, keys)
        return pb.VerifyResponse(
            intact=sum(intact.values()),
            absent=len(set(keys)) - len(intact),
            quarantined=[key.digest for key, whole in intact.items() if not whole],
        )

    def generic_handler(self) -> Any:
        """Every RPC of the service; bulk ones exchange bytes, which nobody serialises again."""
        unary = grpc.unary_unary_rpc_method_handler
        handlers = {
            name: unary(handler, request.FromString, _serialized)
            for name, handler, request in (
                ("Lookup", self.lookup, pb.LookupRequest),
                ("LookupAnchors", self.lookup_anchors, pb.LookupAnchorsRequest),
                ("Delete", self.delete, pb.DeleteRequest),
                ("List", self.list, pb.ListRequest),
                ("Clear", self.clear, pb.ClearRequest),
                ("PutReport", self.put_report, pb.PutReportRequest),
                ("GetReport", self.get_report, pb.GetReportRequest),
                ("Stats", self.stats, pb.StatsRequest),
                ("Verify", self.verify, pb.VerifyRequest),
            )
        }
        handlers["PutChunkKV"] = grpc.stream_unary_rpc_method_handler(
            self.put_chunk_kv, response_serializer=_serialized
        )
        handlers["StreamLayers"] = grpc.unary_stream_rpc_method_handler(
            self.stream_layers, pb.StreamLayersRequest.FromString
        )
        return grpc.method_handlers_generic_handler(wire.SERVICE, handlers)


def _serialized(message: Any) -> Any:
    return message.SerializeToString()


def _found(entry: Entry | None) -> pb.Found:
    if entry is None:
        return pb.Found()
    return pb.Found(manifest=wire.manifest_to_wire(entry.manifest), tier="ram")


def _report_address(request: pb.PutReportRequest | pb.GetReportRequest) -> tuple[ModelFingerprint, str]:
    if len(request.fingerprint) != wire.DIGEST_BYTES:
        raise InvalidField(
            "fingerprint", f"has {len(request.fingerprint)} bytes; a digest has {wire.DIGEST_BYTES}"
        )
    if not 0 < len(request.name) <= REPORT_NAME_CHARS_MAX:
        raise InvalidField("name", f"has {len(request.name)} characters, not 1 to {REPORT_NAME_CHARS_MAX}")
    return ModelFingerprint(request.fingerprint), request.name


async def _next_message(messages: AsyncIterator[bytes]) -> bytes:
    """The next message of a put. Raises `InvalidField` where it ends early or the client falls silent."""
    try:
        return await asyncio.wait_for(anext(messages), PUT_IDLE_S_MAX)
    except StopAsyncIteration:
        raise InvalidField("commit", "the put ended without it; nothing was stored") from None
    except TimeoutError:
        raise InvalidField(
            "commit", f"nothing arrived for {PUT_IDLE_S_MAX:.0f} s; nothing was stored"
        ) from None


async def _written(context: Any, message: bytes) -> None:
    await asyncio.wait_for(context.write(message), WRITE_STALL_S_MAX)


class _Batch:
    """Frames that travel in one message."""

    def __init__(self) -> None:
        self._headers: list[pb.FrameHeader] = []
        self._views: list[memoryview] = []
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._headers)

    def add(self, chunk: int, layer: int, frame: memoryview) -> bool:
        """True once the batch is as large as a message should be."""
        self._headers.append(pb.FrameHeader(chunk=chunk, layer=layer, size_bytes=len(frame)))
        self._views.append(frame)
        self._size += len(frame)
        return self._size >= wire.MESSAGE_BYTES_TARGET

    def add_lost(self, chunk: int, layer: int, reason: str) -> None:
        self._headers.append(pb.FrameHeader(chunk=chunk, layer=layer, lost_reason=reason))

    def taken(self) -> bytes:
        """The message; the batch is empty afterwards."""
        header = pb.StreamLayersResponse(frames=self._headers).SerializeToString()
        message = wire.with_payload(header, self._views)
        self._headers, self._views, self._size = [], [], 0
        return message
