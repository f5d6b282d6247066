"""One shard over gRPC.

Cost per byte of a stream: what gRPC needs, one xxh3 pass, no copy of ours: frames are views of the message
that they came in.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from kintsugi.core.errors import (
    InvalidField,
    KintsugiError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionMismatch,
)
from kintsugi.core.layout import ChunkManifest, HeadRange, check_frames
from kintsugi.core.plan import ChunkSource
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.arena import ArenaMap
from kintsugi.store.client.blocking import BlockingStore
from kintsugi.store.client.calls import AsyncCalls, BlockingCalls, Calls, run_to_completion
from kintsugi.store.client.received import Received
from kintsugi.store.client.same_host import CROWDED_RETRY_S, FrameLease, SameHost, frames_of
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import (
    AsyncChunkStore,
    Buffer,
    BufferFor,
    ChunkLost,
    Found,
    LayerFrame,
    PinLease,
    StoreStats,
)
from kintsugi.store.protocol.manifests import Manifests
from kintsugi.store.protocol.tls import TlsFiles

_ACKS = {"": pb.ACK_UNSPECIFIED, "ram": pb.ACK_RAM, "durable": pb.ACK_DURABLE}


@dataclass(frozen=True)
class GrpcOptions:
    """How a client talks to a shard."""

    call_timeout_s: float = 10.0
    """For calls without bulk bytes."""
    put_timeout_s: float = 120.0
    ack: Literal["ram", "durable", ""] = ""
    """When a put returns: once it is in RAM, or on disk. Empty: the shard's default."""
    tier: str = ""
    """`auto`, `ram` or an SSD tier's name, for every chunk put. Empty: `auto`."""
    recompute_ms_per_token: float = 0.0
    """What prefilling a token costs here, where a put does not say: placement and eviction weigh it. 0:
    unknown."""
    tls: TlsFiles | None = None
    """None talks in the clear, which a shard beyond loopback refuses."""
    same_host: bool = True
    """Read from the shard's memory where it runs on this host and shares it."""
    ttl_s: float = 0.0
    """For every chunk put; 0: chunks do not expire."""


