"""A circuit breaker for one shard: after failures it gets no calls for a while, then one probe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES_MAX = 3
OPEN_S = 5.0


class CircuitBreaker:
    """Thread-safe. While it is closed, calls pass. After `FAILURES_MAX` failures in a row it is open and no
    call passes for `OPEN_S`. Then one probe passes: its success closes the circuit, its failure opens it
    again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_s = 0.0
        self._probe_s: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether every call passes; else `allows` decides which call may probe."""
        with self._lock:
            return self._failures < FAILURES_MAX

    def allows(self) -> bool:
        """Whether a call may be made now. The caller then records its success or failure, or withdraws it."""
        with self._lock:
            if self._failures < FAILURES_MAX:
                return True
            now = self._clock()
            if now - self._opened_s < OPEN_S:
                return False
            if self._probe_s is not None and now - self._probe_s < OPEN_S:
                return False  # another caller probes; a probe that never reports is forgotten
            self._probe_s = now
            return True

    def withdraw(self) -> None:
        """The call that was allowed was not made: another may probe."""
        with self._lock:
            self._probe_s = None

    def record_success(self) -> None:
        with self._lock:
            self._failures = 0
            self._probe_s = None

    def record_failure(self) -> None:
        with self._lock:
            self._failures += 1
            self._probe_s = None
            if self._failures >= FAILURES_MAX:
                self._opened_s = self._clock()
