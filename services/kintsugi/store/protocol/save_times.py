"""The request times of saves, which decide whether an erasure covers a chunk.

An erasure covers the saves that were requested before it. Clocks may differ by `CLOCKS_DIFFER_S`, so a save's
request time is set back by that time: no save that precedes an erasure survives it. A process that knows of
an erasure sets the request times of its later saves after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kintsugi.core.namespaces import enclosing

CLOCKS_DIFFER_S = 1.0
"""Maximum difference between two clocks of gateways, engines and shards."""
AFTER_S = 1e-3
"""Minimum time from a known erasure to the request time of a later save or erasure."""


class SaveTimes:
    """Request times for the saves of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._erased_s: dict[str, float] = {}
        """By namespace, when its last erasure was requested; only erasures of the last `CLOCKS_DIFFER_S`."""

    def note(self, namespace: str, at_s: float) -> None:
        """Record an erasure in a namespace, requested at `at_s` (Unix seconds)."""
        since_s = self._clock() - CLOCKS_DIFFER_S
        with self._lock:
            at_s = max(at_s, self._erased_s.get(namespace, at_s))
            recent = {name: one_s for name, one_s in self._erased_s.items() if one_s > since_s}
            self._erased_s = recent | {namespace: at_s}

    def now(self, namespace: str) -> float:
        """Return the request time of a save that is requested now, in Unix seconds."""
        with self._lock:
            erased_s = [self._erased_s[name] for name in enclosing(namespace) if name in self._erased_s]
        return max([self._clock() - CLOCKS_DIFFER_S, *(at_s + AFTER_S for at_s in erased_s)])
