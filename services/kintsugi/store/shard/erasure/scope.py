"""The scope of a deletion or an erasure, and what it has removed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from kintsugi.core.namespaces import is_within
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier
from kintsugi.store.shard.put import ChunkPut
from kintsugi.store.shard.work import Eviction


@dataclass(frozen=True)
class Scope:
    """Some chunks of a namespace, or all of it with its parts."""

    namespace: str
    keys: frozenset[ChunkKey] | None = None
    """None: all."""
    until_s: float = math.inf
    """Unix seconds: chunks whose save was requested later are kept."""

    @staticmethod
    def of(namespace: str, keys: Iterable[ChunkKey]) -> Scope:
        return Scope(namespace, frozenset(keys))

    @property
    def is_erasure(self) -> bool:
        return self.until_s < math.inf

    def takes(self, entry: ChunkEntry) -> bool:
        """Return whether a chunk with a covered address was requested early enough to be removed."""
        return entry.manifest.asked_at_s <= self.until_s

    def covers(self, address: Address) -> bool:
        namespace, key = address
        if self.keys is None:
            return is_within(namespace, self.namespace)
        return namespace == self.namespace and key in self.keys


@dataclass
class Removed:
    """Counts of removed chunks and copies."""

    chunks: int = 0
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Copies and their bytes by the name of their tier."""
    gone_at_s: float = 0.0
    """Unix seconds: when an erasure had wiped their bytes."""

    def count(self, entry: ChunkEntry) -> None:
        """Count a chunk that is about to be forgotten."""
        self.chunks += 1
        for residence in entry.copies:
            chunks, size_bytes = self.tiers.get(residence.tier.name, (0, 0))
            self.tiers[residence.tier.name] = (chunks + 1, size_bytes + residence.size_bytes)

    def add(self, other: Removed) -> None:
        """Add the counts of `other`."""
        self.chunks += other.chunks
        for name, (chunks, size_bytes) in other.tiers.items():
            before = self.tiers.get(name, (0, 0))
            self.tiers[name] = (before[0] + chunks, before[1] + size_bytes)


def scopes_of(erasures: Iterable[Erasure]) -> list[Scope]:
    """Return the scopes of erasures: one for all erasures of a namespace with the same time."""
    keys: dict[tuple[str, float], set[ChunkKey] | None] = {}
    for erasure in erasures:
        named = keys.setdefault((erasure.namespace, erasure.at_s), set())
        if erasure.key is None:
            keys[erasure.namespace, erasure.at_s] = None
        elif named is not None:
            named.add(erasure.key)
    return [
        Scope(namespace, None if some is None else frozenset(some), at_s)
        for (namespace, at_s), some in keys.items()
    ]


def is_in_hand(
    scope: Scope, tiers: Iterable[CopyTier], puts: Iterable[ChunkPut], evictions: Iterable[Eviction]
) -> bool:
    """Return whether any call or thread still uses the bytes of removed chunks."""
    addresses = chain(
        (residence.address for tier in tiers for residence in tier.lingering),
        (put.entry.address for put in puts if put.is_erased),
        (eviction.entry.address for eviction in evictions if eviction.entry.gone),
    )
    return any(map(scope.covers, addresses))
