"""How soon evicted chunks are asked for again: a short gap means that a tier is too small for its traffic."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kintsugi.store.entry import Address

EVICTED_MAX = 65536


class ReuseGaps:
    """Remembers what left lately. Not thread-safe: the shard holds the lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._evicted: OrderedDict[Address, float] = OrderedDict()
        self.observe: Callable[[float], None] = _ignore
        """Called with each gap, in seconds."""

    def left(self, address: Address) -> None:
        self._evicted[address] = self._clock()
        self._evicted.move_to_end(address)
        while len(self._evicted) > EVICTED_MAX:
            self._evicted.popitem(last=False)

    def missed(self, address: Address) -> None:
        left_s = self._evicted.pop(address, None)
        if left_s is not None:
            self.observe(self._clock() - left_s)


def _ignore(gap_s: float) -> None:
    return None
