"""The RAM tier: an arena, what is free in it, and who leaves it first."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.eviction.policy import EvictionPolicy, Lru
from kintsugi.store.shard.tiers.arena import Arena
from kintsugi.store.shard.tiers.extents import ExtentAllocator, stride_of


def _ignore() -> None:
    return None


class RamTier:
    """Not thread-safe but for the views: the shard holds the lock."""

    def __init__(
        self, capacity_bytes: int, policy: Callable[[int], EvictionPolicy[ChunkEntry]] = Lru[ChunkEntry]
    ) -> None:
        self.arena = Arena(capacity_bytes)
        self.allocator = ExtentAllocator(self.arena.capacity_bytes)
        self.policy = policy(self.arena.capacity_bytes)
        self.evictions = 0
        self.chunks = 0
        self.on_free: Callable[[], None] = _ignore
        """Called under the shard's lock whenever room came back."""

    @property
    def name(self) -> str:
        return "ram"

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    def allocate(self, manifest: ChunkManifest) -> Residence | None:
        """Room for a chunk, or None where something must leave first."""
        stride = stride_of(manifest.frame_bytes)
        extents = self.allocator.allocate(stride, manifest.layout.num_layers)
        if extents is None:
            return None
        return Residence(self, (manifest.namespace, manifest.key), extents, stride)

    def free(self, residence: Residence) -> None:
        """Take the bytes back."""
        self.allocator.free(residence.extents, residence.stride)
        self.on_free()

    def frame(self, residence: Residence, layer: int, start: int, stop: int) -> memoryview:
        """Bytes `[start, stop)` of a layer, in place."""
        return self.arena.view(residence.offsets[layer] + start, stop - start)

    def adopt(self, entry: ChunkEntry, residence: Residence) -> None:
        """`residence` now holds the bytes of `entry`."""
        assert entry.ram is None
        entry.ram = residence
        self.chunks += 1
        self.policy.admit(entry, entry.manifest.chunk_bytes, entry.recompute_ms)

    def drop(self, entry: ChunkEntry) -> None:
        """Forget this tier's copy."""
        if entry.ram is not None:
            self.policy.remove(entry)
            self.unlink(entry)

    def evict(self, evictable: Callable[[ChunkEntry], bool]) -> ChunkEntry | None:
        """The entry that the policy gives up first among those that may go; the caller unlinks it."""
        entry = self.policy.evict(evictable)
        if entry is not None:
            self.evictions += 1
        return entry

    def unlink(self, entry: ChunkEntry) -> None:
        """Let go of the copy of an entry that the policy no longer orders."""
        assert entry.ram is not None
        residence, entry.ram = entry.ram, None
        self.chunks -= 1
        residence.condemn()
