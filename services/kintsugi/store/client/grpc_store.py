"""One shard over gRPC.

A stream costs per byte what gRPC needs and one xxh3 pass. It copies nothing: frames are views of the message
that carried them.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from kintsugi.core.errors import (
    DeadlineExceeded,
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
from kintsugi.store.client.calls import ShardCalls, frames_of, put_messages
from kintsugi.store.client.chunk_cipher import encrypt_chunk, is_readable
from kintsugi.store.client.erasing import (
    ERASE_TIMEOUT_S,
    ShardErasures,
    erasures_of_wire,
    join_places,
    places_of,
    read_cursor,
    write_cursor,
)
from kintsugi.store.client.key_file import KeyFile
from kintsugi.store.client.manifests import RecentManifests
from kintsugi.store.client.received import Received
from kintsugi.store.client.same_host import CROWDED_RETRY_S, FrameLease, SameHost
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.breaker import CircuitBreaker
from kintsugi.store.protocol.chunk_events import EventPage
from kintsugi.store.protocol.interface import (
    DATA_KEYS,
    KEPT_KEYS,
    Buffer,
    ChunkLost,
    ChunkStore,
    ErasedPlace,
    ErasurePage,
    Found,
    LayerFrame,
    PinLease,
    StoreStats,
)
from kintsugi.store.protocol.keys import KeySource, NamespaceKeys
from kintsugi.store.protocol.tls import TlsFiles

SHARD_FAILURES = (Unavailable, DeadlineExceeded, VersionMismatch)
"""Errors that say that a shard cannot be used now; any other is an answer."""


class LeftAlone(Unavailable):
    """The shard was not asked: it failed lately in transfers of this kind, which says nothing of others."""


_ACKS = {"": pb.ACK_UNSPECIFIED, "ram": pb.ACK_RAM, "durable": pb.ACK_DURABLE}


@dataclass(frozen=True)
class UrlOptions:
    """A client's options for one shard that the query of its URL may set."""

    __pydantic_config__ = STRICT

    ack: Literal["ram", "durable", ""] = ""
    """When a put returns: once the chunk is in RAM, or on disk. Empty: the shard's default."""
    tier: str = ""
    """`auto`, `ram` or an SSD tier's name, for every chunk put. Empty: `auto`."""
    recompute_ms_per_token: float = 0.0
    """Prefill time per token, for puts that do not say how long it took; placement and eviction weigh it. 0:
    unknown."""
    same_host: bool = True
    """Read from the shard's memory where it runs on this host and shares it."""
    ttl_s: float = 0.0
    """Lifetime of every chunk put; 0: chunks do not expire."""
    token_file: Path | None = None
    """A file with the bearer token that the shard asks for; read again when it changes."""


@dataclass(frozen=True)
class GrpcOptions(UrlOptions):
    """A client's options for one shard."""

    call_timeout_s: float = 10.0
    """Deadline of calls without bulk bytes."""
    put_timeout_s: float = 120.0
    tls: TlsFiles | None = None
    """None: without encryption, which a shard beyond loopback refuses."""
    keys: KeySource | None = None
    """Where the keys of encrypted namespaces come from. None: no namespace is encrypted."""

    def find_keys(self, namespace: str) -> NamespaceKeys | None:
        """The namespace's keys; None where it is not encrypted. Raises what `KeySource.find` raises."""
        return None if self.keys is None else self.keys.find(namespace)

    def name_key(self, namespace: str) -> bytes:
        """As `ChunkStore.name_key`."""
        found = self.find_keys(namespace)
        return b"" if found is None else found.name_key

    def destroy_keys(self, namespace: str) -> list[ErasedPlace]:
        """As `ChunkStore.destroy_keys`."""
        if self.keys is None:
            return []
        try:
            destroyed = self.keys.replace(namespace)
        except InvalidField:
            return [ErasedPlace(KEPT_KEYS, 0, 0, time.time())]
        return [ErasedPlace(DATA_KEYS, destroyed, 0, time.time())] if destroyed else []


@dataclass(frozen=True)
class Peeked:
    """What `GrpcStore.peek` found."""

    held: Sequence[bool]
    """For each key, whether the shard has the chunk."""
    room_bytes: int
    """Bytes of copies that it takes."""


