"""The gRPC service `ChunkStore` of a shard.

One event loop serves every connection, so idle clients and slow readers cost no thread. Calls that could
block it (disk reads, waiting for room, verification of whole chunks) run on threads.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial, wraps
from typing import Any

import grpc

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    KintsugiError,
    NotFound,
    ResourceExhausted,
    VersionMismatch,
)
from kintsugi.core.layout import FORMAT, ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.grpc_server import build_handler, read_message
from kintsugi.store.protocol.grpc_status import abort_call
from kintsugi.store.protocol.guard import Admission, ShardGuard
from kintsugi.store.protocol.messages import parse_message
from kintsugi.store.protocol.tls import TlsFiles
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.erasure import Removed, Scope
from kintsugi.store.shard.eviction.room import NoRoomYet
from kintsugi.store.shard.exporter import ShardMetrics
from kintsugi.store.shard.local import ArenaDoor
from kintsugi.store.shard.shard import Shard, Steps, poll_waits_s
from kintsugi.store.shard.streaming import LayerStream
from kintsugi.store.shard.tiers.ram_tier import Arena, ChunkPut, PutOptions

PUT_IDLE_S_MAX = 30.0
"""A put ends if its client sends nothing for this long."""
LEASE_S_MAX = 60.0
"""A same-host reader loses its lease after this long."""
PUT_WAIT_S_MAX = 10.0
"""How long a put waits for room."""
VERIFIERS = 2
"""Concurrent verifications of chunks; reads from disk need threads, too."""
ERASERS = 8
"""Concurrent steps of erasures. Erasures that begin together wipe the tiers once."""
DRAIN_S_MAX = 3600.0
RECOMPUTE_MS_PER_TOKEN_MAX = 100.0
"""Maximum time that a put may state for its chunk's prefill, per token; longer times are reduced to it. A
model of 8 billion parameters takes that long on one CPU core. Eviction keeps what is expensive to recompute,
so an arbitrary time would keep a chunk forever."""
STREAM_BYTES_MAX = 2 << 30
"""Maximum bytes of messages held for slow readers, two per stream: 512 streams of 2 MiB frames."""


_RPCS = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", rpc.name).lower(): rpc
    for rpc in pb.DESCRIPTOR.services_by_name["ChunkStore"].methods
}
"""The RPCs by the names of their handlers: `put_chunk_kv` for `PutChunkKV`."""


def _check_protocol(context: Any) -> None:
    metadata = dict(context.invocation_metadata() or ())
    version = metadata.get(wire.PROTOCOL_METADATA, str(wire.PROTOCOL_VERSION))
    if version != str(wire.PROTOCOL_VERSION):
        raise VersionMismatch(
            f"protocol {version!r} is not supported; this shard supports protocol {wire.PROTOCOL_VERSION}"
        )


def _answers(handler: Callable[[Any, Any, Admission], Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
    """Wrap an RPC's handler: check the protocol, identify the caller, read and authorise its message, time
    the call, write the response, and turn our errors into gRPC statuses. A handler that returns None has
    written its responses. Bulk RPCs exchange bytes, which gRPC does not serialise again."""
    rpc = _RPCS[handler.__name__]
    message = getattr(pb, rpc.input_type.name)

    @wraps(handler)
    async def handle_rpc(self: Any, messages: AsyncIterator[bytes], context: Any) -> None:
        try:
            _check_protocol(context)
            name = handler.__name__
            with self.metrics.time_rpc(name), self._guard.admit(name, context) as admission:
                if rpc.client_streaming:
                    request = admission.authorize_put(messages)
                else:
                    request = admission.authorize(parse_message(message, await read_message(context)))
                response = await handler(self, request, admission)
                if response is not None:
                    await context.write(response.SerializeToString())
        except KintsugiError as error:
            await abort_call(context, error)

    return handle_rpc


class ChunkStoreService:
    """One handler per RPC; `generic_handler` registers them."""

    def __init__(
        self,
        shard: Shard,
        durable_by_default: bool = False,
        door: ArenaDoor | None = None,
        tls: TlsFiles | None = None,
        guard: ShardGuard | None = None,
    ) -> None:
        """`door` hands the arena to peers of the same host; None: the arena is not shared. `tls`: the
        server's files; the metrics watch their certificate. `guard` decides who may make which call; None:
        every client may make every call."""
        self.shard = shard
        self.bytes_read = {"grpc": 0, "shared-memory": 0}
        self.metrics = ShardMetrics(shard, self.bytes_read, tls)
        self._door = door
        self._guard = guard or ShardGuard()
        self._stream_bytes = 0
        self.durable_by_default = durable_by_default
        self._verifiers = ThreadPoolExecutor(VERIFIERS, "kintsugi-verify")
        self._erasers = ThreadPoolExecutor(ERASERS, "kintsugi-erase")
        self._erasing: set[asyncio.Task[Removed]] = set()

    @_answers
    async def lookup(self, request: pb.LookupRequest, call: Admission) -> pb.LookupResponse:
        if len(request.keys) > wire.LOOKUP_KEYS_BATCH:  # a long one must not delay other lookups
            return await asyncio.to_thread(self._build_lookup_response, request)
        return self._build_lookup_response(request)

    def _build_lookup_response(self, request: pb.LookupRequest) -> pb.LookupResponse:
        if request.peek:
            held = self.shard.peek(request.namespace, wire.keys_from_wire(request.keys))
            found = [pb.Found(tier=one.tier_name, is_hot=one.is_hot) if one else pb.Found() for one in held]
            return pb.LookupResponse(found=found, room_bytes=self.shard.table.room_bytes())
        entries = self.shard.lookup(request.namespace, wire.keys_from_wire(request.keys))
        size = sum(wire.manifest_bytes(entry.manifest) for entry in entries if entry is not None)
        if size > wire.RESPONSE_BYTES_MAX:
            raise ResourceExhausted(
                f"the manifests have {size} bytes; a response holds at most {wire.RESPONSE_BYTES_MAX}, so "
                "request fewer keys"
            )
        return pb.LookupResponse(found=map(self._entry_to_found, entries))

    @_answers
    async def lookup_anchors(
        self, request: pb.LookupAnchorsRequest, call: Admission
    ) -> pb.LookupAnchorsResponse:
        if len(request.anchors) > wire.ANCHORS_MAX:
            raise InvalidField(
                "anchors", f"{len(request.anchors)} anchors; at most {wire.ANCHORS_MAX} are answered per call"
            )
        return await asyncio.to_thread(self._build_anchors_response, request)

    def _build_anchors_response(self, request: pb.LookupAnchorsRequest) -> pb.LookupAnchorsResponse:
        found = self.shard.lookup_anchors(request.namespace, request.space_digest, request.anchors)
        return pb.LookupAnchorsResponse(chunks=map(wire.anchored_to_wire, found))

    @_answers
    async def put_chunk_kv(self, messages: AsyncIterator[bytes], call: Admission) -> pb.PutChunkKVResponse:
        manifest, options = self._put_header(await _next_message(messages))
        durable = options.durable
        put = await self._begin_put(manifest, options)
        if put is None:
            return await self._present(manifest, durable)
        try:
            async with self._cut_by_erasures(manifest.namespace, [manifest.key], lambda: put.is_erased):
                while not self._take(put, await _next_message(messages)):
                    pass
        except BaseException:
            self.shard.table.abort(put)
            raise
        committed = self.shard.commit(put)
        if not committed.inserted:
            return await self._present(manifest, durable)
        if durable and committed.durable is not None:
            await asyncio.wrap_future(committed.durable)
        return pb.PutChunkKVResponse(inserted=True)

    async def _present(self, manifest: ChunkManifest, durable: bool) -> pb.PutChunkKVResponse:
        """Answer a put of a chunk that the shard already has. A durable put waits until the chunk is on disk
        and its lifetime is recorded."""
        if not durable:
            return pb.PutChunkKVResponse(inserted=False)
        writing = self.shard.table.make_durable((manifest.namespace, manifest.key))
        if writing is not None:
            await asyncio.wrap_future(writing)
        await asyncio.to_thread(self.shard.record_lifetimes)
        return pb.PutChunkKVResponse(inserted=False)

    async def _begin_put(self, manifest: ChunkManifest, options: PutOptions) -> ChunkPut | None:
        """Reserve room for a chunk. Polls while a disk write makes room: with a thread per waiting put, the
        puts of one namespace would delay all others. Raises `NoRoomYet`."""
        deadline_s = asyncio.get_running_loop().time() + PUT_WAIT_S_MAX
        waits_s = poll_waits_s()
        while True:
            try:
                return self.shard.begin_put(manifest, options)
            except NoRoomYet:
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise
            await asyncio.sleep(next(waits_s))

    def _put_header(self, message: bytes) -> tuple[ChunkManifest, PutOptions]:
        first, _ = wire.parse_payload(message, pb.PutChunkKVRequest)
        header = first.header
        durable = (
            self.durable_by_default if header.ack == pb.ACK_UNSPECIFIED else header.ack == pb.ACK_DURABLE
        )
        manifest = wire.manifest_from_wire(header.manifest)
        return manifest, PutOptions(
            durable=durable and not header.is_hot,
            ttl_s=header.ttl_s or math.inf,
            recompute_ms=min(header.recompute_ms, RECOMPUTE_MS_PER_TOKEN_MAX * manifest.num_tokens),
            is_copy=header.is_copy,
            erasures_seen=header.erasures_seen,
            is_hot=header.is_hot,
        )

    @staticmethod
    def _take(put: ChunkPut, message: bytes) -> bool:
        """Write one message's frames. Returns whether the message commits the put."""
        request, payload = wire.parse_payload(message, pb.PutChunkKVRequest)
        if payload:
            put.write(request.first_layer, payload)
        return request.commit

    @_answers
    async def stream_layers(self, request: pb.StreamLayersRequest, call: Admission) -> None:
        async with self._open_stream(request) as stream:
            with self._room_for_messages(stream.message_bytes_max):
                await stream.write_frames(call.context)
        self.bytes_read["grpc"] += stream.bytes_sent

    @asynccontextmanager
    async def _cut_by_erasures(
        self, namespace: str, keys: Sequence[ChunkKey], is_in_the_way: Callable[[], bool]
    ) -> AsyncIterator[None]:
        """End the `with` block with `_Cut` if an erasure of its chunks has waited too long for the block.
        `is_in_the_way`: as in `Holders.add`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as timer:
                cut = partial(_end_now, loop, timer)
                with self.shard.holders.add([(namespace, key) for key in keys], is_in_the_way, cut):
                    yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise _Cut(f"chunks of {namespace!r} were erased while they were in use; compute them") from None

    @asynccontextmanager
    async def _open_stream(self, request: pb.StreamLayersRequest) -> AsyncIterator[LayerStream]:
        """Hold a request's chunks in place during the `with` block. Raises `_Cut`."""
        keys = wire.keys_from_wire(request.keys)
        layers = range(request.layer_start, request.layer_stop)
        heads = HeadRange(request.head_start, request.head_stop)
        reading = self.shard.open(request.namespace, keys, layers, heads)
        try:
            async with self._cut_by_erasures(request.namespace, keys, lambda: reading.holds_forgotten):
                yield LayerStream(self.shard, reading, layers, request.deadline_ms / 1000)
        finally:
            self.shard.table.close(reading)

    @contextmanager
    def _room_for_messages(self, message_bytes_max: int) -> Iterator[None]:
        """Bound the memory of messages for slow readers. Raises `ResourceExhausted`."""
        size = 2 * message_bytes_max  # gRPC sends one while the next is joined
        if self._stream_bytes + size > STREAM_BYTES_MAX:
            raise ResourceExhausted(
                f"the messages of open streams take {self._stream_bytes} of {STREAM_BYTES_MAX} bytes; "
                "try again when some streams have ended"
            )
        self._stream_bytes += size
        try:
            yield
        finally:
            self._stream_bytes -= size

    def _shared(self) -> tuple[ArenaDoor, Arena]:
        if self._door is None:
            raise NotFound("this shard does not share its arena; read over gRPC")
        return self._door, self.shard.ram.arena

    @_answers
    async def open_arena(self, request: pb.OpenArenaRequest, call: Admission) -> pb.OpenArenaResponse:
        door, arena = self._shared()
        return pb.OpenArenaResponse(
            socket_path=str(door.path),
            token=door.issue(),
            arena_bytes=arena.file_bytes,
            arena_id=arena.arena_id,
        )

    @_answers
    async def lease_layers(self, message: pb.LeaseLayersRequest, call: Admission) -> None:
        _, arena = self._shared()
        async with self._open_stream(message.request) as stream:
            lease = arena.begin_lease()
            header = pb.LeaseLayersResponse(
                lease_s=LEASE_S_MAX,
                generation_offset=lease.offset,
                generation=lease.generation,
                arena_id=arena.arena_id,
            )
            try:
                async with asyncio.timeout(LEASE_S_MAX):
                    await stream.write_descriptors(call.context, header)
                    self.bytes_read["shared-memory"] += stream.bytes_sent
                    await asyncio.Event().wait()  # the reader ends the call once it has its copies
            except TimeoutError:
                raise DeadlineExceeded(f"the lease of {LEASE_S_MAX:.0f} s has expired") from None
            finally:
                arena.end_lease(lease)

    @_answers
    async def prefetch(self, request: pb.PrefetchRequest, call: Admission) -> pb.PrefetchResponse:
        keys = wire.keys_from_wire(request.keys)
        return pb.PrefetchResponse(accepted=self.shard.prefetch(request.namespace, keys))

    @_answers
    async def retain(self, request: pb.RetainRequest, call: Admission) -> pb.RetainResponse:
        keys = wire.keys_from_wire(request.keys)
        ttl_s = request.ttl_s or math.inf
        held = await asyncio.to_thread(self.shard.retain, request.namespace, keys, ttl_s)
        return pb.RetainResponse(held=held)

    @_answers
    async def pin(self, request: pb.PinRequest, call: Admission) -> pb.PinResponse:
        keys = wire.keys_from_wire(request.keys)
        lease_id, pinned = self.shard.pin(request.namespace, keys, request.lease_s)
        return pb.PinResponse(lease_id=lease_id, pinned=pinned)

    @_answers
    async def unpin(self, request: pb.UnpinRequest, call: Admission) -> pb.UnpinResponse:
        return pb.UnpinResponse(unpinned=self.shard.table.unpin(request.lease_id))

    @_answers
    async def drain(self, request: pb.DrainRequest, call: Admission) -> pb.DrainResponse:
        timeout_s = min(request.timeout_s, DRAIN_S_MAX)
        return pb.DrainResponse(bytes_left=await asyncio.to_thread(self.shard.drain, timeout_s))

    @_answers
    async def delete(self, request: pb.DeleteRequest, call: Admission) -> pb.DeleteResponse:
        keys = wire.keys_from_wire(request.keys)
        if request.erase:
            scope = Scope.of(request.namespace, keys, call.pattern_of(request))
            erased = await self._erase(scope, request.at_s)
            return pb.DeleteResponse(deleted=erased.chunks, erased=self._erased_to_wire(erased))
        deleted = self.shard.delete(request.namespace, keys, call.pattern_of(request))
        await self._wait_for_flush()
        return pb.DeleteResponse(deleted=deleted)

    async def _erase(self, scope: Scope, at_s: float) -> Removed:
        if not 0.0 <= at_s < math.inf:
            raise InvalidField("at_s", f"{at_s} is not a time in Unix seconds")
        erasing = asyncio.create_task(self._run_steps(self.shard.erasing(scope, at_s)))
        self._erasing.add(erasing)
        erasing.add_done_callback(self._end_erasing)
        # An erasure goes on if its client leaves.
        return await asyncio.shield(erasing)

    def _end_erasing(self, erasing: asyncio.Task[Removed]) -> None:
        self._erasing.discard(erasing)
        if not erasing.cancelled():
            erasing.exception()  # its client may have left

    async def _run_steps(self, steps: Steps[Removed]) -> Removed:
        """Do steps on threads, which they hold only while they run."""
        loop = asyncio.get_running_loop()
        while True:
            found = await loop.run_in_executor(self._erasers, _do_step, steps)
            if isinstance(found, Removed):
                return found
            await asyncio.sleep(found)

    def _erased_to_wire(self, erased: Removed) -> pb.Erased:
        tiers = [
            pb.ErasedTier(tier=name, chunks=chunks, size_bytes=size)
            for name, (chunks, size) in erased.tiers.items()
        ]
        return pb.Erased(shard_id=self.shard.shard_id, tiers=tiers, gone_at_s=erased.gone_at_s)

    @_answers
    async def list_erasures(
        self, request: pb.ListErasuresRequest, call: Admission
    ) -> pb.ListErasuresResponse:
        erasures = self.shard.erasures
        answer = pb.ListErasuresResponse(shard_id=self.shard.shard_id)
        after = erasures.newest
        if request.HasField("after"):
            after = request.after if request.shard_id == self.shard.shard_id else 0
        if request.asked_by:
            erasures.acknowledge(request.asked_by, after)
        limit = min(request.limit or wire.LIST_MAX, wire.LIST_MAX)
        found = erasures.after(after, limit)
        answer.next = found.next
        answer.merged.extend(
            pb.MergedErasures(pattern=pattern, number=mark.number, at_s=mark.at_s)
            for pattern, mark in found.merged.items()
        )
        answer.erasures.extend(
            pb.Erasure(
                namespace=one.namespace,
                key=one.key.digest if one.key else b"",
                at_s=one.at_s,
                within=one.within,
            )
            for one in found.erasures
        )
        return answer

    async def _wait_for_flush(self) -> None:
        """Wait until deletions survive a crash."""
        await asyncio.gather(*map(asyncio.wrap_future, self.shard.flush_writers()))

    @_answers
    async def list(self, request: pb.ListRequest, call: Admission) -> pb.ListResponse:
        return await asyncio.to_thread(self._build_list_page, request)

    def _build_list_page(self, request: pb.ListRequest) -> pb.ListResponse:
        """Runs on a thread, so that lookups do not wait: thousands of manifests take a tenth of a second."""
        limit = min(request.limit or wire.LIST_MAX, wire.LIST_MAX)
        after = ChunkKey(request.after) if request.HasField("after") else None
        response = pb.ListResponse()
        size = 0
        for entry in self.shard.page(request.namespace, limit, after):
            size += wire.manifest_bytes(entry.manifest)
            if response.found and size > wire.RESPONSE_BYTES_MAX:
                break
            response.found.append(self._entry_to_found(entry))
        return response

    def _entry_to_found(self, entry: ChunkEntry | None) -> pb.Found:
        if entry is None:
            return pb.Found()
        manifest, width = wire.manifest_to_wire(entry.manifest), self.shard.heat.width_of(entry)
        return pb.Found(manifest=manifest, tier=entry.tier_name, width=width)

    @_answers
    async def clear(self, request: pb.ClearRequest, call: Admission) -> pb.ClearResponse:
        scope = Scope(request.namespace, within=call.pattern_of(request))
        if request.erase:
            erased = await self._erase(scope, request.at_s)
            return pb.ClearResponse(deleted=erased.chunks, erased=self._erased_to_wire(erased))
        deleted = await asyncio.to_thread(self.shard.clear, request.namespace, scope.within)
        await self._wait_for_flush()
        return pb.ClearResponse(deleted=deleted)

    @_answers
    async def put_report(self, request: pb.PutReportRequest, call: Admission) -> pb.PutReportResponse:
        await asyncio.to_thread(self.shard.reports.put, *_report_address(request), request.document)
        return pb.PutReportResponse()

    @_answers
    async def get_report(self, request: pb.GetReportRequest, call: Admission) -> pb.GetReportResponse:
        return pb.GetReportResponse(document=self.shard.reports.get(*_report_address(request)))

    @_answers
    async def stats(self, request: pb.StatsRequest, call: Admission) -> pb.StatsResponse:
        stats = stats_to_wire(self.shard, self.bytes_read)
        return stats if call.caller.is_unrestricted else _without_use(stats)

    @_answers
    async def verify(self, request: pb.VerifyRequest, call: Admission) -> pb.VerifyResponse:
        keys = wire.keys_from_wire(request.keys)
        if len(request.failed_salts) > len(keys):
            raise InvalidField("failed_salts", f"{len(request.failed_salts)} for {len(keys)} keys")
        failed_salts = frozenset(request.failed_salts)
        intact: dict[ChunkKey, bool] = {}
        for key in dict.fromkeys(keys):  # one at a time, so that concurrent calls take turns
            verifying = partial(self.shard.verify, request.namespace, [key], failed_salts)
            intact |= await asyncio.get_running_loop().run_in_executor(self._verifiers, verifying)
        return pb.VerifyResponse(
            intact=sum(intact.values()),
            absent=len(set(keys)) - len(intact),
            quarantined=[key.digest for key, whole in intact.items() if not whole],
        )

    def generic_handler(self) -> Any:
        """Return the handlers of every RPC."""
        handlers = {rpc.name: build_handler(getattr(self, name)) for name, rpc in _RPCS.items()}
        return grpc.method_handlers_generic_handler(wire.SERVICE, handlers)


