"""Chooses which requests to shadow: the same share of every tenant's requests. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable

import blake3

WINDOW = 1024
"""Number of recent requests over which tenants are counted."""


def is_sampled(request_id: str, probability: float) -> bool:
    """Whether to shadow the request. A hash of its id decides, so every run decides alike."""
    digest = blake3.blake3(b"kintsugi-shadow\0" + request_id.encode()).digest()[:8]
    return int.from_bytes(digest, "little") < probability * (1 << 64)


def fair_share(wanted: Iterable[int], room: float) -> float:
    """The max-min fair share: the largest amount that each may take so that all together take at most `room`.
    Those that want less leave the rest to the others. Infinite if there is room for everything."""
    ordered = sorted(wanted)
    for index, one in enumerate(ordered):
        share = room / (len(ordered) - index)
        if one >= share:
            return share
        room -= one
    return math.inf


class FairSampler:
    """Samples a share of all requests, divided evenly among tenants: a tenant that sends most of the requests
    gets no more samples than any other tenant that sends enough."""

    def __init__(self, share: float, window: int = WINDOW) -> None:
        self._share = share
        self._window = window
        self._recent: deque[str] = deque()
        self._counts: Counter[str] = Counter()

    def count_request(self, tenant: str) -> float:
        """Count a request of the tenant. Returns the probability with which to sample it."""
        self._recent.append(tenant)
        self._counts[tenant] += 1
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        samples = fair_share(self._counts.values(), self._share * len(self._recent))
        return min(1.0, samples / self._counts[tenant])
