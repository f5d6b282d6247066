"""A store whose chunks are in one shard, over gRPC.

Cost of a stream per byte: gRPC's own, and one xxh3 pass. Nothing is copied: frames are views of the message
that carried them."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    VersionMismatch,
)
from kintsugi.core.held import Held
from kintsugi.core.layout import ChunkManifest, HeadRange, check_frames
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.calls import ShardCalls, frames_of, put_messages
from kintsugi.store.client.chunk_cipher import encrypt_chunk, is_readable
from kintsugi.store.client.erasures import (
    erasures_of_wire,
    join_places,
    places_of,
    read_cursor,
    write_cursor,
)
from kintsugi.store.client.options import GrpcOptions, options_of
from kintsugi.store.client.received import CROWDED_RETRY_S, ArenaMap, FrameLease, Received, SameHost
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.breaker import CircuitBreaker
from kintsugi.store.protocol.interface import (
    Anchored,
    Buffer,
    ChunkLost,
    ChunkStore,
    ErasedPlace,
    ErasurePage,
    ErasureRange,
    Found,
    LayerFrame,
    PinLease,
    StoreStats,
)

ERASE_TIMEOUT_S = 600.0


MANIFESTS_BYTES_MAX = 64 << 20
"""Memory for the cached manifests of one shard: thousands of manifests, with 4 KiB of digests each."""
VERIFY_TIMEOUT_S = 600.0

SHARD_FAILURES = (Unavailable, DeadlineExceeded, VersionMismatch)
"""Errors that mean that a shard cannot be used now. Any other error is an answer."""


class LeftAlone(Unavailable):
    """The shard was not called, because recent transfers of this kind failed. Other calls to it may
    succeed."""


@contextmanager
def counted(breaker: CircuitBreaker, address: str, is_refusal_counted: bool = True) -> Iterator[None]:
    """Record in a breaker whether a shard answered a call. Raises `LeftAlone` while the breaker is open.

    A refusal is an answer; without `is_refusal_counted` it is not recorded, because it may come from the
    client itself. A stream that its caller ends early counts as an answer.
    """
    if not breaker.allows():
        raise LeftAlone(f"{address} failed recently and is not called for a moment")
    try:
        yield
    except LeftAlone:  # raised by an inner breaker
        breaker.withdraw()
        raise
    except SHARD_FAILURES:
        breaker.record_failure()
        raise
    except KintsugiError:
        if is_refusal_counted:
            breaker.record_success()
        else:
            breaker.withdraw()
        raise
    except GeneratorExit:
        breaker.record_success()
        raise
    breaker.record_success()


Value = TypeVar("Value")

_ACKS = {"": pb.ACK_UNSPECIFIED, "ram": pb.ACK_RAM, "durable": pb.ACK_DURABLE}


@dataclass(frozen=True)
class Peeked:
    """The result of `GrpcStore.peek`."""

    held: Sequence[bool]
    """For each key, whether the shard has the chunk."""
    is_hot: Sequence[bool]
    """For each key, whether the shard has a hot copy only."""
    room_bytes: int
    """Bytes of copies that the shard accepts."""


@dataclass(frozen=True)
class Verified:
    """The result of `GrpcStore.verify`."""

    intact: int
    absent: int
    quarantined: tuple[ChunkKey, ...]


class _RecentManifests:
    """A cache of the manifests of recently read chunks. Thread-safe.

    Streams are verified with the digests in the manifests.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Held[ChunkKey, ChunkManifest] = Held(MANIFESTS_BYTES_MAX)

    def remember(self, manifest: ChunkManifest) -> None:
        with self._lock:
            self._seen.put(manifest.namespace, manifest.key, manifest, wire.memory_bytes(manifest))

    def get(self, namespace: str, key: ChunkKey) -> ChunkManifest | None:
        with self._lock:
            return self._seen.get(namespace, key)

    def forget(self, manifest: ChunkManifest) -> None:
        with self._lock:
            self._seen.pop(manifest.namespace, manifest.key)


