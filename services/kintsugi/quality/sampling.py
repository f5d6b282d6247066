"""Samples blended requests to measure: a share of them, a minimum per minute, evenly among tenants. Pure.

A share alone samples very little of light traffic: half a percent of one request a minute is seven a day. So
the share grows until `per_minute` requests are sampled per minute, up to all requests.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import blake3

WINDOW = 1024
"""Number of recent requests over which tenants are counted."""
WINDOW_S = 600.0
"""Older requests do not count for the current rate."""


def is_sampled(request_id: str, probability: float) -> bool:
    """Whether to measure the request. A hash of its id decides, so every run makes the same decision."""
    digest = blake3.blake3(b"kintsugi-measured\0" + request_id.encode()).digest()[:8]
    return int.from_bytes(digest, "little") < probability * (1 << 64)


def fair_share(wanted: Iterable[int], room: float) -> float:
    """Return the max-min fair share: the largest amount that each may take, so that the sum is at most
    `room`. Demands below the share leave the rest to the others. The share is infinite if all demands fit."""
    ordered = sorted(wanted)
    for index, one in enumerate(ordered):
        share = room / (len(ordered) - index)
        if one >= share:
            return share
        room -= one
    return math.inf


class FairSampler:
    """Samples a share of all requests, divided evenly among tenants. A tenant that sends most of the requests
    has no more samples than any other tenant that sends enough."""

    def __init__(self, share: float, per_minute: float, now: Callable[[], float] = time.monotonic) -> None:
        """`per_minute`: minimum number of samples per minute, if `share` results in fewer. `now`: a clock in
        seconds."""
        self._share = share
        self._per_minute = per_minute
        self._now = now
        self._recent: deque[tuple[str, float]] = deque()
        self._counts: Counter[str] = Counter()

    def count_request(self, tenant: str) -> float:
        """Count a request of the tenant. Return the probability with which to sample it."""
        now = self._now()
        self._recent.append((tenant, now))
        self._counts[tenant] += 1
        while len(self._recent) > WINDOW or now - self._recent[0][1] > WINDOW_S:
            oldest, _ = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        samples = fair_share(self._counts.values(), self._share_now(now) * len(self._recent))
        return min(1.0, samples / self._counts[tenant])

    def _share_now(self, now: float) -> float:
        """Return the share of the recent requests to sample. It is 1 while the rate is unknown."""
        if len(self._recent) == 1:
            return 1.0
        minutes = (now - self._recent[0][1]) / 60
        # The first request opens the window, so the others arrived in `minutes`.
        return min(1.0, max(self._share, self._per_minute * minutes / (len(self._recent) - 1)))