class GrpcStore(ChunkStore):
    """A store whose chunks lie in the shard at `address`. Thread-safe."""

    def __init__(self, address: str, options: GrpcOptions | None = None) -> None:
        self.address = address
        self._options = options or GrpcOptions()
        self._calls = ShardCalls(address, self._options.tls, self._options.token_file)
        self._manifests = RecentManifests()
        self._same_host = SameHost()
        self._reads = CircuitBreaker(backs_off=True)
        """Counts streams alone: a shard may answer lookups, and hang in what it sends. A prompt waits for
        every probe."""
        self._writes = CircuitBreaker()
        """Counts puts alone."""

    def call(self, name: str, request: Any, response: Any, timeout_s: float | None = None) -> Any:
        """Make one unary call of the service and return its response. `response` is the message's class."""
        return self._calls.unary(name, request, response, timeout_s or self._options.call_timeout_s)

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        return [None if found is None else found.manifest for found in self.find(namespace, keys)]

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        return [None if found is None else found.source.tier for found in self.find(namespace, keys)]

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        found = self.find_stored(namespace, keys)
        if self._options.keys is not None:
            held = self._options.find_keys(namespace)
            found = [one if one is not None and is_readable(held, one.manifest) else None for one in found]
        for entry in filter(None, found):
            self._manifests.remember(entry.manifest)
        return found

    def find_stored(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        """Like `find`, but also returns chunks that this client's keys cannot decrypt."""
        answers: list[pb.Found] = []
        for start in range(0, len(keys), wire.LOOKUP_KEYS_BATCH):
            part = keys[start : start + wire.LOOKUP_KEYS_BATCH]
            request = pb.LookupRequest(namespace=namespace, keys=[key.digest for key in part])
            answers += self.call("Lookup", request, pb.LookupResponse).found
        if len(answers) != len(keys):
            raise Unavailable(f"{self.address}: answered {len(answers)} of {len(keys)} keys")
        return [self._read_found(answer) for answer in answers]

    def name_key(self, namespace: str) -> bytes:
        return self._options.name_key(namespace)

    def peek(self, namespace: str, keys: Sequence[ChunkKey]) -> Peeked:
        """Ask which chunks the shard holds, without using them."""
        held: builtins.list[bool] = []
        room_bytes = 0
        for start in range(0, len(keys), wire.LOOKUP_KEYS_BATCH):
            part = [key.digest for key in keys[start : start + wire.LOOKUP_KEYS_BATCH]]
            request = pb.LookupRequest(namespace=namespace, keys=part, peek=True)
            response = self.call("Lookup", request, pb.LookupResponse)
            held += [bool(found.tier) for found in response.found]
            room_bytes = response.room_bytes
        if len(held) != len(keys):
            raise Unavailable(f"{self.address}: answered {len(held)} of {len(keys)} keys")
        return Peeked(held, room_bytes)

    def _read_found(self, found: pb.Found) -> Found | None:
        """None for a miss, and for a chunk that another build wrote."""
        manifest = wire.readable_manifest(found.manifest) if found.HasField("manifest") else None
        return None if manifest is None else Found(manifest, ChunkSource(self.address, found.tier))

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        found: dict[int, list[ChunkManifest]] = {}
        keys = self._options.find_keys(namespace)
        for start in range(0, len(anchors), wire.KEYS_MAX):
            request = pb.LookupAnchorsRequest(
                namespace=namespace,
                space_digest=space_digest,
                anchors=anchors[start : start + wire.KEYS_MAX],
            )
            response = self.call("LookupAnchors", request, pb.LookupAnchorsResponse)
            for candidates in response.candidates:
                manifests = [wire.readable_manifest(manifest) for manifest in candidates.manifests]
                readable = [
                    manifest for manifest in manifests if manifest is not None and is_readable(keys, manifest)
                ]
                for manifest in readable:
                    self._manifests.remember(manifest)
                if readable:
                    found[candidates.anchor] = readable
        return found

    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        tier: str = "",
        ttl_s: float = 0.0,
    ) -> bool:
        check_frames(manifest, [memoryview(frame).nbytes for frame in frames])
        keys = self._options.find_keys(manifest.namespace)
        if keys is not None and not manifest.is_encrypted:
            manifest, frames = encrypt_chunk(keys, manifest, frames)
        header = pb.PutHeader(
            manifest=wire.manifest_to_wire(manifest),
            ack=_ACKS[self._options.ack],
            tier=tier or self._options.tier,
            recompute_ms=recompute_ms or self._options.recompute_ms_per_token * manifest.num_tokens,
            ttl_s=ttl_s or self._options.ttl_s,
        )
        inserted = self._put(manifest, frames, header)
        if keys is None or inserted:
            return inserted
        (held,) = self.find_stored(manifest.namespace, [manifest.key])
        if held is None or is_readable(keys, held.manifest):
            return False
        # It was encrypted with a key that is gone: nobody can read it, and nobody else would remove it.
        self.delete(manifest.namespace, [manifest.key])
        return self._put(manifest, frames, header)

    def put_copy(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float,
        ttl_s: float,
        erasures_seen: int = 0,
    ) -> bool:
        """Hand a chunk to another shard, as it is stored; whether it took it. `ttl_s` 0: the chunk does not
        expire. `erasures_seen`: the number up to which that shard's erasures are applied here."""
        header = pb.PutHeader(
            manifest=wire.manifest_to_wire(manifest),
            recompute_ms=recompute_ms,
            ttl_s=ttl_s,
            is_copy=True,
            erasures_seen=erasures_seen,
        )
        return self._put(manifest, frames, header)

    def _put(self, manifest: ChunkManifest, frames: Sequence[Buffer], header: pb.PutHeader) -> bool:
        views = [memoryview(frame).cast("B") for frame in frames]
        check_frames(manifest, [len(view) for view in views])
        if manifest.frame_bytes > wire.FRAME_BYTES_MAX:
            raise InvalidField(
                "frames", f"of {manifest.frame_bytes} bytes; at most {wire.FRAME_BYTES_MAX} are carried"
            )
        messages = put_messages(header, manifest, views)
        with self._counted(self._writes):
            return bool(self._calls.put(messages, self._options.put_timeout_s).inserted)

    @contextmanager
    def _counted(self, breaker: CircuitBreaker) -> Iterator[None]:
        """One transfer; its breaker learns whether the shard answered. Raises `LeftAlone` while it is open.

        A caller that ends a stream early, as one does that has every layer, has just got an answer.
        """
        if not breaker.allows():
            raise LeftAlone(f"{self.address} failed lately and is left alone for a moment")
        try:
            yield
        except SHARD_FAILURES:
            breaker.record_failure()
            raise
        except (KintsugiError, GeneratorExit):
            breaker.record_success()
            raise
        breaker.record_success()

    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Generator[LayerFrame | ChunkLost, None, None]:
        if not keys or not layers:
            return
        manifests = self._resolve_manifests(namespace, keys)
        request = pb.StreamLayersRequest(
            namespace=namespace,
            keys=[key.digest for key in keys],
            layer_start=layers.start,
            layer_stop=layers.stop,
            head_start=heads.start,
            head_stop=heads.stop,
            deadline_ms=max(1, int(deadline_s * 1000)),
        )
        received = Received(
            self.address, manifests, heads, self._options.find_keys(namespace), self._look_up_again
        )
        frames = self._frames(received, request, deadline_s)
        with self._counted(self._reads), closing(frames) as items:
            for item in items:
                while received.damaged:
                    self._report_damage(received.damaged.pop())
                if item is not None:
                    yield item

    def _frames(
        self, received: Received, request: pb.StreamLayersRequest, wait_s: float
    ) -> Generator[LayerFrame | ChunkLost | None, None, None]:
        """Frames from the shard's memory where that works now, else from messages; None for a frame of a
        chunk that is lost already."""
        if self._arena(None) is not None:
            lease_request = pb.LeaseLayersRequest(request=request)
            with closing(
                self._calls.stream("LeaseLayers", lease_request, wait_s, pb.LeaseLayersResponse)
            ) as leased:
                first = self._lease(leased)
                arena = None if first is None else self._arena(first.arena_id)
                if first is not None and arena is not None:
                    lease = FrameLease(arena, first)
                    described: pb.LeaseLayersResponse | None = first
                    while described is not None:
                        for frame in described.frames:
                            yield received.copy_leased_frame(frame, lease)
                        described = None if described.last else next(leased, None)
                    return
        with closing(self._calls.stream("StreamLayers", request, wait_s)) as messages:
            for message in messages:
                for header, data in frames_of(message):
                    yield received.verify_frame(header, data)

    def _lease(self, messages: Iterator[Any]) -> pb.LeaseLayersResponse | None:
        """The first message of a lease; None where the caller should read over gRPC instead."""
        try:
            first: pb.LeaseLayersResponse | None = next(messages, None)
            return first
        except (ResourceExhausted, NotFound, VersionMismatch) as error:  # the last: an older shard
            self._same_host.suspend(error, CROWDED_RETRY_S)
            return None

    def _arena(self, arena_id: int | None) -> ArenaMap | None:
        """The shard's mapped memory. Maps it first if that may be tried; None where that fails."""
        arena = self._same_host.arena(arena_id)
        if arena is not None or not self._options.same_host or not self._same_host.may_try():
            return arena
        try:
            self._same_host.attach(self.call("OpenArena", pb.OpenArenaRequest(), pb.OpenArenaResponse))
        except (KintsugiError, OSError) as error:
            self._same_host.suspend(error)
        return self._same_host.arena(arena_id)

    def _resolve_manifests(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        known = [self._manifests.get(namespace, key) for key in keys]
        held = self._options.find_keys(namespace)
        # One whose data key was retired since is looked up again, because the chunk may have been replaced.
        unknown = [index for index, one in enumerate(known) if one is None or not is_readable(held, one)]
        if unknown:
            found = self.lookup(namespace, [keys[index] for index in unknown])
            for index, manifest in zip(unknown, found, strict=True):
                known[index] = manifest
        return known

    def _look_up_again(self, manifest: ChunkManifest) -> ChunkManifest | None:
        with suppress(KintsugiError):  # then the chunk is lost, as it is without
            return self.lookup(manifest.namespace, [manifest.key])[0]
        return None

    def _report_damage(self, manifest: ChunkManifest) -> None:
        """Have the shard verify the chunk: it quarantines what is damaged there, not on the way."""
        self._manifests.forget(manifest)
        request = pb.VerifyRequest(
            namespace=manifest.namespace,
            keys=[manifest.key.digest],
            failed_salts=[manifest.salt] if manifest.is_encrypted else [],
        )
        with suppress(KintsugiError):  # this stream loses it either way; the scrubber finds it later
            self.call("Verify", request, pb.VerifyResponse)

    def retain(self, namespace: str, keys: Sequence[ChunkKey], ttl_s: float = 0.0) -> builtins.list[bool]:
        """A chunk that this client's keys cannot decrypt counts as missing, as in `tiers`."""
        digests, ttl_s = [key.digest for key in keys], ttl_s or self._options.ttl_s
        request = pb.RetainRequest(namespace=namespace, keys=digests, ttl_s=ttl_s)
        held = builtins.list(self.call("Retain", request, pb.RetainResponse).held)
        if self._options.keys is None:
            return held
        readable = self.find(namespace, keys)
        return [is_held and one is not None for is_held, one in zip(held, readable, strict=True)]

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        request = pb.PrefetchRequest(namespace=namespace, keys=[key.digest for key in keys])
        return int(self.call("Prefetch", request, pb.PrefetchResponse).accepted)

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        request = pb.PinRequest(namespace=namespace, keys=[key.digest for key in keys], lease_s=lease_s)
        response = self.call("Pin", request, pb.PinResponse)
        return PinLease(response.lease_id, response.pinned)

    def unpin(self, lease_id: str) -> int:
        return int(self.call("Unpin", pb.UnpinRequest(lease_id=lease_id), pb.UnpinResponse).unpinned)

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        deleted = 0
        for start in range(0, len(keys), wire.KEYS_MAX):
            part = [key.digest for key in keys[start : start + wire.KEYS_MAX]]
            request = pb.DeleteRequest(namespace=namespace, keys=part)
            deleted += self.call("Delete", request, pb.DeleteResponse).deleted
        return deleted

    def erase(
        self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float
    ) -> builtins.list[ErasedPlace]:
        if keys is None:
            clear = pb.ClearRequest(namespace=namespace, erase=True, at_s=at_s)
            return places_of(self.call("Clear", clear, pb.ClearResponse, ERASE_TIMEOUT_S).erased)
        places: builtins.list[ErasedPlace] = []
        for start in range(0, max(len(keys), 1), wire.KEYS_MAX):
            part = [key.digest for key in keys[start : start + wire.KEYS_MAX]]
            delete = pb.DeleteRequest(namespace=namespace, keys=part, erase=True, at_s=at_s)
            places += places_of(self.call("Delete", delete, pb.DeleteResponse, ERASE_TIMEOUT_S).erased)
        return join_places(places)

    def destroy_keys(self, namespace: str) -> builtins.list[ErasedPlace]:
        return self._options.destroy_keys(namespace)

    def erasures(self, cursor: str) -> ErasurePage:
        shard_id, after = next(iter(read_cursor(cursor).items()), ("", None))
        found = self.list_erasures(shard_id, after)
        return ErasurePage(found.erasures, write_cursor({found.shard_id: found.next}))

    def list_erasures(
        self, shard_id: str, after: int | None, learned: bool = False, asked_by: str = ""
    ) -> ShardErasures:
        """Those after a number that the shard with this id gave; of another shard all. None: none, only the
        latest number. With `learned`: those as well that the shard has learned from others. `asked_by`: the
        shard that asks, which has applied all until `after`."""
        request = pb.ListErasuresRequest(after=after, shard_id=shard_id, learned=learned, asked_by=asked_by)
        return erasures_of_wire(self.call("ListErasures", request, pb.ListErasuresResponse))

    def events(self, namespace: str, cursor: str, limit: int) -> EventPage:
        """A shard of an earlier version tells nothing, and its cursor is empty."""
        request = pb.ListEventsRequest(namespace=namespace, cursor=cursor, limit=limit)
        try:
            answer = self.call("ListEvents", request, pb.ListEventsResponse)
        except VersionMismatch:
            return EventPage((), "", bool(cursor))
        return wire.events_from_wire(answer, self.address)

    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        return [found.manifest for found in self.list_found(namespace, limit, after)]

    def list_found(self, namespace: str, limit: int, after: ChunkKey | None = None) -> builtins.list[Found]:
        """As `list`, with the fastest tier that holds each chunk."""
        chunks: builtins.list[Found] = []
        last = None if after is None else after.digest
        while len(chunks) < limit:
            request = pb.ListRequest(namespace=namespace, limit=limit - len(chunks), after=last)
            found = self.call("List", request, pb.ListResponse).found
            if not found:
                break
            last = found[-1].manifest.key
            chunks += filter(None, map(self._read_found, found))
        return chunks

    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        request = pb.PutReportRequest(fingerprint=fingerprint.digest, name=name, document=document)
        self.call("PutReport", request, pb.PutReportResponse)

    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        request = pb.GetReportRequest(fingerprint=fingerprint.digest, name=name)
        response = self.call("GetReport", request, pb.GetReportResponse)
        return bytes(response.document) if response.HasField("document") else None

    @property
    def transport(self) -> str:
        return "shared-memory" if self._same_host.attached else "grpc"

    def _stats(self) -> pb.StatsResponse:
        stats: pb.StatsResponse = self.call("Stats", pb.StatsRequest(), pb.StatsResponse)
        return stats

    def stats(self) -> StoreStats:
        stats = self._stats()
        return StoreStats(
            chunks=stats.chunks,
            bytes_used=sum(tier.bytes_used for tier in stats.tiers),
            bytes_capacity=sum(tier.bytes_capacity for tier in stats.tiers),
            transport=self.transport,
            durable=any(tier.name != "ram" for tier in stats.tiers),
            shards=(wire.shard_use(self.address, stats),),
        )

    def close(self) -> None:
        self._same_host.close()
        self._calls.close()


def open_grpc(url: str) -> GrpcStore:
    """Open `grpc://host:port?OPTIONS`. Raises `InvalidField` where it names no port, or for an option."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise InvalidField("store", f"{url!r} must name a shard as grpc://host:port")
    return GrpcStore(parts.netloc, options_of(parts.query))


@dataclass(frozen=True)
class _Query(UrlOptions):
    """All options in a URL's query."""

    tls_ca: Path | None = None
    """PEM file of the authority that signed the shards' certificates."""
    tls_cert: Path | None = None
    """PEM file of the client's certificate."""
    tls_key: Path | None = None
    """PEM file of that certificate's private key."""
    tls_name: str = ""
    """The name that the shards' certificates are for; empty: the address that each is called by."""
    keys: Path | None = None
    """File with the keys of encrypted namespaces, which `kintsugi keys` writes."""


def options_of(query: str) -> GrpcOptions:
    """The options in a URL's query, such as `ack=durable&tls_ca=…&tls_cert=…&tls_key=…`.

    Raises `InvalidField` and `UnknownField`.
    """
    values = _read_query(query)
    given = {one.name: getattr(values, one.name) for one in fields(UrlOptions)}
    return GrpcOptions(**given, tls=_tls_of(values), keys=keys_of(query))


def keys_of(query: str) -> KeySource | None:
    """The keys that a URL's query names. Raises as `options_of` does."""
    path = _read_query(query).keys
    return None if path is None else KeyFile(path)


def tls_files_of(query: str) -> TlsFiles | None:
    """The TLS files in a URL's query, for those who need no keys. Raises as `options_of` does."""
    return _tls_of(_read_query(query))


def _read_query(query: str) -> _Query:
    return load(_Query, dict(parse_qsl(query, keep_blank_values=True)), where="store")


def _tls_of(values: _Query) -> TlsFiles | None:
    if not (values.tls_ca or values.tls_cert or values.tls_key):
        return None
    if not (values.tls_ca and values.tls_cert and values.tls_key):
        raise InvalidField("store", "tls_ca, tls_cert and tls_key belong together")
    return TlsFiles(values.tls_ca, values.tls_cert, values.tls_key, values.tls_name)