def _do_step(steps: Steps[Removed]) -> float | Removed:
    """Return the time before the next step, or the result after the last one."""
    try:
        return next(steps)
    except StopIteration as end:
        removed: Removed = end.value
        return removed


class _Cut(NotFound):
    """An erasure ended the call."""


def _end_now(loop: asyncio.AbstractEventLoop, timer: asyncio.Timeout) -> None:
    """End a block that has a timer. Call it from another thread."""

    def expire() -> None:
        with suppress(RuntimeError):  # it has ended
            timer.reschedule(loop.time())

    with suppress(RuntimeError):  # the server, and with it the call, has ended
        loop.call_soon_threadsafe(expire)


def _report_address(request: pb.PutReportRequest | pb.GetReportRequest) -> tuple[ModelFingerprint, str]:
    if len(request.fingerprint) != wire.DIGEST_BYTES:
        raise InvalidField(
            "fingerprint", f"has {len(request.fingerprint)} bytes; a digest has {wire.DIGEST_BYTES}"
        )
    return ModelFingerprint(request.fingerprint), request.name


def stats_to_wire(shard: Shard, bytes_read: Mapping[str, int]) -> pb.StatsResponse:
    counters = shard.table.counters
    queues = {queue.tier.name: queue.queue_bytes for queue in shard.table.queues}
    if shard.bucket is not None:
        queues[shard.bucket.name] = shard.bucket.staged_bytes
    failures = shard.tier_failures()
    return pb.StatsResponse(
        shard_id=shard.shard_id,
        protocol_version=wire.PROTOCOL_VERSION,
        format_version=FORMAT,
        chunks=len(shard),
        tiers=[
            pb.TierStats(
                name=tier.name,
                chunks=tier.chunks,
                bytes_used=tier.used_bytes,
                bytes_capacity=tier.capacity_bytes,
                evictions=tier.evictions,
                queue_bytes=queues.get(tier.name, 0),
                failure=failures.get(tier.name, ""),
            )
            for tier in shard.tiers
        ],
        hits=counters.hits,
        misses=counters.misses,
        quarantined=counters.quarantined,
        draining=shard.table.draining,
        bytes_read=bytes_read,
    )


def _without_use(stats: pb.StatsResponse) -> pb.StatsResponse:
    """Return the statistics for a caller that may use only some namespaces, without values that reveal the
    use of others."""
    tiers = [pb.TierStats(name=tier.name, bytes_capacity=tier.bytes_capacity) for tier in stats.tiers]
    return pb.StatsResponse(
        shard_id=stats.shard_id,
        protocol_version=stats.protocol_version,
        format_version=stats.format_version,
        draining=stats.draining,
        tiers=tiers,
    )


async def _next_message(messages: AsyncIterator[bytes]) -> bytes:
    """Return a put's next message. Raises `InvalidField` if the put ends early or the client sends
    nothing."""
    try:
        return await asyncio.wait_for(anext(messages), PUT_IDLE_S_MAX)
    except StopAsyncIteration:
        raise InvalidField("commit", "is missing at the end of the put; nothing was stored") from None
    except TimeoutError:
        raise InvalidField(
            "commit", f"no message arrived for {PUT_IDLE_S_MAX:.0f} s; nothing was stored"
        ) from None
