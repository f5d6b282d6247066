"""Leases: each keeps pinned chunks from leaving for a limited time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.namespaces import NamespaceRules, NamespaceSums
from kintsugi.store.shard.entry import ChunkEntry

LEASE_S_MAX = 24 * 3600.0
PINS_MAX = 65536
"""Maximum number of chunks in all leases; a chunk counts once for each lease of it."""
PINNED_SHARE_MAX = 0.5
"""Largest share of the largest tier that may be pinned, so that other chunks keep a useful hit rate."""
NAMESPACE_SHARE_MAX = 0.5
"""Largest share of the pinnable bytes that one namespace may pin, unless its limits set another share."""


@dataclass(frozen=True)
class _Lease:
    namespace: str
    entries: Sequence[ChunkEntry]
    expires_s: float


class Leases:
    """Leases by id. Not thread-safe, and changes no entry: the table does."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._bytes_max = int(PINNED_SHARE_MAX * capacity_bytes)
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._bytes = 0
        self.bytes_by_namespace = NamespaceSums()
        """Pinned bytes."""
        self._pins = 0
        self._pins_by_namespace = NamespaceSums()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, namespace: str, entries: Sequence[ChunkEntry], lease_s: float, rules: NamespaceRules
    ) -> str:
        """Create a lease of distinct chunks of a namespace and return its id. Raises `InvalidField` for a
        duration out of bounds, `ResourceExhausted` if more would be pinned than is allowed."""
        if not 0 < lease_s <= LEASE_S_MAX:
            raise InvalidField("lease_s", f"{lease_s} is outside (0, {LEASE_S_MAX:.0f}]")
        size = sum(entry.charged_bytes for entry in entries if not entry.pins)
        if self._bytes + size > self._bytes_max or self._pins + len(entries) > PINS_MAX:
            raise ResourceExhausted(
                f"cannot pin {size} bytes of {len(entries)} chunks: {self._bytes} of {self._bytes_max} bytes "
                f"are pinned, by {self._pins} of {PINS_MAX} pins; unpin some"
            )
        self._check_share(namespace, size, len(entries), rules)
        lease_id = secrets.token_hex(16)
        if entries:  # an empty lease counts for no limit
            self._bytes += size
            self.bytes_by_namespace.add(namespace, size)
            self._pins += len(entries)
            self._pins_by_namespace.add(namespace, len(entries))
            self._leases[lease_id] = _Lease(namespace, entries, self._clock() + lease_s)
        return lease_id

    def _check_share(self, namespace: str, size_bytes: int, pins: int, rules: NamespaceRules) -> None:
        bytes_max = self.namespace_bytes_max
        pinned = self.bytes_by_namespace.of_account(namespace, rules)
        if pinned + size_bytes > bytes_max:
            raise ResourceExhausted(
                f"namespace {namespace!r} has pinned {pinned} bytes and may pin {bytes_max:.0f}; unpin some"
            )
        pins_max, held = (PINS_MAX + 1) // 2, self._pins_by_namespace.of_account(namespace, rules)
        if held + pins > pins_max:
            raise ResourceExhausted(
                f"namespace {namespace!r} has {held} pins and may have {pins_max}; unpin some"
            )

    @property
    def namespace_bytes_max(self) -> float:
        """Maximum number of bytes that one namespace may pin."""
        return NAMESPACE_SHARE_MAX * self._bytes_max

    def end(self, lease_id: str) -> Sequence[ChunkEntry]:
        """End a lease. Returns its chunks; none if it has already ended."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return ()
        size = sum(entry.charged_bytes for entry in lease.entries if entry.pins == 1)
        self._bytes -= size
        self.bytes_by_namespace.add(lease.namespace, -size)
        self._pins -= len(lease.entries)
        self._pins_by_namespace.add(lease.namespace, -len(lease.entries))
        return lease.entries

    def due(self) -> list[str]:
        """Return the ids of expired leases."""
        now_s = self._clock()
        return [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]
