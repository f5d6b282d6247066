"""Pins: chunks that must not leave, each for the length of a lease."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.store.shard.entry import ChunkEntry

LEASE_S_MAX = 24 * 3600.0
PINS_MAX = 65536
PINNED_SHARE_MAX = 0.5
"""Of the largest tier: pins must never bring the hit rate of everything else to nothing."""


@dataclass(frozen=True)
class _Pin:
    entries: Sequence[ChunkEntry]
    expires_s: float


class Pins:
    """Leases by id. Not thread-safe: the shard holds the lock."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        self._bytes = 0

    def pin(self, entries: Sequence[ChunkEntry], lease_s: float) -> str:
        """Raises `InvalidField` for a lease out of bounds, `ResourceExhausted` past what may be pinned."""
        if not 0 < lease_s <= LEASE_S_MAX:
            raise InvalidField("lease_s", f"{lease_s} is outside (0, {LEASE_S_MAX:.0f}]")
        size = sum(entry.manifest.chunk_bytes for entry in entries if not entry.pins)
        limit = int(PINNED_SHARE_MAX * self._capacity_bytes)
        if self._bytes + size > limit or len(self._pins) >= PINS_MAX:
            raise ResourceExhausted(
                f"pinning {size} bytes beside {self._bytes} exceeds the {limit} that may be; unpin some"
            )
        for entry in entries:
            self._bytes += 0 if entry.pins else entry.manifest.chunk_bytes
            entry.pins += 1
        lease_id = secrets.token_hex(16)
        if entries:  # others need the place of a lease that holds nothing
            self._pins[lease_id] = _Pin(entries, self._clock() + lease_s)
        return lease_id

    def unpin(self, lease_id: str) -> int:
        """The number of chunks let go; 0 for a lease that is over."""
        pin = self._pins.pop(lease_id, None)
        if pin is None:
            return 0
        for entry in pin.entries:
            entry.pins -= 1
            self._bytes -= 0 if entry.pins else entry.manifest.chunk_bytes
        return len(pin.entries)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock()
        for lease_id in [lease_id for lease_id, pin in self._pins.items() if pin.expires_s <= now]:
            self.unpin(lease_id)
