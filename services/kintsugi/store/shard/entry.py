"""The entry of a chunk in a shard, its bytes in one tier (a residence), and the index of all entries: plain
data.

Only the transitions in `kintsugi.store.shard.life` assign to the fields of entries and residences. That
module says which values may occur together. Everything is in memory, as `memory_bytes` says.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import NamespaceSums, is_within
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.content_index import ContentIndex
from kintsugi.store.protocol.wire import memory_bytes
from kintsugi.store.shard.eviction.policy import EvictionPolicy, LifetimePolicy
from kintsugi.store.shard.tiers.extents import Extent, Strides

Address = tuple[str, ChunkKey]
"""Namespace and key: a chunk cannot be named without its tenant."""


class CopyTier(ABC):
    """A tier that holds copies of chunks. The table's lock guards order and counts."""

    is_remote = False
    """Whether its bytes lie across a network. They may be lost, and are read only into RAM."""

    def __init__(self, name: str, make_policy: Callable[[], EvictionPolicy[ChunkEntry]]) -> None:
        self.name = name
        """`ram`, `ssd0`, `ssd1` …, `bucket`."""
        self.policy = LifetimePolicy(lambda entry: entry.expires_at_s < math.inf, make_policy)
        self.chunks = 0
        self.bytes_by_namespace = NamespaceSums()
        """Bytes of chunk KV."""
        self.hot_bytes = 0
        """Bytes of hot copies."""
        self.evictions = 0
        """Chunks that left because the tier was full."""
        self.lingering: set[Residence] = set()
        """Residences that no entry holds, but readers do: they are not free yet."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes that the tier may hold."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes taken, including chunks that are gone but still being read."""

    @property
    def is_in_reach(self) -> bool:
        """Whether the tier can be read now, as far as is known."""
        return True

    def keeps(self, residence: Residence) -> bool:
        """Return whether a copy can be read now and after a restart, as far as is known."""
        return True

    def holds(self, residence: Residence) -> bool:
        """Return whether the bytes of a copy have arrived in the tier."""
        return True

    def admit(self, entry: ChunkEntry) -> None:
        """Count an entry's copy and add it to the eviction order."""
        self.chunks += 1
        self.bytes_by_namespace.add(entry.manifest.namespace, entry.charged_bytes)
        self.hot_bytes += entry.charged_bytes * entry.is_hot
        self.policy.admit(entry, entry.charged_bytes, entry.recompute_ms)

    def remove(self, entry: ChunkEntry) -> None:
        """Stop counting an entry's copy. The policy may have removed it already."""
        self.chunks -= 1
        self.bytes_by_namespace.add(entry.manifest.namespace, -entry.charged_bytes)
        self.hot_bytes -= entry.charged_bytes * entry.is_hot
        self.policy.remove(entry)

    @abstractmethod
    def unlink(self, residence: Residence) -> None:
        """Note that an entry has dropped a residence. It may still be read."""

    @abstractmethod
    def free(self, residence: Residence) -> None:
        """Free a residence that is unlinked and has no readers."""


