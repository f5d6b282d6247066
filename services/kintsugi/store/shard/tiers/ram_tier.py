"""The RAM tier: an arena, what is free in it, and who leaves it first."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard.entry import ChunkEntry, CopyTier, Residence
from kintsugi.store.shard.eviction.policy import EvictionPolicy, Lru
from kintsugi.store.shard.tiers.arena import Arena
from kintsugi.store.shard.tiers.extents import ExtentAllocator, Strides


class RamTier(CopyTier):
    """Not thread-safe except for the views: the table calls the rest under its lock."""

    def __init__(
        self, capacity_bytes: int, policy: Callable[[int], EvictionPolicy[ChunkEntry]] = Lru[ChunkEntry]
    ) -> None:
        self.arena = Arena(capacity_bytes)
        self.allocator = ExtentAllocator(self.arena.capacity_bytes)
        super().__init__("ram", lambda: policy(self.arena.capacity_bytes))
        self.on_free: Callable[[], None] = lambda: None
        """Called under the table's lock whenever room came back."""

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    def allocate(self, manifest: ChunkManifest) -> Residence | None:
        """Room for a chunk, or None where something must leave first."""
        strides = Strides.of(manifest.frame_runs)
        extents = self.allocator.allocate(strides)
        if extents is None:
            return None
        return Residence(self, (manifest.namespace, manifest.key), extents, strides)

    def free(self, residence: Residence) -> None:
        """Take the bytes back."""
        self.lingering.discard(residence)
        self.allocator.free(residence.extents)
        self.on_free()

    def frame(self, residence: Residence, index: int, start: int, stop: int) -> memoryview:
        """Bytes `[start, stop)` of a frame, in place. `index`: its place in the chunk."""
        return self.arena.view(residence.offsets[index] + start, stop - start)

    def clear_padding(self, residence: Residence, index: int, frame_bytes: int) -> None:
        """Zero what lies behind a frame, where bytes of an earlier chunk may be. `index`: as of `frame`."""
        stride = residence.strides.each[index]
        if stride > frame_bytes:
            self.frame(residence, index, frame_bytes, stride)[:] = bytes(stride - frame_bytes)

    def unlink(self, residence: Residence) -> None:
        """No record names a residence in RAM; it is merely read to the end."""
        self.lingering.add(residence)
