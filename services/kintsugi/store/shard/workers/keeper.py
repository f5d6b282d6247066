"""The shard's housekeeping thread: ends leases, forgets expired chunks, saves lifetimes, scrubs, returns
memory.

Scrubbing verifies one chunk at a time, at a bounded rate, because it shares the disk with loads.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.malloc import return_free_pages
from kintsugi.store.shard.shard import Shard


class Turns(ABC):
    """Runs `turn` every `turn_s` from `start` to `stop`. If its thread dies, the shard fails."""

    def __init__(self, shard: Shard, name: str, turn_s: float) -> None:
        self._shard = shard
        self._turn_s = turn_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait for the running turn, then end. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._turn_s):
                self.turn()
        except BaseException as error:  # noqa: BLE001 - the shard fails, visibly
            if not self._stop.is_set():
                self._shard.table.fail(error)

    @abstractmethod
    def turn(self) -> None:
        """Do a bounded amount of work."""


log = logging.getLogger(__name__)

TURN_S = 1.0
SCRUB_BYTES_PER_S = 16 << 20
"""A hundredth of an SSD's read rate: 64 GiB take 70 minutes."""
RETURN_PERIOD_S = 10.0
"""Interval of returning free pages: it takes about 5 ms, and constant puts use the pages again."""


class Keeper(Turns):
    """Runs a turn of housekeeping every `turn_s`."""

    def __init__(self, shard: Shard, scrub_bytes_per_s: float = 0.0, turn_s: float = TURN_S) -> None:
        """`scrub_bytes_per_s` 0 does not scrub."""
        if scrub_bytes_per_s < 0:
            raise InvalidField("scrub", f"{scrub_bytes_per_s} bytes per second is negative")
        super().__init__(shard, "kintsugi-keeper", turn_s)
        self.scrubbed_chunks = 0
        self._scrub_bytes_per_turn = scrub_bytes_per_s * turn_s
        self._budget_bytes = 0.0
        self._kept_pages_s = 0.0
        """Time since free pages were returned, counted in turns."""
        self._round: deque[Address] = deque()

    def turn(self) -> None:
        """One round of housekeeping."""
        self._shard.table.expire()
        self._record_lifetimes()
        self._kept_pages_s += self._turn_s
        if self._kept_pages_s >= RETURN_PERIOD_S:
            return_free_pages()
            self._kept_pages_s = 0.0
        self._budget_bytes = min(
            self._budget_bytes + self._scrub_bytes_per_turn, 2 * self._scrub_bytes_per_turn
        )
        while self._budget_bytes > 0 and not self._stop.is_set():
            size = self._scrub_one()
            if not size:
                return
            self._budget_bytes -= size

    def _record_lifetimes(self) -> None:
        """Record lifetimes that puts have extended without waiting for a disk."""
        try:
            self._shard.record_lifetimes()
        except Unavailable as error:
            log.warning("%s", error)

    def _scrub_one(self) -> int:
        """Verify the next chunk of the round. Returns the bytes read; 0 if there is no chunk."""
        if not self._round:
            self._round.extend(entry.address for entry in self._shard.table.entries())
        while self._round:
            namespace, key = self._round.popleft()
            entry = self._shard.table.get((namespace, key))
            if entry is not None and not entry.is_far:
                copies = max(1, len(entry.copies))
                self._shard.verify(namespace, [key])
                self.scrubbed_chunks += 1
                return copies * entry.manifest.chunk_bytes
        return 0