@dataclass(eq=False)
class Residence:
    """The bytes of one chunk in one tier. Every user of the bytes counts as a reader."""

    tier: CopyTier
    address: Address
    extents: tuple[Extent, ...]
    strides: Strides
    readers: int = 0
    condemned: bool = False
    """Whether its entry has dropped it. It gets no new readers and is freed after the last one."""
    unloaded: set[int] = field(default_factory=set)
    """Indices of the frames that a promotion has not read yet."""
    lost: str = ""
    """Why the promotion failed; empty if it has not."""
    waiters: list[Callable[[], None]] = field(default_factory=list)
    """Called once, under the lock, at the next progress of the promotion."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every frame, computed on demand: most recovered chunks are never read."""
        return self.strides.offsets_in(self.extents)

    def places(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Byte offset and padded size of the frames `[start, stop)`."""
        return zip(self.offsets[start:stop], self.strides.each[start:stop], strict=True)

    @property
    def size_bytes(self) -> int:
        return self.strides.size_bytes

    @property
    def is_at_hand(self) -> bool:
        """Whether all bytes are in RAM or on a disk of the shard."""
        return not self.unloaded and not self.tier.is_remote


@dataclass(eq=False)
class ChunkEntry:
    """One chunk."""

    manifest: ChunkManifest
    expires_at_s: float = math.inf
    """Unix seconds."""
    recompute_ms: float = 0.0
    recorded_bytes: int = 0
    """Bytes that its catalog record charges its namespace for each copy; 0: there was no record."""
    ram: Residence | None = None
    disk: Residence | None = None
    writing: Future[None] | None = None
    """Done when the running write-back has succeeded or failed."""
    leaving: bool = False
    """Whether its RAM copy is dropped when the running write-back has succeeded."""
    gone: bool = False
    """Whether it was forgotten. Workers discard results for it."""
    pins: int = 0
    uses: int = 0
    """Since the shard started."""
    moved_s: float = -math.inf
    """When reads last moved it to another SSD tier, on the shard's monotonic clock."""
    is_hot: bool = False
    """Whether it is a copy for a shard that shares the reads of the chunk without owning it. It stays in RAM,
    and a put replaces it."""

    @cached_property
    def charged_bytes(self) -> int:
        """`charge_of` the chunk. It is recorded, so that the same number is credited later even if a later
        version charges differently."""
        return self.recorded_bytes or charge_of(self.manifest)

    @property
    def address(self) -> Address:
        return self.manifest.namespace, self.manifest.key

    @property
    def copies(self) -> tuple[Residence, ...]:
        """Fastest tier first."""
        return tuple(residence for residence in (self.ram, self.disk) if residence is not None)

    @property
    def is_durable(self) -> bool:
        """Whether it survives the process, as far as is known."""
        return self.disk is not None and self.disk.tier.keeps(self.disk)

    @property
    def is_below_ram(self) -> bool:
        """Whether a copy has arrived below RAM, so that the RAM copy may leave."""
        return self.disk is not None and self.disk.tier.holds(self.disk)

    @property
    def is_kept(self) -> bool:
        """Whether a put of it changes nothing. A put replaces only hot copies, and chunks that only a bucket
        holds, because a bucket may lose them."""
        return not self.is_hot and (self.ram is not None or self.pins > 0 or self.is_durable)

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
        """Whether it can be read now, as far as is known."""
        return any(residence.tier.is_in_reach for residence in self.copies)

    @property
    def tier_name(self) -> str:
        """Name of the fastest tier that holds it."""
        return next((residence.tier.name for residence in self.copies), "")


def frames_bytes(manifest: ChunkManifest) -> int:
    """Return the bytes that a chunk's frames take in a tier, with their padding."""
    return Strides.of(manifest.frame_runs).size_bytes


def charge_of(manifest: ChunkManifest) -> int:
    """Return the bytes that its namespace is charged for each copy of a chunk: its frames, its entry in
    memory and its record on disk. A copy below RAM may be the only one, so each copy is charged all three."""
    return frames_bytes(manifest) + 2 * memory_bytes(manifest)


MakePolicy = Callable[[int], EvictionPolicy[ChunkEntry]]
"""Makes the policy of a tier with this capacity in bytes."""


@dataclass(frozen=True, eq=False)
class Copying:
    """A chunk that is copied to a lower tier, and the copy that is read. If its entry drops the source
    meanwhile, the new copy is not wanted: the chunk may have been deleted and put again."""

    entry: ChunkEntry
    source: Residence


class EntryIndex:
    """Not thread-safe: the table holds the lock."""

    def __init__(self) -> None:
        self._entries: dict[Address, ChunkEntry] = {}
        self.by_content = ContentIndex()
        self._keys: dict[str, list[bytes]] = {}
        self._after: dict[Address, set[ChunkKey]] = {}
        """The chunks that were prefilled after a text, by the text's address as a chunk."""
        self.bytes_by_namespace: dict[str, int] = {}
        self.memory_bytes = 0
        """`memory_bytes` of all chunks."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkEntry]:
        return iter(self._entries.values())

    def get(self, address: Address) -> ChunkEntry | None:
        return self._entries.get(address)

    def add(self, entry: ChunkEntry) -> None:
        namespace, key = entry.address
        assert entry.address not in self._entries
        self._entries[entry.address] = entry
        insort(self._keys.setdefault(namespace, []), key.digest)
        used = self.bytes_by_namespace.get(namespace, 0)
        self.bytes_by_namespace[namespace] = used + entry.charged_bytes
        self.memory_bytes += memory_bytes(entry.manifest)
        self.by_content.add(entry.manifest)
        for text in entry.manifest.context_keys:
            self._after.setdefault((namespace, text), set()).add(key)

    def remove(self, entry: ChunkEntry) -> None:
        namespace, key = entry.address
        del self._entries[entry.address]
        keys = self._keys[namespace]
        del keys[bisect_left(keys, key.digest)]
        self.bytes_by_namespace[namespace] -= entry.charged_bytes
        if not keys:
            del self._keys[namespace], self.bytes_by_namespace[namespace]
        self.memory_bytes -= memory_bytes(entry.manifest)
        self.by_content.remove(entry.manifest)
        for text in entry.manifest.context_keys:
            after = self._after[namespace, text]
            after.discard(key)
            if not after:
                del self._after[namespace, text]

    def find_prepared_after(self, namespace: str, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return the keys of the chunks that were prefilled after any of these."""
        return set().union(*(self._after.get((namespace, key), ()) for key in keys))

    def page(self, namespace: str, limit: int, after: ChunkKey | None) -> list[ChunkEntry]:
        """Return entries in key order."""
        keys = self._keys.get(namespace, [])
        start = 0 if after is None else bisect_right(keys, after.digest)
        return [self._entries[namespace, ChunkKey(key)] for key in keys[start : start + limit]]

    def addresses_within(self, namespace: str) -> list[Address]:
        """Return the addresses of a namespace's chunks, including those of its parts."""
        names = [name for name in self._keys if is_within(name, namespace)]
        return [(name, ChunkKey(key)) for name in names for key in self._keys[name]]
