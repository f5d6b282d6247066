"""Deadlines for the gaps between messages of a stream, which gRPC does not have.

gRPC bounds a whole call; a stream of many layers needs a bound on the wait for each. One thread watches
every stream of a store and cancels those whose wait is over.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

RESOLUTION_S = 0.02


class Guard:
    """One guarded stream. `arm` before each wait and `disarm` after it; each costs an attribute write."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.expires_s = math.inf
        self.expired = False
        self._cancel = cancel

    def arm(self, wait_s: float) -> None:
        self.expires_s = time.monotonic() + wait_s

    def disarm(self) -> None:
        self.expires_s = math.inf

    def expire(self) -> None:
        self.expired = True
        self._cancel()


class Watchdog:
    """Cancels guarded streams that wait too long, within `RESOLUTION_S`. Sleeps while there are none."""

    def __init__(self) -> None:
        self._guards: set[Guard] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def guard(self, cancel: Callable[[], object]) -> Guard:
        """Watch a stream until `release`."""
        guard = Guard(cancel)
        with self._changed:
            self._guards.add(guard)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="kintsugi-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        return guard

    def release(self, guard: Guard) -> None:
        with self._changed:
            self._guards.discard(guard)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._guards or self._closed)
                if self._closed:
                    return
                now = time.monotonic()
                overdue = [guard for guard in self._guards if guard.expires_s < now]
                self._guards.difference_update(overdue)
            for guard in overdue:
                guard.expire()
            time.sleep(RESOLUTION_S)