class AsyncGrpcStore(AsyncChunkStore):
    """A store whose chunks lie in the shard at `address`."""

    def __init__(self, address: str, options: GrpcOptions | None = None, calls: Calls | None = None) -> None:
        """`calls`: how to talk to it; None: on the running event loop."""
        self.address = address
        self._options = options or GrpcOptions()
        self._calls = calls or AsyncCalls(address, self._options.tls)
        self._manifests = Manifests()
        self._same_host = SameHost()

    async def call(self, name: str, request: Any, response: Any, timeout_s: float | None = None) -> Any:
        """One unary call of the service: its response. `response` is the message's class."""
        return await self._calls.unary(name, request, response, timeout_s or self._options.call_timeout_s)

    async def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        return [self._readable(entry) for entry in await self._found(namespace, keys)]

    async def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        answers = [(self._readable(entry), entry.tier) for entry in await self._found(namespace, keys)]
        return [
            None if manifest is None else Found(manifest, ChunkSource(self.address, tier))
            for manifest, tier in answers
        ]

    async def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        found = await self._found(namespace, keys)
        return [entry.tier if self._readable(entry) else None for entry in found]

    async def _found(self, namespace: str, keys: Sequence[ChunkKey]) -> list[pb.Found]:
        """What the shard says of each key."""
        found: list[pb.Found] = []
        for start in range(0, len(keys), wire.LOOKUP_KEYS_BATCH):
            part = keys[start : start + wire.LOOKUP_KEYS_BATCH]
            request = pb.LookupRequest(namespace=namespace, keys=[key.digest for key in part])
            found += (await self.call("Lookup", request, pb.LookupResponse)).found
        if len(found) != len(keys):
            raise Unavailable(f"{self.address}: answered {len(found)} of {len(keys)} keys")
        return found

    def _readable(self, found: pb.Found) -> ChunkManifest | None:
        manifest = wire.readable_manifest(found.manifest) if found.HasField("manifest") else None
        if manifest is not None:
            self._manifests.remember(manifest)
        return manifest

    async def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        found: dict[int, list[ChunkManifest]] = {}
        for start in range(0, len(anchors), wire.KEYS_MAX):
            request = pb.LookupAnchorsRequest(
                namespace=namespace,
                space_digest=space_digest,
                anchors=anchors[start : start + wire.KEYS_MAX],
            )
            response = await self.call("LookupAnchors", request, pb.LookupAnchorsResponse)
            for candidates in response.candidates:
                manifests = [wire.readable_manifest(manifest) for manifest in candidates.manifests]
                readable = [manifest for manifest in manifests if manifest is not None]
                for manifest in readable:
                    self._manifests.remember(manifest)
                if readable:
                    found[candidates.anchor] = readable
        return found

    async def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        views = [memoryview(frame).cast("B") for frame in frames]
        check_frames(manifest, [len(view) for view in views])
        if manifest.frame_bytes > wire.FRAME_BYTES_MAX:
            raise InvalidField(
                "frames", f"of {manifest.frame_bytes} bytes; at most {wire.FRAME_BYTES_MAX} are carried"
            )
        messages = self._put_messages(manifest, views, recompute_ms, tier)
        return bool((await self._calls.put(messages, self._options.put_timeout_s)).inserted)

    def _put_messages(
        self, manifest: ChunkManifest, views: Sequence[memoryview], recompute_ms: float, tier: str
    ) -> Iterator[bytes]:
        header = pb.PutHeader(
            manifest=wire.manifest_to_wire(manifest),
            ack=_ACKS[self._options.ack],
            tier=tier or self._options.tier,
            recompute_ms=recompute_ms or self._options.recompute_ms_per_token * manifest.num_tokens,
            ttl_s=self._options.ttl_s,
        )
        yield pb.PutChunkKVRequest(header=header).SerializeToString()
        step = max(1, wire.MESSAGE_BYTES_TARGET // manifest.frame_bytes)
        for first in range(0, len(views), step):
            part = views[first : first + step]
            request = pb.PutChunkKVRequest(first_layer=first, commit=first + step >= len(views))
            yield wire.with_payload(request.SerializeToString(), part)

    async def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor | None = None,
    ) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
        if not keys or not layers:
            return
        manifests = await self._resolve_manifests(namespace, keys)
        request = pb.StreamLayersRequest(
            namespace=namespace,
            keys=[key.digest for key in keys],
            layer_start=layers.start,
            layer_stop=layers.stop,
            head_start=heads.start,
            head_stop=heads.stop,
            deadline_ms=max(1, int(deadline_s * 1000)),
        )
        received = Received(self.address, manifests, heads, buffer_for)
        async with aclosing(self._frames(received, request, deadline_s)) as items:
            async for item in items:
                while received.damaged:
                    await self._report_damage(received.damaged.pop())
                if item is not None:
                    yield item

    async def _frames(
        self, received: Received, request: pb.StreamLayersRequest, wait_s: float
    ) -> AsyncGenerator[LayerFrame | ChunkLost | None, None]:
        """From the shard's memory where that works now, else in messages; None for what is not wanted."""
        if await self._arena(None) is not None:
            lease_request = pb.LeaseLayersRequest(request=request)
            leased = self._calls.stream("LeaseLayers", lease_request, wait_s, pb.LeaseLayersResponse)
            async with aclosing(leased):
                first = await self._lease(leased)
                arena = None if first is None else await self._arena(first.arena_id)
                if first is not None and arena is not None:
                    lease = FrameLease(arena, first)
                    described: pb.LeaseLayersResponse | None = first
                    while described is not None:
                        for frame in frames_of(described):
                            yield received.leased(frame, lease)
                        described = None if described.last else await anext(leased, None)
                    return
        async with aclosing(self._calls.stream("StreamLayers", request, wait_s)) as messages:
            async for message in messages:
                for header, data in _frames_of(message):
                    yield received.frame(header, data)

    async def _lease(self, messages: AsyncGenerator[Any, None]) -> pb.LeaseLayersResponse | None:
        """The first message of a lease; None where reading over gRPC may mend what is wrong with it."""
        try:
            first: pb.LeaseLayersResponse | None = await anext(messages, None)
            return first
        except (ResourceExhausted, NotFound, VersionMismatch) as error:  # the last: it knows no leases
            self._same_host.failed(error, CROWDED_RETRY_S)
            return None

    async def _arena(self, arena_id: int | None) -> ArenaMap | None:
        """The shard's memory, mapped if it may be and is not yet."""
        arena = self._same_host.arena(arena_id)
        if arena is not None or not self._options.same_host or not self._same_host.may_try():
            return arena
        try:
            self._same_host.attach(await self.call("OpenArena", pb.OpenArenaRequest(), pb.OpenArenaResponse))
        except (KintsugiError, OSError) as error:
            self._same_host.failed(error)
        return self._same_host.arena(arena_id)

    async def _resolve_manifests(
        self, namespace: str, keys: Sequence[ChunkKey]
    ) -> list[ChunkManifest | None]:
        known = [self._manifests.get(namespace, key) for key in keys]
        unknown = [index for index, manifest in enumerate(known) if manifest is None]
        if unknown:
            found = await self.lookup(namespace, [keys[index] for index in unknown])
            for index, manifest in zip(unknown, found, strict=True):
                known[index] = manifest
        return known

    async def _report_damage(self, manifest: ChunkManifest) -> None:
        """Have the shard check for itself: it quarantines what is damaged there, not what was on the way."""
        self._manifests.forget(manifest)
        request = pb.VerifyRequest(namespace=manifest.namespace, keys=[manifest.key.digest])
        with suppress(KintsugiError):  # lost to this stream either way; the scrubber finds it later
            await self.call("Verify", request, pb.VerifyResponse)

    async def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        request = pb.PrefetchRequest(namespace=namespace, keys=[key.digest for key in keys])
        return int((await self.call("Prefetch", request, pb.PrefetchResponse)).accepted)

    async def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        request = pb.PinRequest(namespace=namespace, keys=[key.digest for key in keys], lease_s=lease_s)
        response = await self.call("Pin", request, pb.PinResponse)
        return PinLease(response.lease_id, response.pinned)

    async def unpin(self, lease_id: str) -> int:
        return int((await self.call("Unpin", pb.UnpinRequest(lease_id=lease_id), pb.UnpinResponse)).unpinned)

    async def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        deleted = 0
        for start in range(0, len(keys), wire.KEYS_MAX):
            part = [key.digest for key in keys[start : start + wire.KEYS_MAX]]
            request = pb.DeleteRequest(namespace=namespace, keys=part)
            deleted += (await self.call("Delete", request, pb.DeleteResponse)).deleted
        return deleted

    async def list(
        self, namespace: str, limit: int = 1000, after: ChunkKey | None = None
    ) -> list[ChunkManifest]:
        manifests: list[ChunkManifest] = []
        last = None if after is None else after.digest
        while len(manifests) < limit:
            request = pb.ListRequest(namespace=namespace, limit=limit - len(manifests), after=last)
            found = (await self.call("List", request, pb.ListResponse)).found
            if not found:
                break
            last = found[-1].manifest.key
            readable = (wire.readable_manifest(entry.manifest) for entry in found)
            manifests += [manifest for manifest in readable if manifest is not None]
        return manifests

    async def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        request = pb.PutReportRequest(fingerprint=fingerprint.digest, name=name, document=document)
        await self.call("PutReport", request, pb.PutReportResponse)

    async def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        request = pb.GetReportRequest(fingerprint=fingerprint.digest, name=name)
        response = await self.call("GetReport", request, pb.GetReportResponse)
        return bytes(response.document) if response.HasField("document") else None

    @property
    def transport(self) -> str:
        return "shared-memory" if self._same_host.attached else "grpc"

    async def stats(self) -> StoreStats:
        stats = await self.call("Stats", pb.StatsRequest(), pb.StatsResponse)
        return StoreStats(
            chunks=stats.chunks,
            bytes_used=sum(tier.bytes_used for tier in stats.tiers),
            bytes_capacity=sum(tier.bytes_capacity for tier in stats.tiers),
            transport=self.transport,
            durable=any(tier.name != "ram" for tier in stats.tiers),
        )

    async def close(self) -> None:
        self._same_host.close()
        await self._calls.close()