class GrpcStore(ChunkStore):
    """The shard at `address`. Thread-safe."""

    def __init__(self, address: str, options: GrpcOptions | None = None) -> None:
        self.address = address
        self._options = options or GrpcOptions()
        self._calls = ShardCalls(address, self._options.tls, self._options.token_file)
        self._manifests = _RecentManifests()
        self._same_host = SameHost()
        self._reads = CircuitBreaker(backs_off=True)
        """For streams only: a shard may answer lookups although its streams hang. Backs off, because a prompt
        waits for each probe."""
        self._writes = CircuitBreaker()
        """For puts only."""

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
        answers, _ = self._look_up(namespace, keys)
        found = [self._read_found(namespace, answer) for answer in answers]
        for key, one in zip(keys, found, strict=True):
            self._check_is(one is None or one.manifest.key == key, f"with another chunk than {key}")
        return found

    def peek(self, namespace: str, keys: Sequence[ChunkKey]) -> Peeked:
        """Return which chunks the shard holds, without counting a use of them."""
        answers, room_bytes = self._look_up(namespace, keys, peek=True)
        return Peeked([bool(one.tier) for one in answers], [one.is_hot for one in answers], room_bytes)

    def _look_up(
        self, namespace: str, keys: Sequence[ChunkKey], peek: bool = False
    ) -> tuple[list[pb.Found], int]:
        """Return the shard's answer about each key, and the bytes of copies that it accepts."""
        answers: list[pb.Found] = []
        room_bytes = 0
        for part in _batches(keys, wire.LOOKUP_KEYS_BATCH):
            request = pb.LookupRequest(namespace=namespace, keys=[key.digest for key in part], peek=peek)
            response = self.call("Lookup", request, pb.LookupResponse)
            answers += response.found
            room_bytes = response.room_bytes
        if len(answers) != len(keys):
            raise Unavailable(f"{self.address}: answered {len(answers)} of {len(keys)} keys")
        return answers, room_bytes

    def name_key(self, namespace: str) -> bytes:
        return self._options.name_key(namespace)

    def _read_found(self, namespace: str, found: pb.Found) -> Found | None:
        """As `_read_manifest`; None also for a miss."""
        manifest = self._read_manifest(namespace, found.manifest) if found.HasField("manifest") else None
        source = ChunkSource(self.address, found.tier)
        return None if manifest is None else Found(manifest, source, found.width)

    def _read_manifest(self, namespace: str, found: pb.Manifest) -> ChunkManifest | None:
        """Return None for a chunk that another build wrote. Raises `Unavailable` for a chunk of another
        namespace."""
        manifest = wire.readable_manifest(found)
        is_own = manifest is None or manifest.namespace == namespace
        self._check_is(is_own, f"with a chunk of another namespace than {namespace!r}")
        return manifest

    def _check_is(self, is_so: bool, answered: str) -> None:
        """Raise `Unavailable` if the shard did not answer what it was asked."""
        if not is_so:
            raise Unavailable(f"{self.address}: answered {answered}; check which shard runs there")

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> builtins.list[Anchored]:
        found: builtins.list[Anchored] = []
        for part in _batches(anchors, wire.ANCHORS_MAX):
            request = pb.LookupAnchorsRequest(namespace=namespace, space_digest=space_digest, anchors=part)
            response = self.call("LookupAnchors", request, pb.LookupAnchorsResponse)
            found += map(wire.anchored_from_wire, response.chunks)
        return found

    def put(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float = 0.0,
        ttl_s: float = 0.0,
    ) -> bool:
        check_frames(manifest, [memoryview(frame).nbytes for frame in frames])
        keys = self._options.find_keys(manifest.namespace)
        if keys is not None and not manifest.is_encrypted:
            manifest, frames = encrypt_chunk(keys, manifest, frames)
        header = pb.PutHeader(
            manifest=wire.manifest_to_wire(manifest),
            ack=_ACKS[self._options.ack],
            recompute_ms=recompute_ms,
            ttl_s=ttl_s or self._options.ttl_s,
        )
        inserted = self._put(manifest, frames, header)
        if keys is None or inserted:
            return inserted
        (held,) = self.find_stored(manifest.namespace, [manifest.key])
        if held is None or is_readable(keys, held.manifest):
            return False
        # The stored chunk was encrypted with a key that no longer exists, so no client can read it.
        self.delete(manifest.namespace, [manifest.key])
        return self._put(manifest, frames, header)

    def put_copy(
        self,
        manifest: ChunkManifest,
        frames: Sequence[Buffer],
        recompute_ms: float,
        ttl_s: float,
        erasures_seen: int = 0,
        is_hot: bool = False,
    ) -> bool:
        """Send a stored chunk to another shard, and return whether that shard inserted it. `ttl_s` 0: the
        chunk does not expire. `erasures_seen`: the number up to which that shard's erasures are applied
        here. `is_hot`: the shard only shares the chunk's reads."""
        header = pb.PutHeader(
            manifest=wire.manifest_to_wire(manifest),
            recompute_ms=recompute_ms,
            ttl_s=ttl_s,
            is_copy=True,
            erasures_seen=erasures_seen,
            is_hot=is_hot,
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
        with counted(self._writes, self.address):
            return bool(self._calls.put(messages, self._options.put_timeout_s).inserted)

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
            self.address,
            manifests,
            heads,
            deadline_s,
            self._options.find_keys(namespace),
            self._look_up_again,
        )
        frames = self._frames(received, request)
        with counted(self._reads, self.address), closing(frames) as items:
            for item in items:
                while received.damaged:
                    self._report_damage(received.damaged.pop())
                if item is not None:
                    yield item

    def _frames(
        self, received: Received, request: pb.StreamLayersRequest
    ) -> Generator[LayerFrame | ChunkLost | None, None, None]:
        """Yield frames from the shard's memory if that works now, else from messages; None for a frame of a
        chunk that is already lost."""
        if self._arena(None) is not None:
            lease_request = pb.LeaseLayersRequest(request=request)
            with closing(
                self._calls.stream("LeaseLayers", lease_request, received.patience, pb.LeaseLayersResponse)
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
        with closing(self._calls.stream("StreamLayers", request, received.patience)) as messages:
            for message in messages:
                received.count_message(len(message))
                for header, data in frames_of(message):
                    yield received.verify_frame(header, data)

    def _lease(self, messages: Iterator[Any]) -> pb.LeaseLayersResponse | None:
        """Return the first message of a lease; None if the caller should read over gRPC instead."""
        try:
            first: pb.LeaseLayersResponse | None = next(messages, None)
            return first
        except (ResourceExhausted, NotFound) as error:
            self._same_host.suspend(error, CROWDED_RETRY_S)
            return None

    def _arena(self, arena_id: int | None) -> ArenaMap | None:
        """Return the shard's mapped memory, which is mapped first if needed; None if that fails or failed
        recently."""
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
        # A chunk whose data key was retired is looked up again, because it may have been replaced.
        unknown = [index for index, one in enumerate(known) if one is None or not is_readable(held, one)]
        if unknown:
            found = self.lookup(namespace, [keys[index] for index in unknown])
            for index, manifest in zip(unknown, found, strict=True):
                known[index] = manifest
        return known

    def _look_up_again(self, manifest: ChunkManifest) -> ChunkManifest | None:
        with suppress(KintsugiError):  # the chunk is then lost, as without a lookup
            return self.lookup(manifest.namespace, [manifest.key])[0]
        return None

    def _report_damage(self, manifest: ChunkManifest) -> None:
        """Have the shard verify the chunk, which it quarantines if its own copy is damaged."""
        self._manifests.forget(manifest)
        request = pb.VerifyRequest(
            namespace=manifest.namespace,
            keys=[manifest.key.digest],
            failed_salts=[manifest.salt] if manifest.is_encrypted else [],
        )
        with suppress(KintsugiError):  # the stream loses the chunk anyway; the scrubber finds it later
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
        requests = (
            pb.DeleteRequest(namespace=namespace, keys=[key.digest for key in part])
            for part in _batches(keys, wire.KEYS_MAX)
        )
        return sum(self.call("Delete", request, pb.DeleteResponse).deleted for request in requests)

    def erase(
        self, namespace: str, keys: Sequence[ChunkKey] | None, at_s: float, within: str = ""
    ) -> builtins.list[ErasedPlace]:
        if keys is None:
            clear = pb.ClearRequest(namespace=namespace, erase=True, at_s=at_s, within=within)
            return places_of(self.call("Clear", clear, pb.ClearResponse, ERASE_TIMEOUT_S).erased)
        places: builtins.list[ErasedPlace] = []
        for part in _batches(keys, wire.KEYS_MAX) or [()]:
            digests = [key.digest for key in part]
            delete = pb.DeleteRequest(namespace=namespace, keys=digests, erase=True, at_s=at_s, within=within)
            places += places_of(self.call("Delete", delete, pb.DeleteResponse, ERASE_TIMEOUT_S).erased)
        return join_places(places)

    def clear(self, namespace: str) -> int:
        """Delete a namespace's chunks and return their number."""
        return int(self.call("Clear", pb.ClearRequest(namespace=namespace), pb.ClearResponse).deleted)

    def verify(self, namespace: str, keys: Sequence[ChunkKey]) -> Verified:
        """Have the shard read chunks from every tier and quarantine damaged copies."""
        request = pb.VerifyRequest(namespace=namespace, keys=[key.digest for key in keys])
        response = self.call("Verify", request, pb.VerifyResponse, VERIFY_TIMEOUT_S)
        quarantined = tuple(ChunkKey(key) for key in response.quarantined)
        return Verified(response.intact, response.absent, quarantined)

    def destroy_keys(self, namespace: str) -> builtins.list[ErasedPlace]:
        return self._options.destroy_keys(namespace)

    def erasures(self, cursor: str) -> ErasurePage:
        shard_id, after = next(iter(read_cursor(cursor).items()), ("", None))
        found = self.list_erasures(shard_id, after)
        return ErasurePage(found.erasures, write_cursor({found.shard_id: found.next}))

    def list_erasures(self, shard_id: str, after: int | None, asked_by: str = "") -> ErasureRange:
        """Return the erasures after number `after`, which the shard with id `shard_id` returned; all erasures
        if the shard has another id; only the latest number if `after` is None. `asked_by` is the id of the
        calling shard, which has applied all erasures up to `after`."""
        request = pb.ListErasuresRequest(after=after, shard_id=shard_id, asked_by=asked_by)
        answer = self.call("ListErasures", request, pb.ListErasuresResponse)
        try:
            return erasures_of_wire(answer)
        except InvalidField as error:
            raise Unavailable(f"{self.address}: answered with a malformed erasure ({error})") from None

    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        return [found.manifest for found in self.list_found(namespace, limit, after)]

    def list_found(self, namespace: str, limit: int, after: ChunkKey | None = None) -> builtins.list[Found]:
        """Like `list`, but with the fastest tier that holds each chunk."""
        chunks: builtins.list[Found] = []
        last = None if after is None else after.digest
        while len(chunks) < limit:
            request = pb.ListRequest(namespace=namespace, limit=limit - len(chunks), after=last)
            found = self.call("List", request, pb.ListResponse).found
            if not found:
                break
            is_later = last is None or found[-1].manifest.key > last
            self._check_is(is_later, "with the same page of chunks again")
            last = found[-1].manifest.key
            chunks += filter(None, (self._read_found(namespace, one) for one in found))
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

    def counters(self) -> pb.StatsResponse:
        """Return all counters of the shard."""
        stats: pb.StatsResponse = self.call("Stats", pb.StatsRequest(), pb.StatsResponse)
        return stats

    def stats(self) -> StoreStats:
        stats = self.counters()
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


def _batches(values: Sequence[Value], size: int) -> list[Sequence[Value]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def open_grpc(url: str) -> GrpcStore:
    """Open `grpc://host:port?OPTIONS`. Raises `InvalidField` for a URL without a port and for an invalid
    option."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise InvalidField("store", f"{url!r} must name a shard as grpc://host:port")
    return GrpcStore(parts.netloc, options_of(parts.query))
