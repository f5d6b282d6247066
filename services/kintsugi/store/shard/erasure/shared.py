"""Work that several callers may share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kintsugi.core.errors import Unavailable


class Shared:
    """Runs work once for all who asked before it began. Thread-safe."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._asked = 0
        self._done = 0
        self._closed = False
        self._counting = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        """Return once a whole run has begun and ended after this call. Raises what that run raises, if it is
        this caller's, and `Unavailable` once it is closed."""
        with self._counting:
            self._asked += 1
            mine = self._asked
        with self._running:
            if self._done >= mine:
                return
            if self._closed:
                raise Unavailable("this shard ends; try again when it is back")
            with self._counting:
                covers = self._asked
            work()
            self._done = covers

    def close(self) -> None:
        """Wait for the run under way; none begins any more."""
        with self._running:
            self._closed = True
