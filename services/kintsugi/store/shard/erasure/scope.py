"""What an erasure covers, and what it found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from kintsugi.core.namespaces.parts import is_within
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

    @staticmethod
    def of(namespace: str, keys: Iterable[ChunkKey]) -> Scope:
        return Scope(namespace, frozenset(keys))

    def covers(self, address: Address) -> bool:
        namespace, key = address
        if self.keys is None:
            return is_within(namespace, self.namespace)
        return namespace == self.namespace and key in self.keys


@dataclass
class Removed:
    """What was forgotten, chunk by chunk."""

    chunks: int = 0
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Copies and their bytes by the name of their tier."""

    def count(self, entry: ChunkEntry) -> None:
        """Add a chunk that is about to be forgotten."""
        self.chunks += 1
        for residence in entry.copies:
            chunks, size_bytes = self.tiers.get(residence.tier.name, (0, 0))
            self.tiers[residence.tier.name] = (chunks + 1, size_bytes + residence.size_bytes)


@dataclass(frozen=True)
class ErasedHere:
    """What an erasure removed from one shard."""

    removed: Removed
    gone_at_s: float
    """Unix seconds."""


def scopes_of(erasures: Iterable[Erasure]) -> list[Scope]:
    """What erasures cover together, one scope for each namespace."""
    keys: dict[str, set[ChunkKey] | None] = {}
    for erasure in erasures:
        named = keys.setdefault(erasure.namespace, set())
        if erasure.key is None:
            keys[erasure.namespace] = None
        elif named is not None:
            named.add(erasure.key)
    return [Scope(namespace, None if some is None else frozenset(some)) for namespace, some in keys.items()]


def is_in_hand(
    scope: Scope, tiers: Iterable[CopyTier], puts: Iterable[ChunkPut], evictions: Iterable[Eviction]
) -> bool:
    """Whether somebody reads, writes or moves the bytes of chunks that were removed."""
    addresses = chain(
        (residence.address for tier in tiers for residence in tier.lingering),
        (put.entry.address for put in puts if put.is_erased),
        (eviction.entry.address for eviction in evictions if eviction.entry.gone),
    )
    return any(map(scope.covers, addresses))
