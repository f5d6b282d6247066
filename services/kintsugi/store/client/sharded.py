"""Many shards as one store: placement, replicas, and what happens when some do not answer.

A shard that fails costs its own chunks, which become misses, and nothing else: calls to shards run side by
side, each is retried at most once, and a circuit breaker keeps the next requests from waiting for it.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kintsugi.core.errors import (
    DeadlineExceeded,
    InvalidField,
    ResourceExhausted,
    Unavailable,
    VersionMismatch,
)
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.report import supersedes
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.store.client.blocking import BlockingStore
from kintsugi.store.client.breaker import CircuitBreaker
from kintsugi.store.client.calls import BlockingCalls, run_to_completion
from kintsugi.store.client.directory import ShardAddress, ShardDirectory, ShardMap
from kintsugi.store.client.grpc_store import AsyncGrpcStore, GrpcOptions
from kintsugi.store.client.merge import ShardStream, merge_streams
from kintsugi.store.protocol.interface import (
    ANCHOR_CANDIDATES_MAX,
    AsyncChunkStore,
    Buffer,
    BufferFor,
    ChunkLost,
    Found,
    LayerFrame,
    PinLease,
    StoreStats,
)

CALLS_MAX = 64
"""Calls to shards at a time, over all requests."""
RETRIES_MAX = 1
RETRY_WAIT_S = 0.02
"""Mean of the jittered wait before a retry."""

SHARD_FAILURES = (Unavailable, DeadlineExceeded, VersionMismatch)
"""What makes a shard's chunks misses; anything else is the caller's mistake and is raised."""
READ_FAILURES = (*SHARD_FAILURES, ResourceExhausted)
"""Of a stream: a shard that has too many just now is well, but another may have the chunks, too."""

Answer = TypeVar("Answer")
Connect = Callable[[str], AsyncChunkStore]


class Concurrency(ABC):
    """How coroutines run side by side."""

    @abstractmethod
    async def together(self, coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        """Their results, in order; at most `CALLS_MAX` run at a time."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait."""

    @abstractmethod
    async def shard_map(self, directory: ShardDirectory) -> ShardMap:
        """The directory's map; it blocks until the first is known."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class Threads(Concurrency):
    """For coroutines that never suspend: each in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(CALLS_MAX, "kintsugi-shards")

    async def together(self, coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        if len(coroutines) == 1:
            return [await coroutines[0]]
        try:
            results = [self._pool.submit(run_to_completion, coroutine) for coroutine in coroutines]
        except RuntimeError:
            for coroutine in coroutines:
                coroutine.close()
            raise Unavailable("this client is closed") from None
        wait(results)
        return [result.result() for result in results]

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def shard_map(self, directory: ShardDirectory) -> ShardMap:
        return directory.current()

    def close(self) -> None:
        self._pool.shutdown()


class Tasks(Concurrency):
    """For an event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(CALLS_MAX)
        self._known = False

    async def together(self, coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        return list(await asyncio.gather(*map(self._run_in_slot, coroutines)))

    async def _run_in_slot(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        async with self._slots:
            return await coroutine

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def shard_map(self, directory: ShardDirectory) -> ShardMap:
        if not self._known:
            await asyncio.to_thread(directory.current)
            self._known = True
        return directory.current()

    def close(self) -> None:
        return None


@dataclass
class _Shard:
    store: AsyncChunkStore
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)


class AsyncShardedStore(AsyncChunkStore):
    """The shards of a directory."""

    def __init__(
        self,
        directory: ShardDirectory,
        options: GrpcOptions | None = None,
        connect: Connect | None = None,
        concurrency: Concurrency | None = None,
    ) -> None:
        """`connect`: the store at an address; with `concurrency`, how to wait. None: on the running event
        loop."""
        self._directory = directory
        self._connect = connect or (lambda address: AsyncGrpcStore(address, options))
        self._concurrency = concurrency or Tasks()
        self._lock = threading.Lock()
        self._shards: dict[ShardAddress, _Shard] = {}

    async def shard_map(self) -> ShardMap:
        """The map now; clients of shards that left it are closed."""
        shards = await self._concurrency.shard_map(self._directory)
        with self._lock:
            left = [address for address in self._shards if address not in shards.shards]
            gone = [self._shards.pop(address) for address in left]
        for shard in gone:
            await shard.store.close()
        return shards

    def _shard(self, address: ShardAddress) -> _Shard:
        with self._lock:
            if address not in self._shards:
                self._shards[address] = _Shard(self._connect(address.address))
            return self._shards[address]

    async def _ask(
        self, address: ShardAddress, call: Callable[[AsyncChunkStore], Coroutine[Any, Any, Answer]]
    ) -> Answer | None:
        """A shard's answer, after one retry; None where it has none."""
        shard = self._shard(address)
        for attempt in range(RETRIES_MAX + 1):
            if not shard.breaker.allows():
                return None
            try:
                answer = await call(shard.store)
            except SHARD_FAILURES as error:
                shard.breaker.failed()
                if not isinstance(error, Unavailable) or attempt == RETRIES_MAX:
                    return None
                await self._concurrency.pause(RETRY_WAIT_S * random.uniform(0.5, 1.5))
            else:
                shard.breaker.record_success()
                return answer
        return None

    async def _ask_all(
        self, calls: Iterable[tuple[ShardAddress, Callable[[AsyncChunkStore], Coroutine[Any, Any, Answer]]]]
    ) -> list[Answer | None]:
        """Answers in order, asked side by side."""
        return await self._concurrency.together([self._ask(address, call) for address, call in calls])

    async def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        found = await self.find(namespace, keys)
        return [None if entry is None else entry.manifest for entry in found]

    async def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        shards = await self.shard_map()
        owners = [shards.owners(key) for key in keys]
        found: list[Found | None] = [None] * len(keys)
        for rank in range(shards.replicas):
            missing: dict[ShardAddress, list[int]] = {}
            for index, ranked in enumerate(owners):
                if found[index] is None and rank < len(ranked):
                    missing.setdefault(ranked[rank], []).append(index)
            answers = await self._ask_all(
                (address, _find_call(namespace, [keys[index] for index in indices]))
                for address, indices in missing.items()
            )
            for indices, answer in zip(missing.values(), answers, strict=True):
                for index, entry in zip(indices, answer or [], strict=False):
                    found[index] = entry
        return found

    async def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        shards = await self.shard_map()
        if not shards.shards and keys:
            raise Unavailable(_NO_SHARDS)
        asked: dict[ShardAddress, list[int]] = {}
        for index, key in enumerate(keys):
            for owner in shards.owners(key):
                asked.setdefault(owner, []).append(index)
        answers = await self._ask_all(
            (address, _tiers_call(namespace, [keys[index] for index in indices]))
            for address, indices in asked.items()
        )
        found: list[str | None] = [None] * len(keys)
        silent: dict[int, ShardAddress] = {}
        for (address, indices), answer in zip(asked.items(), answers, strict=True):
            for index, tier in zip(indices, answer or [None] * len(indices), strict=True):
                found[index] = found[index] or tier
            if answer is None:
                silent.update(dict.fromkeys(indices, address))
        for index, address in silent.items():
            if found[index] is None:
                raise Unavailable(f"{address.address} owns chunk {keys[index]} and does not answer")
        return found

    async def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        shards = await self.shard_map()
        answers = await self._ask_all(
            (shard, lambda store: store.lookup_anchors(namespace, space_digest, anchors))
            for shard in shards.shards
        )
        found: dict[int, dict[ChunkKey, ChunkManifest]] = {}
        for shard, answer in zip(shards.shards, answers, strict=True):
            for anchor, manifests in (answer or {}).items():
                # What a shard still holds and another owns by now is not read there: it is a miss here, too.
                owned = {m.key: m for m in manifests if shard in shards.owners(m.key)}
                found.setdefault(anchor, {}).update(owned)
        return {
            anchor: sorted(manifests.values(), key=lambda m: -m.num_tokens)[:ANCHOR_CANDIDATES_MAX]
            for anchor, manifests in found.items()
            if manifests
        }

    async def _broadcast(
        self, call: Callable[[AsyncChunkStore], Coroutine[Any, Any, Answer]]
    ) -> list[Answer]:
        """The answers of the shards that have one."""
        shards = await self.shard_map()
        answers = await self._ask_all((address, call) for address in shards.shards)
        return [answer for answer in answers if answer is not None]

    async def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        owners = (await self.shard_map()).owners(manifest.key)
        answers = await self._ask_all(
            (owner, lambda store: store.put(manifest, frames, recompute_ms, tier)) for owner in owners
        )
        if all(answer is None for answer in answers):
            raise Unavailable(f"none of the {len(owners)} shards that own chunk {manifest.key} answers")
        return any(answers)

    async def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor | None = None,
    ) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
        if not layers or not keys:
            return
        shards = await self.shard_map()
        owners = [shards.owners(key) for key in keys]

        def open_part(address: ShardAddress, chunks: Sequence[int], first_layer: int) -> ShardStream:
            items = self._read(
                address,
                namespace,
                [keys[chunk] for chunk in chunks],
                range(first_layer, layers.stop),
                heads,
                deadline_s,
                _renumber_chunks(buffer_for, chunks),
            )
            return ShardStream(chunks, items)

        async with aclosing(merge_streams(owners, layers, open_part, READ_FAILURES, self._prime)) as items:
            async for item in items:
                yield item

    async def _prime(self, parts: Sequence[ShardStream]) -> None:
        await self._concurrency.together([part.prime() for part in parts])

    async def _read(
        self,
        address: ShardAddress,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor | None,
    ) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
        """A shard's stream; its breaker learns how it went."""
        shard = self._shard(address)
        if not shard.breaker.allows():
            raise Unavailable(f"{address.address} failed lately and is left alone")
        items = shard.store.stream(namespace, keys, layers, heads, deadline_s, buffer_for)
        try:
            async with aclosing(items):
                async for item in items:
                    yield item
        except SHARD_FAILURES:
            shard.breaker.failed()
            raise
        shard.breaker.record_success()

    async def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        owned = _by_owner(await self.shard_map(), keys, replicas=1)
        answers = await self._ask_all(
            (address, _prefetch_call(namespace, part)) for address, part in owned.items()
        )
        return sum(answer or 0 for answer in answers)

    async def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Holds every replica. The count is of chunks; a shard that does not answer pins none of its own."""
        shards = await self.shard_map()
        owned = _by_owner(shards, keys, shards.replicas)
        answers = await self._ask_all(
            (address, _pin_call(namespace, part, lease_s)) for address, part in owned.items()
        )
        pins = [(owner.shard_id, pin) for owner, pin in zip(owned, answers, strict=True) if pin is not None]
        lease_id = _SHARDS.join(f"{shard_id}{_LEASE}{pin.lease_id}" for shard_id, pin in pins)
        held = await self.lookup(namespace, keys)
        return PinLease(lease_id, sum(manifest is not None for manifest in held))

    async def unpin(self, lease_id: str) -> int:
        shards = {shard.shard_id: shard for shard in (await self.shard_map()).shards}
        calls = []
        for part in filter(None, lease_id.split(_SHARDS)):
            shard_id, separator, lease = part.partition(_LEASE)
            if not separator:
                raise InvalidField("lease_id", f"{part!r} names no shard; use what pin returned")
            if shard_id in shards:
                calls.append((shards[shard_id], _unpin_call(lease)))
        return sum(answer or 0 for answer in await self._ask_all(calls))

    async def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        present = sum(manifest is not None for manifest in await self.lookup(namespace, keys))
        # Not of the owners alone: who owned a chunk before the map changed may hold it, too.
        shards = await self.shard_map()
        answers = await self._ask_all((shard, _delete_call(namespace, keys)) for shard in shards.shards)
        _of_all(shards, answers, "it may still hold the chunks, the others do not; delete them again")
        return present

    async def list(
        self, namespace: str, limit: int = 1000, after: ChunkKey | None = None
    ) -> list[ChunkManifest]:
        """What is found by key alone: a shard may still hold what another owns by now. What a shard that does
        not answer holds may be nowhere else, also with replicas."""
        shards = await self.shard_map()
        found: dict[ChunkKey, ChunkManifest] = {}
        while len(found) < limit:
            answers = await self._ask_all(
                (shard, _list_call(namespace, limit, after)) for shard in shards.shards
            )
            pages = _of_all(shards, answers, "what it holds would be left out; list again")
            # Behind a full page its shard may hold more, and what others hold there comes after it.
            ends = [page[-1].key for page in pages if len(page) >= limit]
            end = min(ends, default=None)
            for shard, page in zip(shards.shards, pages, strict=True):
                near = [manifest for manifest in page if end is None or manifest.key <= end]
                found.update((m.key, m) for m in near if shard in shards.owners(m.key))
            if end is None:
                break
            after = end
        return [found[key] for key in sorted(found)[:limit]]

    async def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        async def put(store: AsyncChunkStore) -> bool:
            await store.put_report(fingerprint, name, document)
            return True

        if not await self._broadcast(put):
            raise Unavailable("no shard took the report")

    async def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        async def get(store: AsyncChunkStore) -> tuple[bytes | None]:
            return (await store.get_report(fingerprint, name),)

        shards = (await self.shard_map()).shards
        answers = await self._ask_all((address, get) for address in shards)
        held = {shard: answer[0] for shard, answer in zip(shards, answers, strict=True) if answer is not None}
        if not held:
            raise Unavailable("no shard answers")
        newest: bytes | None = None
        for document in held.values():
            if document is not None and supersedes(document, newest):
                newest = document
        if newest is not None:
            await self._repair_report(held, fingerprint, name, newest)
        return newest

    async def _repair_report(
        self,
        held: Mapping[ShardAddress, bytes | None],
        fingerprint: ModelFingerprint,
        name: str,
        newest: bytes,
    ) -> None:
        """Put the newest report into the shards that hold an older one or none. Otherwise a shard that missed
        a trip would undo it on the day when it alone answers."""

        async def put(store: AsyncChunkStore) -> None:
            with suppress(ResourceExhausted):  # a shard without room is no reason to fail a read
                await store.put_report(fingerprint, name, newest)

        await self._ask_all((shard, put) for shard, document in held.items() if supersedes(newest, document))

    @property
    def transport(self) -> str:
        with self._lock:
            return "+".join(sorted({shard.store.transport for shard in self._shards.values()})) or "none"

    async def stats(self) -> StoreStats:
        parts = await self._broadcast(lambda store: store.stats())
        transports = sorted({part.transport for part in parts})
        return StoreStats(
            chunks=sum(part.chunks for part in parts),
            bytes_used=sum(part.bytes_used for part in parts),
            bytes_capacity=sum(part.bytes_capacity for part in parts),
            transport="+".join(transports) or "none",
            durable=bool(parts) and all(part.durable for part in parts),
        )

    async def close(self) -> None:
        self._directory.close()
        self._concurrency.close()
        with self._lock:
            shards = list(self._shards.values())
            self._shards.clear()
        for shard in shards:
            await shard.store.close()


class ShardedStore(BlockingStore):
    """`AsyncShardedStore` for callers without an event loop. Thread-safe."""

    def __init__(self, directory: ShardDirectory, options: GrpcOptions | None = None) -> None:
        options = options or GrpcOptions()

        def connect(address: str) -> AsyncChunkStore:
            return AsyncGrpcStore(address, options, BlockingCalls(address, options.tls))

        super().__init__(AsyncShardedStore(directory, options, connect, Threads()))


_NO_SHARDS = "the shard map is empty; start a shard"
_SHARDS, _LEASE = ",", "="
"""In the id of a lease over several shards: `SHARD=LEASE,SHARD=LEASE`."""


def _by_owner(
    shards: ShardMap, keys: Sequence[ChunkKey], replicas: int
) -> dict[ShardAddress, list[ChunkKey]]:
    """The keys that each shard owns as one of the first `replicas`."""
    owned: dict[ShardAddress, list[ChunkKey]] = {}
    for key in keys:
        for owner in shards.owners(key)[:replicas]:
            owned.setdefault(owner, []).append(key)
    return owned


def _of_all(shards: ShardMap, answers: Sequence[Answer | None], otherwise: str) -> list[Answer]:
    """The answers of all shards of the map. Raises `Unavailable` where one has none."""
    if not shards.shards:
        raise Unavailable(_NO_SHARDS)
    silent = [shard for shard, answer in zip(shards.shards, answers, strict=True) if answer is None]
    if silent:
        counted = f"{len(silent)} of {len(answers)} shards"
        raise Unavailable(f"{silent[0].address} does not answer ({counted}): {otherwise}")
    return [answer for answer in answers if answer is not None]


def _renumber_chunks(buffer_for: BufferFor | None, chunks: Sequence[int]) -> BufferFor | None:
    """`buffer_for` with the chunks of one shard's stream numbered as in the whole request."""
    if buffer_for is None:
        return None
    return lambda chunk, layer, size_bytes: buffer_for(chunks[chunk], layer, size_bytes)


def _find_call(
    namespace: str, keys: Sequence[ChunkKey]
) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, Sequence[Found | None]]]:
    return lambda store: store.find(namespace, keys)


def _tiers_call(
    namespace: str, keys: Sequence[ChunkKey]
) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, Sequence[str | None]]]:
    return lambda store: store.tiers(namespace, keys)


def _prefetch_call(
    namespace: str, keys: Sequence[ChunkKey]
) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, int]]:
    return lambda store: store.prefetch(namespace, keys)


def _pin_call(
    namespace: str, keys: Sequence[ChunkKey], lease_s: float
) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, PinLease]]:
    return lambda store: store.pin(namespace, keys, lease_s)


def _delete_call(
    namespace: str, keys: Sequence[ChunkKey]
) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, int]]:
    return lambda store: store.delete(namespace, keys)


def _list_call(
    namespace: str, limit: int, after: ChunkKey | None
) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, Sequence[ChunkManifest]]]:
    return lambda store: store.list(namespace, limit, after)


def _unpin_call(lease_id: str) -> Callable[[AsyncChunkStore], Coroutine[Any, Any, int]]:
    return lambda store: store.unpin(lease_id)
