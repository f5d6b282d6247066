"""Chunks held in place while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.store.entry import Residence
from kintsugi.store.ram_tier import RamTier


@dataclass(frozen=True)
class HeldChunk:
    """A chunk whose bytes stay where they are until its `Reading` is closed."""

    manifest: ChunkManifest
    residence: Residence
    heads: HeadRange
    ram: RamTier

    def frame(self, layer: int) -> memoryview:
        """The bytes of the heads of one layer, in place."""
        return self.ram.frame(self.residence, layer, *self.manifest.head_range_bytes(self.heads))


@dataclass(frozen=True)
class Reading:
    """What one stream reads; None for a chunk that is not there."""

    chunks: Sequence[HeldChunk | None]
