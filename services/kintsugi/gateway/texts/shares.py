"""Whose turn it is to give way where tenants share something bounded: theirs who hold most of it."""

from __future__ import annotations

import heapq
import itertools

_STALE_MAX = 64
"""Entries beside those that count, beyond as many as there are tenants."""


class Shares:
    """How much each name holds. Pure; updates and questions take logarithmic time, over many of them."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        """Every name with what it holds, the most first, and with what it once held."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, name: str, share: float) -> None:
        """The name holds so much now; 0: nothing, and it is forgotten."""
        if share <= 0:
            self._held.pop(name, None)
            return
        self._held[name] = share
        heapq.heappush(self._heap, (-share, next(self._numbers), name))
        if len(self._heap) > 2 * len(self._held) + _STALE_MAX:
            self._heap = [(-held, next(self._numbers), one) for one, held in self._held.items()]
            heapq.heapify(self._heap)

    def largest(self) -> str:
        """Who holds most; of equals who has for longest. There must be one."""
        while True:
            share, _, name = self._heap[0]
            if self._held.get(name) == -share:
                return name
            heapq.heappop(self._heap)
