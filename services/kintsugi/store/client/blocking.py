"""The blocking face of a client whose core awaits calls that block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, ModelFingerprint
from kintsugi.store.client.calls import iterate, run_to_completion
from kintsugi.store.protocol.interface import (
    AsyncChunkStore,
    Buffer,
    BufferFor,
    ChunkLost,
    ChunkStore,
    Found,
    LayerFrame,
    PinLease,
    StoreStats,
)


class BlockingStore(ChunkStore):
    """Every method runs the core's coroutine of the same name to its end, in the caller's thread."""

    def __init__(self, core: AsyncChunkStore) -> None:
        """`core`: one that never suspends."""
        self._core = core

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkManifest | None]:
        return run_to_completion(self._core.lookup(namespace, keys))

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        return run_to_completion(self._core.find(namespace, keys))

    def tiers(self, namespace: str, keys: Sequence[ChunkKey]) -> list[str | None]:
        return run_to_completion(self._core.tiers(namespace, keys))

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        return run_to_completion(self._core.lookup_anchors(namespace, space_digest, anchors))

    def put(
        self, manifest: ChunkManifest, frames: Sequence[Buffer], recompute_ms: float = 0.0, tier: str = ""
    ) -> bool:
        return run_to_completion(self._core.put(manifest, frames, recompute_ms, tier))

    def stream(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Iterator[LayerFrame | ChunkLost]:
        return iterate(self._core.stream(namespace, keys, layers, heads, deadline_s))

    def stream_into(
        self,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
        buffer_for: BufferFor,
    ) -> Iterator[LayerFrame | ChunkLost]:
        return iterate(self._core.stream(namespace, keys, layers, heads, deadline_s, buffer_for))

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to bring chunks into RAM; how many are there or on their way. Returns at once."""
        return run_to_completion(self._core.prefetch(namespace, keys))

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> PinLease:
        """Keep chunks from leaving for `lease_s`."""
        return run_to_completion(self._core.pin(namespace, keys, lease_s))

    def unpin(self, lease_id: str) -> int:
        """End a lease early; how many chunks it held."""
        return run_to_completion(self._core.unpin(lease_id))

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        return run_to_completion(self._core.delete(namespace, keys))

    def list(self, namespace: str, limit: int = 1000, after: ChunkKey | None = None) -> list[ChunkManifest]:
        return run_to_completion(self._core.list(namespace, limit, after))

    def put_report(self, fingerprint: ModelFingerprint, name: str, document: bytes) -> None:
        run_to_completion(self._core.put_report(fingerprint, name, document))

    def get_report(self, fingerprint: ModelFingerprint, name: str) -> bytes | None:
        return run_to_completion(self._core.get_report(fingerprint, name))

    @property
    def transport(self) -> str:
        return self._core.transport

    def stats(self) -> StoreStats:
        return run_to_completion(self._core.stats())

    def close(self) -> None:
        run_to_completion(self._core.close())
