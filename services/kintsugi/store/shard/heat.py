"""Decides how many shards share the reads of a chunk that is read often.

Clients read a chunk from its first owner. If one chunk takes much of that shard's time, the shard lets others
share its reads: `store.replication` copies the chunk to the next shards in its order of owners, and lookups
tell clients how many shards share. The first owner alone decides, from its own count of reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kintsugi.core.held import Held
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.wire import memory_bytes
from kintsugi.store.shard.entry import ChunkEntry

READS_PER_S_MAX = 64.0
"""Rate of lookups of one chunk at which its reads are shared: about 6 % of a core."""
READS_SHARE_MIN = 0.25
"""Below this share of `READS_PER_S_MAX`, fewer shards share. Half as many then still have half the rate."""
WIDTH_MAX = 64
"""Maximum number of shards that share the reads of one chunk."""
HEAT_S = 5.0
"""Interval of decisions."""
READS_NOTED = 256
"""A chunk is watched from its next multiple of this number of uses on, so that other uses cost nothing."""
WATCHED_BYTES_MAX = 4 << 20
"""Memory for the chunks that are watched: about 800, of one namespace at most half of them."""


def next_width(width: int, reads_per_s: float, shards: int) -> int:
    """Return how many of `shards` shards are to share the reads of a chunk, if `width` share them now and
    the first owner alone has `reads_per_s`."""
    all_reads_per_s, limit = width * reads_per_s, min(WIDTH_MAX, shards)
    while width < limit and all_reads_per_s > width * READS_PER_S_MAX:
        width *= 2
    while width > 1 and all_reads_per_s < width * READS_SHARE_MIN * READS_PER_S_MAX:
        width //= 2
    return min(width, limit)


@dataclass
class _Watched:
    entry: ChunkEntry
    counted: int
    """`entry.uses` at `at_s`."""
    at_s: float
    width: int = 1
    """Number of shards that hold the chunk for its readers."""


class Heat:
    """The chunks of one shard that are read often. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: Held[ChunkKey, _Watched] = Held(WATCHED_BYTES_MAX)

    def note_use(self, entry: ChunkEntry) -> None:
        """Watch a chunk if it has been used often enough. Call it after each use."""
        if entry.uses % READS_NOTED == 0:
            with self._lock:
                if self._watched.get(*entry.address) is None:
                    watched = _Watched(entry, entry.uses, self._clock())
                    self._watched.put(*entry.address, watched, memory_bytes(entry.manifest))

    def width_of(self, entry: ChunkEntry) -> int:
        """Return how many shards share the chunk's reads; 0: only its owners have it, or another shard
        knows."""
        watched = self._watched.get(*entry.address)
        return watched.width if watched is not None and watched.entry is entry and watched.width > 1 else 0

    def set_width(self, entry: ChunkEntry, width: int) -> None:
        """Note that the chunk's first `width` owners hold it, so that clients may read there."""
        with self._lock:
            watched = self._watched.get(*entry.address)
            if watched is not None and watched.entry is entry:
                watched.width = width

    def review(self, is_owned: Callable[[ChunkKey], bool], shards: int) -> dict[ChunkEntry, int]:
        """Return how many of `shards` shards are to share the reads of each hot chunk. Chunks that are not
        hot, or whose first owner is another shard (`is_owned`), are no longer watched. Call it every
        `HEAT_S`."""
        with self._lock:
            watched = [(address, self._watched.get(*address)) for address in self._watched]
        widths: dict[ChunkEntry, int] = {}
        now_s = self._clock()
        for address, one in watched:
            if one is None or now_s - one.at_s < HEAT_S / 2:
                continue
            reads_per_s = (one.entry.uses - one.counted) / (now_s - one.at_s)
            width = next_width(one.width, reads_per_s, shards)
            if width == 1 or one.entry.gone or not is_owned(address[1]):
                with self._lock:
                    self._watched.pop(*address)
            else:
                one.counted, one.at_s = one.entry.uses, now_s
                widths[one.entry] = width
        return widths
