"""A running put: frames are copied into the arena and verified there; only `commit` makes them visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kintsugi.core.errors import Corrupted, InvalidField, NotFound
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.tiers.ram_tier import RamTier


def check_ttl(ttl_s: float) -> None:
    """Raise `InvalidField` unless the lifetime is positive."""
    if not ttl_s > 0:
        raise InvalidField("ttl_s", f"{ttl_s} is not positive")


def erased_meanwhile(manifest: ChunkManifest) -> NotFound:
    """The error for a put of a chunk that was deleted or erased after its save was requested."""
    return NotFound(
        f"chunk {manifest.key} of {manifest.namespace!r} was erased after its save was requested; "
        "save it again to keep it"
    )


@dataclass(frozen=True)
class PutOptions:
    """Options of a put."""

    durable: bool = False
    ttl_s: float = math.inf
    recompute_ms: float = 0.0
    is_copy: bool = False
    """Whether the chunk is copied from another shard."""
    erasures_seen: int = 0
    """With `is_copy`: up to which number the other shard has applied this shard's erasures."""

    def __post_init__(self) -> None:
        check_ttl(self.ttl_s)
        if not (self.recompute_ms >= 0 and math.isfinite(self.recompute_ms)):
            raise InvalidField("recompute_ms", f"{self.recompute_ms} is not a duration")


@dataclass(frozen=True)
class Committed:
    """The outcome of a commit."""

    inserted: bool
    """False if the chunk was there already, or was in a bucket that cannot be reached."""
    durable: Future[None] | None
    """Done when the chunk is on disk; None if it was not inserted or stays in RAM."""


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
        """Tier that the chunk is written to after the commit: `ram` or the name of an SSD tier."""
        self.is_copy = options.is_copy
        self.erasures_seen = options.erasures_seen
        self.is_erased = False
        """Whether the chunk was deleted after the put began. The commit then has no effect."""
        self._ram = ram
        self._next = 0
        """Index of the next frame."""

    @property
    def complete(self) -> bool:
        return self._next == self.entry.manifest.num_frames

    def write(self, first_layer: int, payload: memoryview) -> None:
        """Copy whole frames; the first one is of `first_layer`, which may be a side frame. Raises
        `InvalidField` for frames that are out of order, too many or cut, `Corrupted` for a wrong digest."""
        manifest = self.entry.manifest
        layers = manifest.layers[self._next :]
        if not layers or first_layer != layers[0]:
            follows = f"layer {layers[0]} comes next" if layers else "no more frames may follow"
            raise InvalidField("first_layer", f"{first_layer}; {follows}")
        every_head = HeadRange(0, manifest.layout.num_kv_heads)
        for layer in layers[: self._count_frames(layers, len(payload))]:
            size, index = manifest.frame_bytes_of(layer), self._next
            place = self._ram.frame(self.residence, index, 0, size)
            place[:] = payload[:size]
            self._ram.clear_padding(self.residence, index, size)
            if not manifest.frame_is_intact(layer, every_head, place):
                raise Corrupted(f"frames[{index}] does not match the manifest's digest; send it again")
            payload = payload[size:]
            self._next += 1

    def _count_frames(self, layers: Sequence[int], payload_bytes: int) -> int:
        """Return how many frames of `layers` a payload holds. Raises `InvalidField` unless they are whole."""
        count, left = 0, payload_bytes
        while left:
            if count == len(layers):
                raise InvalidField(
                    "payload",
                    f"has {left} bytes too many from layer {layers[0]}; the last layer is {layers[-1]}",
                )
            size = self.entry.manifest.frame_bytes_of(layers[count])
            if left < size:
                raise InvalidField(
                    "payload", f"ends after {left} of the {size} bytes of layer {layers[count]}"
                )
            left -= size
            count += 1
        return count
