"""A shard: the decisions about which bytes are where. No network; thread-safe.

One lock guards the index, the tiers' free space and every reader count; no I/O and no copy of chunk KV
happens under it.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kintsugi.core.errors import InvalidField, ResourceExhausted, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey, check_namespace
from kintsugi.store.protocol.interface import ANCHOR_CANDIDATES_MAX
from kintsugi.store.shard.admission import Admission, NoRoomYet, ShardConfig
from kintsugi.store.shard.demotion import Demoter
from kintsugi.store.shard.entry import Address, ChunkEntry, Residence
from kintsugi.store.shard.eviction.placement import NO_SSD_TIER, TierSpeed, choose_tier
from kintsugi.store.shard.eviction.reuse import ReuseGaps
from kintsugi.store.shard.index import Index
from kintsugi.store.shard.pins import Pins
from kintsugi.store.shard.promotion import Promoter, Promotion
from kintsugi.store.shard.put import ChunkPut, Committed, PutOptions
from kintsugi.store.shard.reading import HeldChunk, Reading
from kintsugi.store.shard.reports import Reports
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.ram_tier import RamTier
from kintsugi.store.shard.tiers.uses import Uses
from kintsugi.store.shard.writeback import WriteBack

log = logging.getLogger(__name__)

CLEAR_BATCH = 256
QUEUE_SHARE_MAX = 0.25
"""Of RAM, that may wait for one SSD tier: puts wait when more would."""


@dataclass
class Counters:
    """Since the shard started."""

    hits: int = 0
    misses: int = 0
    quarantined: int = 0
    expired: int = 0


class Shard:
    """Chunk KV in this process's arena and on its disks. `close` it."""

    def __init__(
        self,
        ram: RamTier,
        disks: Sequence[DiskTier] = (),
        shard_id: str | None = None,
        config: ShardConfig | None = None,
        home: Home | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shard_id = shard_id or str(uuid.uuid4())
        self.ram = ram
        self.disks = disks
        self.config = config or ShardConfig()
        self.counters = Counters()
        self.reports = Reports(None if home is None else home.path / "reports")
        self._uses = Uses(None if home is None or not disks else home.path / "uses")
        self._home = home
        self.draining = False
        self.failure: BaseException | None = None
        """What killed one of its threads: nothing is served any more."""
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        ram.on_free = self._changed.notify_all
        self._wall_clock = wall_clock
        self._clock = clock
        self._index = Index()
        largest_bytes = max(ram.capacity_bytes, *(disk.capacity_bytes for disk in disks), 0)
        self.reuse = ReuseGaps(clock)
        self._pins = Pins(largest_bytes, clock)
        self._next_of: dict[DiskTier, WriteBack] = {}
        demoter = Demoter(self.lock, self._next_of, self._forget_evicted)
        queue_bytes_max = int(QUEUE_SHARE_MAX * ram.capacity_bytes)
        self.writers = [
            WriteBack(disk, ram, self._changed, self.lock, queue_bytes_max, demoter.demote, self.fail)
            for disk in disks
        ]
        self._next_of.update(zip(disks, self.writers[1:], strict=False))
        self._admission = Admission(
            ram, disks, self.writers, self._index, self.config, self._forget, self._forget_evicted
        )
        self._promoter = Promoter(ram, self.lock, self._quarantine, self.fail)
        try:
            self._recover()
        except BaseException:
            self.reports.close()  # LMDB opens a folder once in a process
            raise
        for writer in self.writers:
            writer.start()
        self._promoter.start()

    @property
    def tiers(self) -> tuple[RamTier | DiskTier, ...]:
        """All of them, fastest first."""
        return (self.ram, *self.disks)

    def _recover(self) -> None:
        uses = self._uses.load()
        for disk in self.disks:
            recovered = disk.recover(lambda address: self._index.get(address) is not None, uses)
            self.counters.quarantined += recovered.damaged
            for entry in recovered.entries:
                entry.used_at_s = min(entry.used_at_s, self._wall_clock())  # unknown, or the clock went back
                self._index.add(entry)

    def fail(self, error: BaseException) -> None:
        """One of the shard's own threads died: refuse everything from now on, and say why."""
        log.critical("the shard failed", exc_info=error)
        with self.lock:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise Unavailable(f"this shard failed ({self.failure!r}); restart it")

    # Finding

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkEntry | None]:
        """The entry of each key; a hit counts as a use."""
        check_namespace(namespace)
        self._check_alive()
        with self.lock:
            return [self._use_entry((namespace, key)) for key in keys]

    def _use_entry(self, address: Address) -> ChunkEntry | None:
        entry = self._get_live_entry(address)
        if entry is None:
            self.counters.misses += 1
            self.reuse.missed(address)
            return None
        self.counters.hits += 1
        self._touch(entry)
        return entry

    def _touch(self, entry: ChunkEntry) -> None:
        entry.uses += 1
        entry.used_at_s = self._wall_clock()
        if entry.ram is not None:
            self.ram.policy.touch(entry)
        if entry.disk is not None:
            disk_of(entry.disk).policy.touch(entry)

    def _get_live_entry(self, address: Address) -> ChunkEntry | None:
        """The entry, unless it is absent or its time is over."""
        entry = self._index.get(address)
        if entry is not None and entry.expires_at_s <= self._wall_clock() and not entry.pins:
            self.counters.expired += 1
            self._forget(entry)
            return None
        return entry

    def lookup_anchors(
        self, namespace: str, space_digest: bytes, anchors: Sequence[int]
    ) -> dict[int, list[ChunkManifest]]:
        """As `ChunkStore.lookup_anchors`."""
        check_namespace(namespace)
        self._check_alive()
        found: dict[int, list[ChunkManifest]] = {}
        with self.lock:
            for anchor in set(anchors):
                entries = self._index.candidates(namespace, space_digest, anchor)
                manifests = sorted((entry.manifest for entry in entries), key=lambda m: -m.num_tokens)
                if manifests:
                    found[anchor] = manifests[:ANCHOR_CANDIDATES_MAX]
        return found

    def page(self, namespace: str, limit: int, after: ChunkKey | None) -> list[ChunkEntry]:
        """Entries in key order."""
        check_namespace(namespace)
        self._check_alive()
        with self.lock:
            return self._index.page(namespace, limit, after)

    # Writing

    def begin_put(
        self, manifest: ChunkManifest, options: PutOptions | None = None, wait_s: float = 0.0
    ) -> ChunkPut | None:
        """Room for a chunk, or None where the key is there already. End it with `commit` or `abort`.

        Raises `ResourceExhausted` for what can never fit, `NoRoomYet` where `wait_s` was too short.
        """
        options = options or PutOptions()
        self._admission.check_sizes(manifest)
        recompute_ms = self.config.recompute_ms(manifest, options.recompute_ms)
        deadline_s = self._clock() + wait_s
        with self.lock:
            while True:
                self._check_alive()
                if self.draining:
                    raise Unavailable("this shard is draining; put to another")
                if self._get_live_entry((manifest.namespace, manifest.key)) is not None:
                    return None
                tier = self._tier_for(manifest, options, recompute_ms)
                residence = self._admission.room_for_put(manifest, tier)
                if residence is not None:
                    break
                if self._clock() >= deadline_s:
                    raise NoRoomYet(
                        f"{manifest.chunk_bytes} bytes do not fit beside what is pinned, being read or "
                        f"waiting for the disk ({self.ram.allocator.free_bytes} of "
                        f"{self.ram.capacity_bytes} bytes of RAM are free); try again later"
                    )
                self._changed.wait(deadline_s - self._clock())
            residence.acquire()
        expires_at_s = self._wall_clock() + options.ttl_s
        entry = ChunkEntry(manifest, expires_at_s, recompute_ms, used_at_s=self._wall_clock())
        return ChunkPut(entry, residence, self.ram, tier)

    def _tier_for(self, manifest: ChunkManifest, options: PutOptions, recompute_ms: float) -> str:
        speeds = [TierSpeed(disk.name, disk.read_bytes_per_s) for disk in self.disks]
        tier = choose_tier(options.tier, speeds, manifest.chunk_bytes, recompute_ms, options.durable)
        for disk in self.disks:
            if disk.name == tier and manifest.chunk_bytes > disk.capacity_bytes:
                raise ResourceExhausted(
                    f"a chunk of {manifest.chunk_bytes} bytes exceeds {tier}'s {disk.capacity_bytes}; "
                    "name another tier or make chunks shorter"
                )
        return tier

    def commit(self, put: ChunkPut) -> Committed:
        """Make the chunk visible. Raises `InvalidField` where frames are missing, `NoRoomYet` where puts that
        began together exceed a quota."""
        if not put.complete:
            self.abort(put)
            raise InvalidField("frames", "the put was committed before its last layer")
        entry = put.entry
        with self.lock:
            present = self._get_live_entry(entry.address)
            if present is not None:
                self.abort(put)
                return Committed(False, None)
            if not self._admission.within_quota(entry.manifest):
                self.abort(put)
                raise NoRoomYet(f"the quota of {entry.manifest.namespace!r} is in use; try again later")
            self._index.add(entry)
            self.ram.adopt(entry, put.residence)
            writer = self._admission.writer(put.tier)
            writing = None if writer is None else writer.submit(entry)
            put.residence.release()
        return Committed(True, writing)

    def abort(self, put: ChunkPut) -> None:
        """Give the room back."""
        with self.lock:
            put.residence.condemn()
            put.residence.release()

    def make_durable(self, namespace: str, key: ChunkKey) -> Future[None] | None:
        """Done once a chunk that is here is on disk, which starts now where RAM alone has it; None where it
        is there, or gone. Raises `InvalidField` without an SSD tier."""
        with self.lock:
            entry = self._index.get((namespace, key))
            if not self.writers:
                raise InvalidField("ack", NO_SSD_TIER)
            if entry is None or entry.writing is not None or entry.disk is not None:
                return None if entry is None else entry.writing
            return self.writers[0].submit(entry)

    def delete(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks; the number that was there. Durable once `flushed` is done."""
        check_namespace(namespace)
        self._check_alive()
        with self.lock:
            entries = [self._get_live_entry((namespace, key)) for key in keys]
            present = {entry.address: entry for entry in entries if entry is not None}
            for entry in present.values():
                self._forget(entry)
        return len(present)

    def clear(self, namespace: str) -> int:
        """Forget a namespace's chunks; their number. Takes the lock for some at a time."""
        check_namespace(namespace)
        self._check_alive()
        cleared = 0
        while True:
            with self.lock:
                entries = self._index.page(namespace, CLEAR_BATCH, None)
                for entry in entries:
                    self._forget(entry)
            if not entries:
                return cleared
            cleared += len(entries)

    def flushed(self) -> list[Future[None]]:
        """Done once every put and deletion until now is on disk."""
        with self.lock:
            return [writer.flush() for writer in self.writers]

    def _forget(self, entry: ChunkEntry) -> None:
        self._forget_unheld(entry)
        self.ram.drop(entry)
        if entry.disk is not None:
            disk_of(entry.disk).drop(entry)

    def _forget_evicted(self, entry: ChunkEntry) -> None:
        self._forget_unheld(entry)
        self.reuse.left(entry.address)

    def _forget_unheld(self, entry: ChunkEntry) -> None:
        self._index.remove(entry)
        entry.gone = True

    # Reading

    def open(self, namespace: str, keys: Sequence[ChunkKey], layers: range, heads: HeadRange) -> Reading:
        """Hold chunks in place, and start to bring those on disk into RAM; end with `close_reading`.

        Raises `InvalidField` for a range that a chunk lacks.
        """
        check_namespace(namespace)
        self._check_alive()
        with self.lock:
            entries = [self._get_live_entry((namespace, key)) for key in keys]
            for entry in entries:
                if entry is not None:
                    check_range(entry.manifest, layers, heads)
            return Reading(self._hold_entries(entries, heads))

    def _hold_entries(self, entries: Sequence[ChunkEntry | None], heads: HeadRange) -> list[HeldChunk | None]:
        loads: list[Promotion] = []
        held: list[HeldChunk | None] = []
        for entry in entries:
            if entry is None:
                held.append(None)
                continue
            if entry.ram is None:
                load = self._promotion(entry)
                loads += [] if load is None else [load]
            residence = entry.ram or entry.disk
            assert residence is not None
            residence.acquire()
            held.append(HeldChunk(entry.manifest, residence, heads))
        if loads:
            self._promoter.submit(loads)
        return held

    def _promotion(self, entry: ChunkEntry) -> Promotion | None:
        """A load of the chunk into RAM; None where RAM has no room for it now."""
        source = entry.disk
        assert source is not None
        source.acquire()
        target = self._admission.room(entry.manifest)
        if target is None:
            source.release()
            return None
        target.unloaded.update(range(len(target.offsets)))
        target.acquire()
        self.ram.adopt(entry, target)
        return Promotion(entry, source, disk_of(source), target)

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to bring chunks into RAM; how many are there or on their way."""
        check_namespace(namespace)
        self._check_alive()
        loads: list[Promotion] = []
        with self.lock:
            entries = {entry for key in keys if (entry := self._get_live_entry((namespace, key))) is not None}
            for entry in entries:
                load = self._promotion(entry) if entry.ram is None else None
                loads += [] if load is None else [load]
            if loads:
                self._promoter.submit(loads)
            return sum(entry.ram is not None for entry in entries)

    def close_reading(self, reading: Reading) -> None:
        """Let the chunks go."""
        with self.lock:
            for chunk in reading.chunks:
                if chunk is not None:
                    chunk.residence.release()

    def verify(self, namespace: str, keys: Sequence[ChunkKey]) -> dict[ChunkKey, bool]:
        """Read chunks from every tier that holds them; copies whose digests are wrong are quarantined.

        Key -> whether all its copies are intact; absent ones are left out. Blocks; one xxh3 pass over the
        bytes.
        """
        check_namespace(namespace)
        intact: dict[ChunkKey, bool] = {}
        for key in keys:
            with self.lock:
                entry = self._get_live_entry((namespace, key))
                if entry is None:
                    continue
                heads = HeadRange(0, entry.manifest.layout.num_kv_heads)
                whole = [r for r in (entry.ram, entry.disk) if r is not None and not r.unloaded]
                reading = Reading([HeldChunk(entry.manifest, residence, heads) for residence in whole])
                for residence in whole:
                    residence.acquire()
            damaged = [chunk.residence for chunk in reading.chunks if chunk and not chunk.is_intact()]
            self.close_reading(reading)
            intact[key] = not damaged
            if damaged:
                self._quarantine_copies(entry, whole, damaged)
        return intact

    def _quarantine_copies(
        self, entry: ChunkEntry, verified: Sequence[Residence], damaged: Sequence[Residence]
    ) -> None:
        """Drop damaged copies; the chunk with them unless another is whole and nothing works on it, or made
        a copy of it meanwhile. What only RAM is left to hold goes to disk again."""
        with self.lock:
            copies = [residence for residence in (entry.ram, entry.disk) if residence is not None]
            at_rest = entry.writing is None and all(residence in verified for residence in copies)
            if entry.gone or not at_rest or all(residence in damaged for residence in copies):
                self._quarantine(entry)
                return
            self.counters.quarantined += 1
            log.error("quarantined a copy of chunk %s of %s", entry.manifest.key, entry.manifest.namespace)
            if entry.ram in damaged:
                self.ram.drop(entry)
            elif entry.disk is not None and entry.disk in damaged:
                disk_of(entry.disk).drop(entry)
                self.writers[0].submit(entry)

    def _quarantine(self, entry: ChunkEntry) -> None:
        with self.lock:
            self.counters.quarantined += 1
            log.error("quarantined chunk %s of %s", entry.manifest.key, entry.manifest.namespace)
            if not entry.gone:
                self._forget(entry)

    # Keeping

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> tuple[str, int]:
        """Keep chunks from leaving; the lease's id and how many of them are there."""
        check_namespace(namespace)
        self._check_alive()
        with self.lock:
            entries = {entry for key in keys if (entry := self._get_live_entry((namespace, key))) is not None}
            return self._pins.pin(list(entries), lease_s), len(entries)

    def unpin(self, lease_id: str) -> int:
        """End a lease early; how many chunks it held."""
        with self.lock:
            return self._pins.unpin(lease_id)

    def expire(self) -> None:
        """End leases and forget chunks whose time is over."""
        with self.lock:
            self._pins.expire()
            entries = list(self._index)
        now = self._wall_clock()
        due = [entry for entry in entries if entry.expires_at_s <= now]  # not under the lock: there are many
        with self.lock:
            for entry in due:
                self._get_live_entry(entry.address)

    def save_uses(self) -> None:
        """Remember over a restart how chunks were used."""
        with self.lock:
            entries = list(self._index)
        self._uses.save(entry for entry in entries if entry.disk is not None)

    def addresses(self) -> list[Address]:
        """Every chunk, for the scrubber."""
        with self.lock:
            return [entry.address for entry in self._index]

    def chunk_bytes(self, namespace: str, key: ChunkKey) -> int:
        """Size of a chunk; 0 for an absent one. No use is counted."""
        with self.lock:
            entry = self._index.get((namespace, key))
            return 0 if entry is None else entry.manifest.chunk_bytes

    def drain(self, timeout_s: float) -> int:
        """Refuse puts and write back what only RAM holds; the bytes that were not written in time.

        Raises `InvalidField` for a time that is none."""
        if not timeout_s >= 0:
            raise InvalidField("timeout_s", f"{timeout_s} is not a duration")
        with self.lock:
            self.draining = True
            if self.writers:
                for entry in self._index:
                    if entry.disk is None and entry.writing is None:
                        self.writers[0].submit(entry)
            self._changed.wait_for(lambda: not self._count_unwritten_bytes() or self.failure, timeout_s)
            return self._count_unwritten_bytes()

    def _count_unwritten_bytes(self) -> int:
        return sum(writer.queue_bytes for writer in self.writers)

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Write what waits, stop the threads, let go of memory and directories. Once."""
        self._promoter.close()
        for writer in self.writers:
            writer.close()
        self.save_uses()
        for disk in self.disks:
            disk.close()
        self.reports.close()
        self.ram.arena.close()
        if self._home is not None:
            self._home.close()


def disk_of(residence: Residence) -> DiskTier:
    """The SSD tier of an entry's disk copy."""
    assert isinstance(residence.tier, DiskTier)
    return residence.tier


def check_range(manifest: ChunkManifest, layers: range, heads: HeadRange) -> None:
    """Raise `InvalidField` unless the chunk has these layers and heads."""
    layout = manifest.layout
    if not 0 <= layers.start < layers.stop <= layout.num_layers or layers.step != 1:
        raise InvalidField("layers", f"[{layers.start}, {layers.stop}) is outside [0, {layout.num_layers})")
    if not 0 <= heads.start < heads.stop <= layout.num_kv_heads:
        raise InvalidField("heads", f"[{heads.start}, {heads.stop}) is outside [0, {layout.num_kv_heads})")