class GrpcStore(BlockingStore):
    """`AsyncGrpcStore` for callers without an event loop. Thread-safe."""

    def __init__(self, address: str, options: GrpcOptions | None = None) -> None:
        options = options or GrpcOptions()
        self._shard = AsyncGrpcStore(address, options, BlockingCalls(address, options.tls))
        super().__init__(self._shard)

    def call(self, name: str, request: Any, response: Any, timeout_s: float | None = None) -> Any:
        """As `AsyncGrpcStore.call`."""
        return run_to_completion(self._shard.call(name, request, response, timeout_s))


def open_grpc(url: str) -> GrpcStore:
    """`grpc://host:port?OPTIONS`. Raises `InvalidField` where it names no port, or for an option."""
    return GrpcStore(*shard_of(url))


def shard_of(url: str) -> tuple[str, GrpcOptions]:
    """Address and options in `grpc://host:port?OPTIONS`. Raises `InvalidField`."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise InvalidField("store", f"{url!r} must name a shard as grpc://host:port")
    return parts.netloc, options_of(parts.query)


@dataclass(frozen=True)
class _Query:
    """The options that a URL may carry."""

    __pydantic_config__ = STRICT

    ack: Literal["ram", "durable", ""] = ""
    tier: str = ""
    ttl_s: float = 0.0
    recompute_ms_per_token: float = 0.0
    same_host: bool = True
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_name: str = ""


def options_of(query: str) -> GrpcOptions:
    """The options in a URL's query, such as `ack=durable&tls_ca=…&tls_cert=…&tls_key=…`.

    Raises `InvalidField` and `UnknownField`.
    """
    values = load(_Query, dict(parse_qsl(query, keep_blank_values=True)), where="store")
    tls = None
    if values.tls_ca or values.tls_cert or values.tls_key:
        if not (values.tls_ca and values.tls_cert and values.tls_key):
            raise InvalidField("store", "tls_ca, tls_cert and tls_key belong together")
        tls = TlsFiles(values.tls_ca, values.tls_cert, values.tls_key, values.tls_name)
    return GrpcOptions(
        ack=values.ack,
        tier=values.tier,
        ttl_s=values.ttl_s,
        recompute_ms_per_token=values.recompute_ms_per_token,
        same_host=values.same_host,
        tls=tls,
    )


def _frames_of(message: bytes) -> Iterator[tuple[pb.FrameHeader, memoryview]]:
    response, payload = wire.parse_layers(message)
    position = 0
    for header in response.frames:
        yield header, payload[position : position + header.size_bytes]
        position += header.size_bytes
