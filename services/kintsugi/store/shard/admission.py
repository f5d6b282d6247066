"""Room for what comes in: quotas, the write-back queue's bound, and who leaves RAM. Under the lock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.index import Index
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.ram_tier import RamTier
from kintsugi.store.shard.writeback import WriteBack


@dataclass(frozen=True)
class ShardConfig:
    """A shard's bounds."""

    quota_bytes: Mapping[str, int] = field(default_factory=dict)
    """Most bytes that a namespace may hold; it evicts its own chunks first. `*` is everyone else's."""

    recompute_ms_per_token: float = 0.0
    """What prefilling a token costs the writers that do not say: decides where `auto` puts a chunk. 0:
    unknown."""

    def __post_init__(self) -> None:
        if not (self.recompute_ms_per_token >= 0 and math.isfinite(self.recompute_ms_per_token)):
            raise InvalidField("recompute_ms_per_token", f"{self.recompute_ms_per_token} is not a duration")

    def recompute_ms(self, manifest: ChunkManifest, said_ms: float) -> float:
        """What computing a chunk again takes: what its writer said, or else what is configured."""
        return said_ms or self.recompute_ms_per_token * manifest.num_tokens

    def quota_of(self, namespace: str) -> float:
        return self.quota_bytes.get(namespace, self.quota_bytes.get("*", math.inf))


class NoRoomYet(ResourceExhausted):
    """Room may come: chunks are being read or written back."""


class Admission:
    """Decides; what it drops from the shard altogether goes through the shard's own `forget`."""

    def __init__(
        self,
        ram: RamTier,
        disks: Sequence[DiskTier],
        writers: Sequence[WriteBack],
        index: Index,
        config: ShardConfig,
        forget: Callable[[ChunkEntry], None],
        forget_unheld: Callable[[ChunkEntry], None],
    ) -> None:
        self.ram = ram
        self.disks = disks
        self.writers = writers
        self.config = config
        self._index = index
        self._forget = forget
        self._forget_unheld = forget_unheld

    def check_sizes(self, manifest: ChunkManifest) -> None:
        """Raise `ResourceExhausted` for a chunk that can never fit."""
        size = manifest.chunk_bytes
        if size > self.ram.capacity_bytes:
            raise ResourceExhausted(
                f"a chunk of {size} bytes exceeds the RAM tier's {self.ram.capacity_bytes}; "
                "raise its capacity or make chunks shorter"
            )
        quota = self.config.quota_of(manifest.namespace)
        if size > quota:
            raise ResourceExhausted(
                f"a chunk of {size} bytes exceeds the quota of {quota:.0f} of {manifest.namespace!r}"
            )

    def writer(self, tier: str) -> WriteBack | None:
        """Who writes to the tier of this name; None for RAM."""
        return next((writer for writer in self.writers if writer.tier.name == tier), None)

    def room_for_put(self, manifest: ChunkManifest, tier: str) -> Residence | None:
        """RAM for a chunk that is to be written to `tier`; None where it has to wait."""
        writer = self.writer(tier)
        if writer is not None and writer.is_full_for(manifest.chunk_bytes):
            return None
        if not self.within_quota(manifest):
            return None
        return self.room(manifest)

    def within_quota(self, manifest: ChunkManifest) -> bool:
        """Make a namespace's own chunks leave until another fits its quota; whether it does now."""
        namespace = manifest.namespace
        quota = self.config.quota_of(namespace)
        while self._index.bytes_by_namespace.get(namespace, 0) + manifest.chunk_bytes > quota:
            entry = self._quota_victim(namespace)
            if entry is None:
                return False
            self._forget(entry)
        return True

    def _quota_victim(self, namespace: str) -> ChunkEntry | None:
        """Of the namespace's chunks, what the slowest tier that has any gives up first."""
        tiers: tuple[DiskTier | RamTier, ...] = (*reversed(self.disks), self.ram)
        for tier in tiers:
            victim = tier.policy.evict(lambda e: e.manifest.namespace == namespace and _is_idle(e))
            if victim is not None:
                tier.evictions += 1
                return victim
        return None

    def room(self, manifest: ChunkManifest) -> Residence | None:
        """RAM for a chunk, after evicting; None where nothing may leave now."""
        residence = self.ram.allocate(manifest)
        while residence is None and self._evict_from_ram(manifest.chunk_bytes):
            residence = self.ram.allocate(manifest)
        return residence

    def _evict_from_ram(self, needed_bytes: int) -> bool:
        """Drop a chunk that a disk also has, or send one there that leaves RAM once it is written."""
        writer = self.writers[0] if self.writers and not self.writers[0].tier.failure else None
        busy = writer is not None and writer.queue_bytes >= needed_bytes

        def may_leave(entry: ChunkEntry) -> bool:
            if entry.ram is None or entry.ram.readers or (entry.pins and entry.disk is None):
                return False
            return entry.disk is not None or not busy

        victim = self.ram.evict(may_leave)
        if victim is None:
            return False
        if victim.disk is None and writer is not None:
            victim.leaving = True
            writer.submit(victim)
            return True
        self.ram.unlink(victim)
        if victim.disk is None:
            self._forget_unheld(victim)
        return True


def _is_idle(entry: ChunkEntry) -> bool:
    busy = (entry.ram is not None and entry.ram.readers) or (entry.disk is not None and entry.disk.readers)
    return not entry.pins and not busy
