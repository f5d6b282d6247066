"""Rules of admission and eviction: which chunks fit, and which may leave. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import SIDE_KIND_MAX, ChunkManifest, HeadRange
from kintsugi.core.namespaces import enclosing
from kintsugi.store.shard.entry import Address, ChunkEntry
from kintsugi.store.shard.tiers.extents import ExtentAllocator

ROOM_BYTES_MIN = 64 << 20
"""An SSD tier evicts this much at once, but at most 1/16 of the tier: each round costs a catalog commit."""
DELETION_S = 600.0
"""How long copies of a deleted chunk are refused: longer than a shard takes to send a copy that it has
read."""
DELETIONS_MAX = 100_000

CLEAR_BATCH = 256
"""Maximum number of a namespace's chunks that are forgotten per acquisition of the lock."""
FREE_POLL_S = 0.02

RATIO = 0.15
"""The default ratio of blends."""

ERASE_GRACE_S = 2.0
"""Longer than a client needs to read its chunks."""


@dataclass(frozen=True)
class ShardConfig:
    """Settings of a shard's decisions."""

    ratio: float = RATIO
    """Share of a chunk's prefill that a blend computes, in (0, 1]. A tier is fast enough for a chunk if its
    load takes no longer than that share."""

    erase_grace_s: float = ERASE_GRACE_S
    """How long an erasure waits for clients' reads and puts of its chunks before it cuts them."""

    def __post_init__(self) -> None:
        if not (self.erase_grace_s >= 0 and math.isfinite(self.erase_grace_s)):
            raise InvalidField("erase_grace_s", f"{self.erase_grace_s} is not a duration")
        if not 0 < self.ratio <= 1:
            raise InvalidField("ratio", f"{self.ratio} is outside (0, 1]")

    def hides_s(self, recompute_ms: float) -> float:
        """Return how long the load of a chunk may take so that its blend hides it; 0 if unknown."""
        return self.ratio * recompute_ms / 1e3


class NoRoomYet(ResourceExhausted):
    """There is no room now, but other chunks are being read or written back and may leave later."""


def no_room_yet(manifest: ChunkManifest, allocator: ExtentAllocator) -> NoRoomYet:
    """The error for a put that found no room in time."""
    return NoRoomYet(
        f"{manifest.chunk_bytes} bytes do not fit beside what is pinned, being read or waiting for the disk "
        f"({allocator.free_bytes} of {allocator.capacity_bytes} bytes of RAM are free), or into what the "
        "namespace may use; try again later"
    )


def may_leave_ram(entry: ChunkEntry, can_write: bool, is_chosen: Callable[[str], bool] | None = None) -> bool:
    """Return whether the RAM copy may leave. `can_write`: chunks without another copy may be queued or
    dropped now. `is_chosen`: whether chunks of a namespace may leave; None: all may."""
    if is_chosen is not None and not is_chosen(entry.manifest.namespace):
        return False
    if entry.ram is None or entry.ram.readers or (entry.pins and not entry.is_below_ram):
        return False
    return entry.is_below_ram or can_write


def may_leave_disk(entry: ChunkEntry) -> bool:
    """Return whether a tier below RAM may give up its copy. A chunk that is being moved stays: its demotion
    might write to the tier that it moves to, whose catalog can name only one copy."""
    if entry.disk is None or entry.disk.readers or entry.pins:
        return False
    return entry.writing is None


def bytes_to_evict(needed_bytes: int, capacity_bytes: int) -> int:
    """Return how many bytes an SSD tier gives up in one round."""
    return max(needed_bytes, min(ROOM_BYTES_MIN, capacity_bytes // 16))


def check_range(manifest: ChunkManifest, layers: range, heads: HeadRange) -> None:
    """Raise `InvalidField` unless the chunk has these layers and heads. Side frames may be requested of any
    chunk; a chunk without frames of that kind sends none."""
    layout = manifest.layout
    if not -SIDE_KIND_MAX <= layers.start < layers.stop <= layout.num_layers or layers.step != 1:
        raise InvalidField("layers", f"[{layers.start}, {layers.stop}) is outside [0, {layout.num_layers})")
    if not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise InvalidField("heads", f"[{heads.start}, {heads.stop}) is outside [0, {layout.num_kv_heads})")


class Deletions:
    """Recent deletions. Another shard may have read a copy before a deletion; it must not restore the chunk.

    Not thread-safe: the table holds the lock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deleted_s: OrderedDict[Address | str, float] = OrderedDict()
        """When a chunk or a whole namespace was deleted: the newest `DELETIONS_MAX`."""
        self._forgotten_s = -math.inf
        """Time of the newest deletion that was dropped from the list."""

    def note(self, deleted: Iterable[Address | str]) -> None:
        """Note that chunks or whole namespaces were deleted now, whether or not they existed."""
        now_s = self._clock()
        for one in deleted:
            self._deleted_s[one] = now_s
            self._deleted_s.move_to_end(one)
        while len(self._deleted_s) > DELETIONS_MAX:
            self._forgotten_s = self._deleted_s.popitem(last=False)[1]

    def cover(self, address: Address) -> bool:
        """Return whether a chunk may have been deleted within `DELETION_S`."""
        whole = (self._deleted_s.get(namespace) for namespace in enclosing(address[0]))
        times = (self._deleted_s.get(address), *whole, self._forgotten_s)
        last_s = max(time for time in times if time is not None)
        return self._clock() - last_s < DELETION_S
