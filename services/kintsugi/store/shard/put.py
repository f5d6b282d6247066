"""A put under way: frames are copied into the arena and verified there; only `commit` makes them visible."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass

from kintsugi.core.errors import Corrupted, InvalidField, NotFound
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.eviction.placement import AUTO
from kintsugi.store.shard.tiers.ram_tier import RamTier


def check_ttl(ttl_s: float) -> None:
    """Raise `InvalidField` for what is no lifetime in seconds."""
    if not ttl_s > 0:
        raise InvalidField("ttl_s", f"{ttl_s} is not positive")


def erased_meanwhile(manifest: ChunkManifest) -> NotFound:
    """The error for a put of a chunk that was deleted or erased since its save was asked for."""
    return NotFound(
        f"chunk {manifest.key} of {manifest.namespace!r} was erased after its save was asked for; "
        "save it again if it is to stay"
    )


@dataclass(frozen=True)
class PutOptions:
    """Options of a put."""

    tier: str = AUTO
    durable: bool = False
    ttl_s: float = math.inf
    recompute_ms: float = 0.0
    is_copy: bool = False
    """Another shard's copy, not what a client computed."""
    erasures_seen: int = 0
    """With `is_copy`: the number up to which that shard has applied this one's erasures."""

    def __post_init__(self) -> None:
        check_ttl(self.ttl_s)
        if not (self.recompute_ms >= 0 and math.isfinite(self.recompute_ms)):
            raise InvalidField("recompute_ms", f"{self.recompute_ms} is not a duration")


@dataclass(frozen=True)
class Committed:
    """The outcome of a commit."""

    inserted: bool
    """False if another put of the key was faster, and for a chunk in a bucket that is away."""
    durable: Future[None] | None
    """Done once the chunk is on disk; None if it was not inserted or is to stay in RAM."""


class ChunkPut:
    """Takes the frames of one chunk, in layer order. One thread at a time.

    Cost per byte: one copy into the arena and one xxh3 pass over it.
    """

    def __init__(
        self,
        entry: ChunkEntry,
        residence: Residence,
        ram: RamTier,
        tier: str,
        options: PutOptions,
    ) -> None:
        self.entry = entry
        self.residence = residence
        self.tier = tier
        """Tier that the chunk is written to after the commit: `ram`, or an SSD tier's name."""
        self.is_copy = options.is_copy
        self.erasures_seen = options.erasures_seen
        self.is_erased = False
        """Whether its chunk was deleted since it began: its commit has no effect."""
        self._ram = ram
        self._next_layer = entry.manifest.first_layer

    @property
    def complete(self) -> bool:
        return self._next_layer == self.entry.manifest.layout.num_layers

    def write(self, first_layer: int, payload: memoryview) -> None:
        """Copy whole frames, the first of them of `first_layer`; `PRIOR_LAYER` is the first of all.

        Raises `InvalidField` for frames out of order, too many or cut, `Corrupted` for a wrong digest.
        """
        manifest = self.entry.manifest
        if first_layer != self._next_layer:
            raise InvalidField("first_layer", f"{first_layer}; layer {self._next_layer} comes next")
        stop = self._stop_layer(len(payload))
        every_head = HeadRange(0, manifest.layout.num_kv_heads)
        for layer in range(first_layer, stop):
            size, index = manifest.frame_bytes_of(layer), layer - manifest.first_layer
            place = self._ram.frame(self.residence, index, 0, size)
            place[:] = payload[:size]
            self._ram.clear_padding(self.residence, index, size)
            if not manifest.frame_is_intact(layer, every_head, place):
                raise Corrupted(f"frames[{index}] does not match the manifest's digest; send it again")
            payload = payload[size:]
            self._next_layer += 1

    def _stop_layer(self, payload_bytes: int) -> int:
        """The layer after those that a payload holds. Raises `InvalidField` where it does not hold whole
        frames."""
        manifest = self.entry.manifest
        layer, left = self._next_layer, payload_bytes
        while left:
            if layer == manifest.layout.num_layers:
                raise InvalidField(
                    "payload",
                    f"has {left} bytes too many from layer {self._next_layer}; there are {layer} layers",
                )
            size = manifest.frame_bytes_of(layer)
            if left < size:
                raise InvalidField("payload", f"ends after {left} of the {size} bytes of layer {layer}")
            left -= size
            layer += 1
        return layer
