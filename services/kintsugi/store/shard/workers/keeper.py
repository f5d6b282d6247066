"""The shard's housekeeping thread: ends leases, forgets expired chunks, saves lifetimes and uses, scrubs,
returns memory.

Scrubbing verifies one chunk at a time, at a bounded rate, because it shares the disk with loads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.store.shard.entry import Address
from kintsugi.store.shard.malloc import return_free_pages
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.uses import SAVE_PERIOD_S
from kintsugi.store.shard.workers.turns import Turns

log = logging.getLogger(__name__)

TURN_S = 1.0
SCRUB_BYTES_PER_S = 16 << 20
"""A hundredth of an SSD's read rate: 64 GiB take 70 minutes."""
RETURN_PERIOD_S = 10.0
"""Interval of returning free pages: it takes about 5 ms, and constant puts use the pages again."""


@dataclass
class _Periodic:
    """Work that is due once per period. Time is counted in turns."""

    do: Callable[[], None]
    period_s: float
    _waited_s: float = 0.0

    def turn(self, turn_s: float) -> None:
        """Note that a turn has passed, and do the work if it is due."""
        self._waited_s += turn_s
        if self._waited_s >= self.period_s:
            self.do()
            self._waited_s = 0.0


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
        self._periodic = (
            _Periodic(shard.save_uses, SAVE_PERIOD_S),
            _Periodic(return_free_pages, RETURN_PERIOD_S),
        )
        self._round: deque[Address] = deque()

    def turn(self) -> None:
        """One round of housekeeping."""
        self._shard.table.expire()
        self._record_lifetimes()
        for work in self._periodic:
            work.turn(self._turn_s)
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
