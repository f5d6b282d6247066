"""A store of this process's memory behind the face that stores beyond it have."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, Sequence

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.store.protocol.interface import (
    AsyncChunkStore,
    Buffer,
    BufferFor,
    ChunkLost,
    ChunkStore,
    LayerFrame,
    PinLease,
    StoreStats,
)


class InProcessStore(AsyncChunkStore):
    """Every call is over at once. Closing it leaves the store to the others that use it."""

    def __init__(self, store: ChunkStore) -> None:
        """`store`: one whose calls do not wait, such as `RamStore`."""
        self._store = store

    async def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        return self._store.lookup(namespace, keys)

    async def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        return self._store.tiers(namespace, keys)

    async def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        return self._store.lookup_anchors(namespace, space_digest, anchors)

    async def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        return self._store.put(manifest, frames, recompute_ms, tier)

    async def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor | None = None,
    ) -> AsyncGenerator[LayerFrame | ChunkLost, None]:
        if buffer_for is None:
            items = self._store.stream(namespace, keys, layers, heads, deadline_s)
        else:
            items = self._store.stream_into(namespace, keys, layers, heads, deadline_s, buffer_for)
        for item in items:
            yield item

    async def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        return sum(manifest is not None for manifest in self._store.lookup(namespace, keys))

    async def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        raise InvalidField("store", "a store in this process's memory has no pins; use a shard")

    async def unpin(self, lease_id: str) -> int:
        raise InvalidField("store", "a store in this process's memory has no pins; use a shard")

    async def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        return self._store.delete(namespace, keys)

    async def list(
        self, namespace: str, limit: int = 1000, after: ChunkKey | None = None
    ) -> builtins.list[ChunkManifest]:
        return self._store.list(namespace, limit, after)

    async def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        self._store.put_report(fingerprint, name, document)

    async def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        return self._store.get_report(fingerprint, name)

    @property
    def transport(self) -> str:
        return self._store.transport

    async def stats(self) -> StoreStats:
        return self._store.stats()

    async def close(self) -> None:
        return None
