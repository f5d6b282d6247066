"""A circuit breaker: after failures, calls stop for a while, then one probe is allowed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES_MAX = 3
OPEN_S = 5.0
BACKED_OFF_S_MAX = 40.0


class CircuitBreaker:
    """Thread-safe. While it is closed, calls pass. After `failures_max` failures in a row it is open and no
    call passes for `OPEN_S`. Then one probe passes: its success closes the circuit, its failure opens it
    again. With `backs_off`, each failed probe also doubles the wait for the next, up to `BACKED_OFF_S_MAX`.
    It is meant for calls whose probe delays a request."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        failures_max: int = FAILURES_MAX,
        backs_off: bool = False,
    ) -> None:
        self._clock = clock
        self._failures_max = failures_max
        self._backs_off = backs_off
        self._lock = threading.Lock()
        self._failures = 0
        self._open_s = OPEN_S
        self._opened_s = 0.0
        self._probe_s: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether every call passes. If not, `allows` decides which call may probe."""
        with self._lock:
            return self._failures < self._failures_max

    def allows(self) -> bool:
        """Return whether a call may be made now. The caller then records its success or failure, or withdraws
        it."""
        with self._lock:
            if self._failures < self._failures_max:
                return True
            now = self._clock()
            if now - self._opened_s < self._open_s:
                return False
            if self._probe_s is not None and now - self._probe_s < OPEN_S:
                return False  # another caller probes; a probe that never reports expires
            self._probe_s = now
            return True

    def withdraw(self) -> None:
        """Record that an allowed call was not made, so that another call may probe."""
        with self._lock:
            self._probe_s = None

    def record_success(self) -> None:
        with self._lock:
            self._failures = 0
            self._open_s = OPEN_S
            self._probe_s = None

    def trip(self) -> None:
        """Open the circuit now, whatever the number of failures."""
        with self._lock:
            self._failures = max(self._failures, self._failures_max)
            self._probe_s = None
            self._opened_s = self._clock()

    def record_failure(self) -> None:
        with self._lock:
            if self._backs_off and self._probe_s is not None:
                self._open_s = min(2 * self._open_s, BACKED_OFF_S_MAX)
            self._failures += 1
            self._probe_s = None
            if self._failures >= self._failures_max:
                self._opened_s = self._clock()
