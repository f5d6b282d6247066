"""A chunk as a shard knows it, and its bytes in one tier: plain data.

Only the transitions in `kintsugi.store.shard.life` assign to these fields. That module says which values may
occur together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.shard.eviction.lifetimes import LifetimePolicy
from kintsugi.store.shard.eviction.policy import EvictionPolicy
from kintsugi.store.shard.tiers.extents import Extent, Strides

Address = tuple[str, ChunkKey]
"""Namespace and key: a chunk cannot be named without its tenant."""


class CopyTier(ABC):
    """A tier as the chunks in it know it. The table's lock guards order and counts."""

    is_remote = False
    """Whether its bytes are behind a network: they cannot be relied on, and are read only into RAM."""

    def __init__(self, name: str, make_policy: Callable[[], EvictionPolicy[ChunkEntry]]) -> None:
        self.name = name
        """`ram`, `ssd0`, `ssd1` …, `bucket`."""
        self.policy = LifetimePolicy(lambda entry: entry.expires_at_s < math.inf, make_policy)
        self.chunks = 0
        self.bytes_by_namespace: dict[str, int] = {}
        """Chunk KV of each namespace that has some here."""
        self.evictions = 0
        """Chunks that left because the tier was full."""
        self.lingering: set[Residence] = set()
        """Residences that no entry holds and that are not free yet: they are being read."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes that it may hold."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes taken, those of chunks that are gone but still read included."""

    @property
    def is_in_reach(self) -> bool:
        """Whether it can be read now, as far as anybody knows."""
        return True

    def keeps(self, residence: Residence) -> bool:
        """Whether the bytes of a copy can be read now, and after a restart, as far as anybody knows."""
        return True

    def holds(self, residence: Residence) -> bool:
        """Whether the bytes of a copy are in the tier, and not on their way to it."""
        return True

    def admit(self, entry: ChunkEntry) -> None:
        """Count the copy of an entry, and order it among the others."""
        self.chunks += 1
        self._count(entry.manifest.namespace, entry.charged_bytes)
        self.policy.admit(entry, entry.manifest.chunk_bytes, entry.recompute_ms)

    def remove(self, entry: ChunkEntry) -> None:
        """Stop counting the copy of an entry, which the policy may have given up before."""
        self.chunks -= 1
        self._count(entry.manifest.namespace, -entry.charged_bytes)
        self.policy.remove(entry)

    def _count(self, namespace: str, size_bytes: int) -> None:
        held = self.bytes_by_namespace.get(namespace, 0) + size_bytes
        if held:
            self.bytes_by_namespace[namespace] = held
        else:
            del self.bytes_by_namespace[namespace]

    @abstractmethod
    def unlink(self, residence: Residence) -> None:
        """Its entry let go of a residence; it may still be read."""

    @abstractmethod
    def free(self, residence: Residence) -> None:
        """Take back a residence that is unlinked and has no readers."""


@dataclass(eq=False)
class Residence:
    """The bytes of one chunk in one tier. Whoever uses them holds a reader count."""

    tier: CopyTier
    address: Address
    extents: tuple[Extent, ...]
    strides: Strides
    readers: int = 0
    condemned: bool = False
    """Its entry let go of it: no new readers; free once the last one is done."""
    unloaded: set[int] = field(default_factory=set)
    """Frames, by their place in the chunk, that a promotion has not read yet."""
    lost: str = ""
    """Why the promotion failed; empty if it did not."""
    waiters: list[Callable[[], None]] = field(default_factory=list)
    """Called once, under the lock, at the next progress of the promotion."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every frame. Computed on demand: a catalog names far more chunks than are read."""
        return self.strides.offsets_in(self.extents)

    def places(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Byte offset and padded size of the frames `[start, stop)`."""
        return zip(self.offsets[start:stop], self.strides.each[start:stop], strict=True)

    @property
    def size_bytes(self) -> int:
        return self.strides.size_bytes

    @property
    def is_at_hand(self) -> bool:
        """Whether all of it is in RAM or on a disk of the shard."""
        return not self.unloaded and not self.tier.is_remote


@dataclass(eq=False)
class ChunkEntry:
    """One chunk."""

    manifest: ChunkManifest
    expires_at_s: float = math.inf
    """Unix seconds."""
    recompute_ms: float = 0.0
    recorded_bytes: int = 0
    """What its record charges its namespace for each copy; 0: it came with no record."""
    ram: Residence | None = None
    disk: Residence | None = None
    writing: Future[None] | None = None
    """Done when the write-back under way has ended, one way or the other."""
    leaving: bool = False
    """Its RAM copy is dropped as soon as the write-back under way has ended."""
    gone: bool = False
    """Forgotten; a worker that still has it discards its result."""
    pins: int = 0
    uses: int = 0
    used_at_s: float = 0.0
    """Unix seconds: when it was put or last used."""
    moved_s: float = -math.inf
    """When it last began to move to another SSD tier by being read, on the shard's monotonic clock."""

    @property
    def charged_bytes(self) -> int:
        """What its namespace is charged for each copy. It is recorded, so that it is given back as it was
        taken, whatever a later version charges."""
        return self.recorded_bytes or self.manifest.chunk_bytes

    @property
    def address(self) -> Address:
        return self.manifest.namespace, self.manifest.key

    @property
    def copies(self) -> tuple[Residence, ...]:
        """Fastest tier first."""
        return tuple(residence for residence in (self.ram, self.disk) if residence is not None)

    @property
    def is_durable(self) -> bool:
        """Whether it outlives the process, as far as anybody knows."""
        return self.disk is not None and self.disk.tier.keeps(self.disk)

    @property
    def is_below_ram(self) -> bool:
        """Whether a copy has arrived below RAM: its RAM copy may go."""
        return self.disk is not None and self.disk.tier.holds(self.disk)

    @property
    def is_kept(self) -> bool:
        """Whether a put of it changes nothing: others are in a bucket alone, which does not keep them."""
        return self.ram is not None or self.pins > 0 or self.is_durable

    @property
    def is_loading(self) -> bool:
        """Whether a promotion is still filling its RAM copy."""
        return self.ram is not None and bool(self.ram.unloaded)

    @property
    def is_far(self) -> bool:
        """Whether only a bucket holds it."""
        return self.ram is None and self.disk is not None and self.disk.tier.is_remote

    @property
    def is_in_reach(self) -> bool:
        """Whether it can be read now, as far as anybody knows."""
        return any(residence.tier.is_in_reach for residence in self.copies)

    @property
    def tier_name(self) -> str:
        """The fastest tier that holds it."""
        return next((residence.tier.name for residence in self.copies), "")


class Copying(Protocol):
    """A chunk that is copied to an SSD tier. Once its entry has let go of the source, the copy is not wanted:
    the chunk may have been deleted and put again."""

    @property
    def entry(self) -> ChunkEntry: ...

    @property
    def source(self) -> Residence: ...
