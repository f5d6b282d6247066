"""Leases: chunks that must not leave, each lease for a limited time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.store.shard.entry import ChunkEntry

LEASE_S_MAX = 24 * 3600.0
PINS_MAX = 65536
PINNED_SHARE_MAX = 0.5
"""Largest share of the largest tier that may be pinned, so that pins never ruin everyone else's hit rate."""


@dataclass(frozen=True)
class _Lease:
    entries: Sequence[ChunkEntry]
    expires_s: float


class Leases:
    """Leases by id. Not thread-safe, and changes no entry: the table does."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._bytes_max = int(PINNED_SHARE_MAX * capacity_bytes)
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, entries: Sequence[ChunkEntry], lease_s: float) -> str:
        """The id of a new lease of chunks that differ.

        Raises `InvalidField` for a lease out of bounds, `ResourceExhausted` past what may be pinned.
        """
        if not 0 < lease_s <= LEASE_S_MAX:
            raise InvalidField("lease_s", f"{lease_s} is outside (0, {LEASE_S_MAX:.0f}]")
        size = sum(entry.manifest.chunk_bytes for entry in entries if not entry.pins)
        if self._bytes + size > self._bytes_max or len(self._leases) >= PINS_MAX:
            raise ResourceExhausted(
                f"{size} bytes beside {self._bytes} in {len(self._leases)} leases cannot be pinned: at most "
                f"{self._bytes_max} bytes in {PINS_MAX} leases may be; unpin some"
            )
        lease_id = secrets.token_hex(16)
        if entries:  # a lease without chunks takes no place
            self._bytes += size
            self._leases[lease_id] = _Lease(entries, self._clock() + lease_s)
        return lease_id

    def end(self, lease_id: str) -> Sequence[ChunkEntry]:
        """The chunks that the lease held; none for a lease that is over."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return ()
        self._bytes -= sum(entry.manifest.chunk_bytes for entry in lease.entries if entry.pins == 1)
        return lease.entries

    def due(self) -> list[str]:
        """Leases whose time is over."""
        now_s = self._clock()
        return [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]
