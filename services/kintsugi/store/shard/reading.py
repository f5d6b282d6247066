"""Chunks held in place while they are read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.core.layout import SIDE_KIND_MAX, ChunkManifest, HeadRange
from kintsugi.store.shard.entry import Residence
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.ram_tier import RamTier


@dataclass(frozen=True)
class HeldChunk:
    """A chunk whose bytes stay where they are until its `Reading` is closed."""

    manifest: ChunkManifest
    residence: Residence
    heads: HeadRange

    @property
    def in_ram(self) -> bool:
        """Whether frames can be read in place; otherwise `read` fetches one at a time."""
        return isinstance(self.residence.tier, RamTier)

    def ready(self, layer: int) -> bool:
        """Return whether a layer is in RAM. `lost` tells whether it never will be. `EntryTable.await_layer`
        waits for it."""
        return self.manifest.place_of(layer) not in self.residence.unloaded

    @property
    def lost(self) -> str:
        return self.residence.lost

    def frame(self, layer: int) -> memoryview:
        """The bytes of one layer's heads, in place."""
        tier = self.residence.tier
        assert isinstance(tier, RamTier)
        index = self.manifest.place_of(layer)
        return tier.frame(self.residence, index, *self.manifest.head_range_bytes(self.heads, layer))

    def read(self, layer: int) -> memoryview:
        """Read the bytes of one layer's heads from the SSD tier, for a chunk that RAM had no room for.
        Blocks. Raises `Corrupted` if they cannot be read."""
        tier = self.residence.tier
        assert isinstance(tier, DiskTier)
        index = self.manifest.place_of(layer)
        frame = memoryview(mmap.mmap(-1, self.residence.strides.each[index]))
        try:
            tier.read(self.residence, index, [frame])
        except OSError as error:
            raise Corrupted(f"{tier.name}: {error}") from error
        start, stop = self.manifest.head_range_bytes(self.heads, layer)
        return frame[start:stop]

    def is_intact(self) -> bool:
        """Return whether every frame can be read and matches its digests. Blocks; one xxh3 pass."""
        try:
            return all(
                self.manifest.frame_is_intact(
                    layer, self.heads, self.frame(layer) if self.in_ram else self.read(layer)
                )
                for layer in self.manifest.layers
            )
        except Corrupted:
            return False


@dataclass(frozen=True)
class Reading:
    """The chunks that one stream reads; None for an absent one."""

    chunks: Sequence[HeldChunk | None]

    @property
    def holds_forgotten(self) -> bool:
        """Whether it holds bytes of a chunk that was forgotten or moved, which cannot be freed until it
        ends."""
        return any(chunk is not None and chunk.residence.condemned for chunk in self.chunks)


def check_range(manifest: ChunkManifest, layers: range, heads: HeadRange) -> None:
    """Raise `InvalidField` unless the chunk has these layers and heads. Side frames may be requested of any
    chunk; a chunk without frames of that kind sends none."""
    layout = manifest.layout
    if not -SIDE_KIND_MAX <= layers.start < layers.stop <= layout.num_layers or layers.step != 1:
        raise InvalidField("layers", f"[{layers.start}, {layers.stop}) is outside [0, {layout.num_layers})")
    if not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise InvalidField("heads", f"[{heads.start}, {heads.stop}) is outside [0, {layout.num_kv_heads})")
