"""Which requests are looked at where many tenants send some: a share of all, of each tenant alike. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable

import blake3

WINDOW = 1024
"""Requests over which tenants are counted."""


def is_sampled(request_id: str, chance: float) -> bool:
    """A hash of its id decides: every run agrees."""
    digest = blake3.blake3(b"kintsugi-shadow\0" + request_id.encode()).digest()[:8]
    return int.from_bytes(digest, "little") < chance * (1 << 64)


def even_level(wanted: Iterable[int], room: float) -> float:
    """The most that each may have so that all together have `room` at most: what the small ones leave is the
    others'. Infinite where there is room for all."""
    ordered = sorted(wanted)
    for index, one in enumerate(ordered):
        even = room / (len(ordered) - index)
        if one >= even:
            return even
        room -= one
    return math.inf


class EvenDraw:
    """Draws a share of all requests. A tenant who sends most of them is not most of those drawn: it gets as
    many as every other that sends enough."""

    def __init__(self, share: float, window: int = WINDOW) -> None:
        self._share = share
        self._window = window
        self._recent: deque[str] = deque()
        self._counts: Counter[str] = Counter()

    def chance(self, tenant: str) -> float:
        """A request of the tenant has come: the probability with which it is to be drawn."""
        self._recent.append(tenant)
        self._counts[tenant] += 1
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        level = even_level(self._counts.values(), self._share * len(self._recent))
        return min(1.0, level / self._counts[tenant])
