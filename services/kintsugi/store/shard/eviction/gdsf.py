"""GreedyDual-Size-Frequency: what saves the most computing per byte stays.

Cherkasova, 1998. A chunk's rank is the clock when it was last used plus its uses times its recompute cost
per byte; the clock is the rank of the last victim, so what is not used ages. Costs are relative to the
mean of those that are known; an unknown one counts as the mean.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kintsugi.store.shard.eviction.policy import EvictionPolicy, Item, itself

_MEAN_WEIGHT = 0.01
_STALE_SHARE_MAX = 4
"""Outdated heap entries per item before the heap is rebuilt."""


@dataclass
class _Rank:
    density: float
    touches: int
    value: float
    serial: int


class Gdsf(EvictionPolicy[Item]):
    """Cost: a heap operation per use, logarithmic in the number of items."""

    def __init__(self, capacity_bytes: int, identity: Callable[[Item], Hashable] = itself) -> None:
        self._ranks: dict[Item, _Rank] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._clock = 0.0
        self._serial = 0
        self._mean_density = 0.0

    def admit(self, item: Item, size_bytes: int, cost_ms: float) -> None:
        density = 1.0
        if cost_ms:
            raw = cost_ms / size_bytes
            self._mean_density = self._mean_density or raw
            self._mean_density += _MEAN_WEIGHT * (raw - self._mean_density)
            density = raw / self._mean_density
        self._ranks[item] = _Rank(density, 0, 0.0, 0)
        self.touch(item)

    def touch(self, item: Item) -> None:
        rank = self._ranks.get(item)
        if rank is None:
            return
        self._serial += 1
        rank.touches += 1
        rank.value = self._clock + rank.touches * rank.density
        rank.serial = self._serial
        heapq.heappush(self._heap, (rank.value, rank.serial, item))
        if len(self._heap) > _STALE_SHARE_MAX * len(self._ranks) + 64:
            self._heap = [(rank.value, rank.serial, item) for item, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, item: Item) -> None:
        self._ranks.pop(item, None)

    def evict(self, evictable: Callable[[Item], bool]) -> Item | None:
        refused: list[tuple[float, int, Item]] = []
        victim = None
        while self._heap and victim is None:
            value, serial, item = heapq.heappop(self._heap)
            rank = self._ranks.get(item)
            if rank is None or rank.serial != serial:
                continue  # outdated
            if evictable(item):
                self._clock = value
                del self._ranks[item]
                victim = item
            else:
                refused.append((value, serial, item))
        for entry in refused:
            heapq.heappush(self._heap, entry)
        return victim
