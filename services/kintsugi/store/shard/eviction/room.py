"""Makes room for a chunk that is put or loaded: decides which other chunks are forgotten or leave a tier.

Call it under the table's lock. It applies its decisions through functions of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard import admission
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.eviction.placement import choose_tier
from kintsugi.store.shard.eviction.reuse import ReuseGaps
from kintsugi.store.shard.eviction.shares import Shares
from kintsugi.store.shard.index import Index
from kintsugi.store.shard.put import PutOptions
from kintsugi.store.shard.tiers.ram_tier import RamTier
from kintsugi.store.shard.work import WriteQueue, find_queue, speeds_of


@dataclass(frozen=True)
class Transitions:
    """Functions of the table that change chunks which have to leave."""

    begin_write: Callable[[ChunkEntry, WriteQueue, bool], Future[None]]
    """Has a chunk written to a queue's tier. If the last argument is true, the chunk then leaves RAM."""
    drop_copy: Callable[[ChunkEntry, Residence], None]
    forget: Callable[[ChunkEntry], None]


class Room:
    """Free space in RAM, and the chunks that can leave for others. Not thread-safe: the table holds the
    lock."""

    def __init__(
        self,
        index: Index,
        ram: RamTier,
        queues: Sequence[WriteQueue],
        shares: Shares,
        reuse: ReuseGaps,
        transitions: Transitions,
    ) -> None:
        self._index = index
        self._ram = ram
        self._queues = queues
        self._shares = shares
        self._reuse = reuse
        self._transitions = transitions

    def free_bytes(self) -> int:
        """Return how many bytes of chunks fit without the loss of another chunk."""
        if not self._queues:
            return self._ram.allocator.free_bytes
        return sum(queue.tier.allocator.free_bytes for queue in self._queues)

    def is_there(self, manifest: ChunkManifest) -> bool:
        """Return whether a chunk fits without the loss of another chunk, and within its namespace's
        limits."""
        return not self._shares.is_full_for(manifest) and manifest.chunk_bytes <= self.free_bytes()

    def make_to_put(
        self, manifest: ChunkManifest, options: PutOptions, hides_s: float
    ) -> tuple[str, Residence | None]:
        """Return the tier that a chunk is to be written to, and room for it in RAM, None if it has to wait.
        `hides_s`: as in `choose_tier`. Raises `InvalidField` and `ResourceExhausted`."""
        size = manifest.chunk_bytes
        best = choose_tier(options.tier, speeds_of(self._queues), size, hides_s, options.durable)
        tier = self._shares.tier_for(manifest, best, options)
        queue = find_queue(self._queues, tier)
        if queue is not None:
            queue.check_size(size)
            if queue.is_full_for(size):
                return tier, None
        return tier, self.make(manifest)

    def unwritten(self) -> list[ChunkEntry]:
        """Return the chunks that only RAM has and that may be on SSD."""
        unwritten = [entry for entry in self._index if entry.disk is None] if self._queues else []
        return [entry for entry in unwritten if self._shares.may_be_on_ssd(entry.manifest)]

    def make_share(self, manifest: ChunkManifest) -> bool:
        """Evict a namespace's own chunks from RAM until another one fits its limit. Returns whether it
        fits."""
        while self._shares.exceeds_ram(manifest.namespace, manifest.chunk_bytes):
            is_own = self._shares.may_make_room(manifest.namespace)
            if not self._evict_from_ram(manifest.chunk_bytes, is_own):
                return False
        return True

    def trim_ssd(self, namespace: str) -> None:
        """Drop copies below RAM until a namespace is within its limit."""
        while (victim := self._shares.choose_from_ssd(namespace)) is not None:
            if victim.ram is None:
                self.forget(victim)
            else:
                self._transitions.drop_copy(victim, victim.copies[-1])

    def make(self, manifest: ChunkManifest) -> Residence | None:
        """Allocate RAM for a chunk, evicting others if needed. None if no other chunk may leave now."""
        if not self.make_share(manifest):
            return None
        residence = self._ram.allocate(manifest)
        while residence is None and self._evict_from_ram(manifest.chunk_bytes):
            residence = self._ram.allocate(manifest)
        return residence

    def _evict_from_ram(self, needed_bytes: int, is_own: Callable[[str], bool] | None = None) -> bool:
        """Drop the RAM copy of a chunk that has another copy, or begin to write a chunk that leaves RAM
        afterwards. Returns whether any chunk could be evicted."""
        queue = self._queues[0] if self._queues and not self._queues[0].tier.failure else None
        may_write = queue is None or queue.queue_bytes < needed_bytes
        victim = self._ram.policy.evict(lambda entry: admission.may_leave_ram(entry, may_write, is_own))
        if victim is None:
            return False
        assert victim.ram is not None
        self._ram.evictions += 1
        if victim.is_below_ram:
            self._transitions.drop_copy(victim, victim.ram)
        elif queue is not None and self._shares.may_be_on_ssd(victim.manifest):
            self._transitions.begin_write(victim, queue, True)
        elif victim.disk is not None:  # it is being uploaded to a bucket, which may refuse it
            self._transitions.drop_copy(victim, victim.ram)
        else:
            self.forget(victim)
        return True

    def forget(self, entry: ChunkEntry) -> None:
        """Forget an evicted chunk."""
        self._transitions.forget(entry)
        self._reuse.record_eviction(entry.address)
