"""Counters of a shard, and the time from a chunk's eviction to the next lookup of it.

Short times mean that a tier is too small for its traffic.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kintsugi.store.shard.entry import Address

EVICTED_MAX = 65536
SOON_S = 600.0
"""A chunk that is looked up again within this time should have been kept."""
WINDOW_S = 60.0
RETURNS_MAX = 4096


@dataclass
class Counters:
    """Counts since the shard started."""

    hits: int = 0
    misses: int = 0
    quarantined: int = 0
    expired: int = 0
    copied: int = 0
    """Chunks copied from other shards."""


class ReuseGaps:
    """Remembers recent evictions. Not thread-safe: the table holds the lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._evicted: OrderedDict[Address, float] = OrderedDict()
        self._returns: deque[float] = deque(maxlen=RETURNS_MAX)
        self.observe: Callable[[float], None] = lambda gap_s: None
        """Called with each gap, in seconds."""

    def record_eviction(self, address: Address) -> None:
        self._evicted[address] = self._clock()
        self._evicted.move_to_end(address)
        while len(self._evicted) > EVICTED_MAX:
            self._evicted.popitem(last=False)

    def record_lookup_miss(self, address: Address) -> None:
        left_s = self._evicted.pop(address, None)
        if left_s is None:
            return
        now_s = self._clock()
        self.observe(now_s - left_s)
        if now_s - left_s <= SOON_S:
            self._returns.append(now_s)

    def soon_per_s(self) -> float:
        """Return the rate, over the last `WINDOW_S`, of lookups of chunks evicted less than `SOON_S`
        before."""
        begin_s = self._clock() - WINDOW_S
        return sum(at_s > begin_s for at_s in self._returns) / WINDOW_S
