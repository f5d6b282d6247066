"""Many shards as one `ChunkStore`: placement, replicas, and what happens when some do not answer.

A shard that fails costs its own chunks, which become misses, and nothing else: calls to shards run side by
side, each is retried at most once, and a circuit breaker keeps the next requests from waiting for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from kintsugi.client.breaker import CircuitBreaker
from kintsugi.client.directory import ShardAddress, ShardDirectory, ShardMap
from kintsugi.client.grpc_store import GrpcOptions, GrpcStore
from kintsugi.client.interface import (
    ANCHOR_CANDIDATES_MAX,
    Buffer,
    ChunkLost,
    ChunkStore,
    LayerFrame,
    StoreStats,
)
from kintsugi.client.merge import Part, merged
from kintsugi.core.errors import DeadlineExceeded, Unavailable, VersionMismatch
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, ModelFingerprint

CALLS_MAX = 64
"""Calls to shards at a time, over all requests."""
RETRIES_MAX = 1
RETRY_WAIT_S = 0.02
"""Mean of the jittered wait before a retry."""

SHARD_FAILURES = (Unavailable, DeadlineExceeded, VersionMismatch)
"""What makes a shard's chunks misses; anything else is the caller's mistake and is raised."""

Answer = TypeVar("Answer")


@dataclass
class _Shard:
    store: ChunkStore
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)


class ShardedStore(ChunkStore):
    """The shards of a directory. Thread-safe."""

    def __init__(
        self,
        directory: ShardDirectory,
        options: GrpcOptions | None = None,
        connect: Callable[[str], ChunkStore] | None = None,
    ) -> None:
        self._directory = directory
        self._connect = connect or (lambda address: GrpcStore(address, options))
        self._lock = threading.Lock()
        self._shards: dict[ShardAddress, _Shard] = {}
        self._calls = ThreadPoolExecutor(CALLS_MAX, "kintsugi-shards")

    def _map(self) -> ShardMap:
        """The map now; clients of shards that left it are closed."""
        shards = self._directory.current()
        with self._lock:
            left = [address for address in self._shards if address not in shards.shards]
            for address in left:
                self._shards.pop(address).store.close()
        return shards

    def _shard(self, address: ShardAddress) -> _Shard:
        with self._lock:
            if address not in self._shards:
                self._shards[address] = _Shard(self._connect(address.address))
            return self._shards[address]

    def _ask(self, address: ShardAddress, call: Callable[[ChunkStore], Answer]) -> Answer | None:
        """A shard's answer, after one retry; None where it has none."""
        shard = self._shard(address)
        for attempt in range(RETRIES_MAX + 1):
            if not shard.breaker.allows():
                return None
            try:
                answer = call(shard.store)
            except SHARD_FAILURES as error:
                shard.breaker.failed()
                if not isinstance(error, Unavailable) or attempt == RETRIES_MAX:
                    return None
                time.sleep(RETRY_WAIT_S * random.uniform(0.5, 1.5))
            else:
                shard.breaker.succeeded()
                return answer
        return None

    def _ask_all(
        self, calls: Iterable[tuple[ShardAddress, Callable[[ChunkStore], Answer]]]
    ) -> list[Answer | None]:
        """Answers in order, asked side by side."""
        calls = list(calls)
        if len(calls) == 1:
            return [self._ask(*calls[0])]
        return list(self._calls.map(lambda call: self._ask(*call), calls))

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        shards = self._map()
        owners = [shards.owners(key) for key in keys]
        found: list[ChunkManifest | None] = [None] * len(keys)
        for rank in range(shards.replicas):
            missing: dict[ShardAddress, list[int]] = {}
            for index, ranked in enumerate(owners):
                if found[index] is None and rank < len(ranked):
                    missing.setdefault(ranked[rank], []).append(index)
            answers = self._ask_all(
                (address, _lookup_call(namespace, [keys[index] for index in indices]))
                for address, indices in missing.items()
            )
            for indices, answer in zip(missing.values(), answers, strict=True):
                for index, manifest in zip(indices, answer or [], strict=False):
                    found[index] = manifest
        return found

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        shards = self._map()
        if not shards.shards and keys:
            raise Unavailable("the shard map is empty; start a shard")
        asked: dict[ShardAddress, list[int]] = {}
        for index, key in enumerate(keys):
            for owner in shards.owners(key):
                asked.setdefault(owner, []).append(index)
        answers = self._ask_all(
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

    def members(self) -> list[ChunkStore]:
        """Clients of the shards on the map now. They are this store's to close."""
        return [self._shard(address).store for address in self._map().shards]

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        found: dict[int, dict[ChunkKey, ChunkManifest]] = {}
        for answer in self._broadcast(lambda store: store.lookup_anchors(namespace, space_digest, anchors)):
            for anchor, manifests in answer.items():
                found.setdefault(anchor, {}).update({m.key: m for m in manifests})
        return {
            anchor: sorted(manifests.values(), key=lambda m: -m.num_tokens)[:ANCHOR_CANDIDATES_MAX]
            for anchor, manifests in found.items()
        }

    def _broadcast(self, call: Callable[[ChunkStore], Answer]) -> list[Answer]:
        """The answers of the shards that have one."""
        answers = self._ask_all((address, call) for address in self._map().shards)
        return [answer for answer in answers if answer is not None]

    def put(self, manifest: ChunkManifest, frames: Sequence[Buffer]) -> bool:
        owners = self._map().owners(manifest.key)
        answers = self._ask_all((owner, lambda store: store.put(manifest, frames)) for owner in owners)
        if all(answer is None for answer in answers):
            raise Unavailable(f"none of the {len(owners)} shards that own chunk {manifest.key} answers")
        return any(answers)

    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Iterator[LayerFrame | ChunkLost]:
        if not layers or not keys:
            return
        shards = self._map()
        owners = [shards.owners(key) for key in keys]

        def open_part(address: ShardAddress, chunks: Sequence[int], first_layer: int) -> Part:
            return Part(
                chunks,
                self._read(
                    address,
                    namespace,
                    [keys[c] for c in chunks],
                    range(first_layer, layers.stop),
                    heads,
                    deadline_s,
                ),
            )

        yield from merged(owners, layers, open_part, SHARD_FAILURES, self._prime)

    def _prime(self, parts: Sequence[Part]) -> None:
        if len(parts) == 1:
            parts[0].prime()
        else:
            list(self._calls.map(Part.prime, parts))

    def _read(
        self,
        address: ShardAddress,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Iterator[LayerFrame | ChunkLost]:
        """A shard's stream; its breaker learns how it went."""
        shard = self._shard(address)
        if not shard.breaker.allows():
            raise Unavailable(f"{address.address} failed lately and is left alone")
        try:
            yield from shard.store.stream(namespace, keys, layers, heads, deadline_s)
        except SHARD_FAILURES:
            shard.breaker.failed()
            raise
        shard.breaker.succeeded()

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        present = sum(manifest is not None for manifest in self.lookup(namespace, keys))
        self._broadcast(lambda store: store.delete(namespace, keys))
        return present

    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        pages = self._broadcast(lambda store: store.list(namespace, limit, after))
        by_key = {manifest.key: manifest for page in pages for manifest in page}
        return [by_key[key] for key in sorted(by_key)[:limit]]

    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        def put(store: ChunkStore) -> bool:
            store.put_report(fingerprint, name, document)
            return True

        if not self._broadcast(put):
            raise Unavailable("no shard took the report")

    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        answers = self._broadcast(lambda store: (store.get_report(fingerprint, name),))
        if not answers:
            raise Unavailable("no shard answers")
        return next((document for (document,) in answers if document is not None), None)

    @property
    def transport(self) -> str:
        with self._lock:
            return "+".join(sorted({shard.store.transport for shard in self._shards.values()})) or "none"

    def stats(self) -> StoreStats:
        parts = self._broadcast(lambda store: store.stats())
        transports = sorted({part.transport for part in parts})
        return StoreStats(
            chunks=sum(part.chunks for part in parts),
            bytes_used=sum(part.bytes_used for part in parts),
            bytes_capacity=sum(part.bytes_capacity for part in parts),
            transport="+".join(transports) or "none",
        )

    def close(self) -> None:
        self._directory.close()
        self._calls.shutdown()
        with self._lock:
            for shard in self._shards.values():
                shard.store.close()
            self._shards.clear()


def _lookup_call(
    namespace: str, keys: Sequence[ChunkKey]
) -> Callable[[ChunkStore], Sequence[ChunkManifest | None]]:
    return lambda store: store.lookup(namespace, keys)


def _tiers_call(namespace: str, keys: Sequence[ChunkKey]) -> Callable[[ChunkStore], list[str | None]]:
    return lambda store: store.tiers(namespace, keys)
