"""A put under way: frames are copied into the arena and verified there; only `commit` makes them visible."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.core.layout import HeadRange
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.eviction.placement import AUTO
from kintsugi.store.shard.tiers.ram_tier import RamTier


@dataclass(frozen=True)
class PutOptions:
    """Options of a put."""

    tier: str = AUTO
    durable: bool = False
    ttl_s: float = math.inf
    recompute_ms: float = 0.0
    is_copy: bool = False
    """Another shard's copy, not what a client computed."""

    def __post_init__(self) -> None:
        if not self.ttl_s > 0:
            raise InvalidField("ttl_s", f"{self.ttl_s} is not positive")
        if not (self.recompute_ms >= 0 and math.isfinite(self.recompute_ms)):
            raise InvalidField("recompute_ms", f"{self.recompute_ms} is not a duration")


@dataclass(frozen=True)
class Committed:
    """The outcome of a commit."""

    inserted: bool
    """False if another put of the key was faster."""
    durable: Future[None] | None
    """Done once the chunk is on disk; None if it was not inserted or is to stay in RAM."""


class ChunkPut:
    """Takes the frames of one chunk, in layer order. One thread at a time.

    Cost per byte: one copy into the arena and one xxh3 pass over it.
    """

    def __init__(
        self, entry: ChunkEntry, residence: Residence, ram: RamTier, tier: str, is_copy: bool = False
    ) -> None:
        self.entry = entry
        self.residence = residence
        self.tier = tier
        """Tier that the chunk is written to after the commit: `ram`, or an SSD tier's name."""
        self.is_copy = is_copy
        self._ram = ram
        self._layers_written = 0

    @property
    def complete(self) -> bool:
        return self._layers_written == self.entry.manifest.layout.num_layers

    def write(self, first_layer: int, payload: memoryview) -> None:
        """Copy whole frames, the first of them of `first_layer`.

        Raises `InvalidField` for frames out of order, too many or cut, `Corrupted` for a wrong digest.
        """
        manifest = self.entry.manifest
        frame_bytes = manifest.frame_bytes
        if first_layer != self._layers_written:
            raise InvalidField("first_layer", f"{first_layer}; layer {self._layers_written} comes next")
        if len(payload) % frame_bytes:
            raise InvalidField(
                "payload", f"{len(payload)} bytes are not a multiple of the manifest's {frame_bytes}"
            )
        frames = len(payload) // frame_bytes
        if first_layer + frames > manifest.layout.num_layers:
            raise InvalidField(
                "payload",
                f"has {frames} frames from layer {first_layer}; there are "
                f"{manifest.layout.num_layers} layers",
            )
        every_head = HeadRange(0, manifest.layout.num_kv_heads)
        for index in range(frames):
            layer = first_layer + index
            place = self._ram.frame(self.residence, layer, 0, frame_bytes)
            place[:] = payload[index * frame_bytes : (index + 1) * frame_bytes]
            if not manifest.frame_is_intact(layer, every_head, place):
                raise Corrupted(f"frames[{layer}] does not match the manifest's digest; send it again")
            self._layers_written += 1
