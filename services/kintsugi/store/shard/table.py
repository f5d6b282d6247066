"""The table of a shard's chunks: one method per event. Only this class takes the shard's lock.

The lock guards the chunks and their residences, the index, the leases, the tiers' eviction order, the free
space in RAM and the work queues. Each method decides what an event means and applies transitions of
`store.shard.life`, which defines the states of a chunk. No method does I/O or copies chunk KV; the methods
that wait for room or work say so. Threads take work from `next_writes` and `next_load` and report its end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice

from kintsugi.core.errors import InvalidField, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.protocol.content_index import SLICE
from kintsugi.store.protocol.interface import ANCHORED_MAX, Anchored
from kintsugi.store.shard import life
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier, EntryIndex, Residence
from kintsugi.store.shard.erasure import CLEAR_BATCH, Deletions, Removed, Scope, is_in_hand
from kintsugi.store.shard.eviction.room import (
    NO_SSD_TIER,
    RATIO,
    Counters,
    NamespaceUse,
    NoRoomYet,
    ReuseGaps,
    Room,
    Shares,
    Transitions,
    find_faster_queue,
    find_queue,
    give_up,
    hides_s,
)
from kintsugi.store.shard.pins import Leases
from kintsugi.store.shard.reading import HeldChunk, Reading, check_range
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.lower_tier import LowerTier, Unrecorded
from kintsugi.store.shard.tiers.ram_tier import ChunkPut, Committed, PutOptions, RamTier, erased_meanwhile
from kintsugi.store.shard.work import (
    Eviction,
    LoadQueue,
    Loads,
    LoadStep,
    Promotions,
    WriteBatch,
    WriteJob,
    WriteQueue,
    run_in_turn,
)

log = logging.getLogger(__name__)


class EntryTable:
    """The present chunks and the running work on them. Thread-safe."""

    def __init__(
        self,
        ram: RamTier,
        disks: Sequence[DiskTier],
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        bucket: Sequence[LowerTier] = (),
    ) -> None:
        self.counters, self.reuse = Counters(), ReuseGaps(clock)
        self.queues = [WriteQueue(disk, ram.capacity_bytes) for disk in disks]
        """One queue per SSD tier, fastest first."""
        self.unrecorded = Unrecorded()
        """Chunks whose lifetimes are longer than the catalogs record."""
        self.draining = False
        self.failure: BaseException | None = None
        """The error that ended one of the shard's threads. From then on, nothing is served."""
        self._ram, self._disks = ram, disks
        self._tiers: tuple[CopyTier, ...] = (ram, *disks, *bucket)
        self.ratio = RATIO
        """Share of a chunk's prefill that a blend computes. `Shard.set_ratio` changes it."""
        self._wall_clock, self._clock = wall_clock, clock
        self._index, self._deletions = index, deletions = EntryIndex(), Deletions(clock)
        self._leases = Leases(max(ram.capacity_bytes, *(disk.capacity_bytes for disk in disks), 0), clock)
        self.shares = Shares(ram, (*disks, *bucket), self._leases)
        transitions = Transitions(self._begin_write, life.drop_copy, self._forget)
        self._room = Room(index, ram, self.queues, self.shares, self.reuse, transitions, deletions)
        promotions = Promotions(life.acquire, life.release, life.begin_load, self._room.make)
        self.loads = Loads(promotions, ram.capacity_bytes)
        self._puts: set[ChunkPut] = set()
        self._demoting: set[Eviction] = set()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when room is freed, a writer has work, or a thread has died."""
        self._load_added = threading.Condition(self._lock)
        ram.on_free = self._changed.notify_all

    def __len__(self) -> int:
        return len(self._index)

    def recover(self, entries: Iterable[ChunkEntry], damaged: int) -> None:
        """Add the chunks that a tier held at start-up, and count its damaged records."""
        with self._lock:
            self.counters.quarantined += damaged
            for entry in entries:
                self._index.add(entry)

    def fail(self, error: BaseException) -> None:
        """Refuse every later call, because one of the shard's threads died of `error`."""
        log.critical("the shard failed", exc_info=error)
        with self._lock:
            self.failure = self.failure or error
            self._changed.notify_all()

    def check_alive(self) -> None:
        """Raise `Unavailable` if the shard has failed."""
        if self.failure is not None:
            raise Unavailable(f"this shard failed ({self.failure!r}); restart it")

    def check(self) -> None:
        """Assert the invariants of `life` for every chunk."""
        with self._lock:
            for entry in self._index:
                life.check_present(entry)

    def entries(self) -> list[ChunkEntry]:
        """Return every present chunk."""
        with self._lock:
            return list(self._index)

    def used_bytes(self) -> int:
        """Return the bytes taken in all tiers, including chunks that are gone but still being read."""
        with self._lock:
            return sum(tier.used_bytes for tier in self._tiers)

    def namespace_uses(self) -> list[NamespaceUse]:
        """Return the uses and limits of namespaces."""
        with self._lock:
            return self.shares.uses(self._index.bytes_by_namespace)

    def room_bytes(self) -> int:
        """Return how many bytes of chunks fit without the loss of another chunk."""
        with self._lock:
            return self._room.free_bytes()

    def returns_per_s(self) -> float:
        """As `ReuseGaps.soon_per_s`."""
        with self._lock:
            return self.reuse.soon_per_s()

    def get(self, address: Address) -> ChunkEntry | None:
        """Return a present chunk. Counts no use, and nothing expires."""
        with self._lock:
            return self._index.get(address)

    def page(self, namespace: str, limit: int, after: ChunkKey | None) -> list[ChunkEntry]:
        """Return chunks in key order."""
        with self._lock:
            return self._index.page(namespace, limit, after)

    # Finding

    def use(self, addresses: Iterable[Address]) -> list[ChunkEntry | None]:
        """Return the chunk of each address. A hit counts as a use."""
        with self._lock:
            return [self._use_one(address) for address in addresses]

    def _use_one(self, address: Address) -> ChunkEntry | None:
        entry = self._find(address)
        if entry is None or not entry.is_in_reach:
            self.counters.misses += 1
            self.reuse.record_lookup_miss(address)
            return None
        self.counters.hits += 1
        life.touch(entry)
        return entry

    def _find(self, address: Address) -> ChunkEntry | None:
        """Return the chunk, unless it is absent or has expired."""
        entry = self._index.get(address)
        if entry is not None and entry.expires_at_s <= self._wall_clock() and not entry.pins:
            self.counters.expired += 1
            self._forget(entry)
            return None
        return entry

    def _find_all(self, addresses: Iterable[Address]) -> list[ChunkEntry]:
        """Return the present chunks, each once."""
        return list(dict.fromkeys(found for one in addresses if (found := self._find(one)) is not None))

    def find_anchored(self, namespace: str, space_digest: bytes, anchors: Sequence[int]) -> list[Anchored]:
        """As `ContentIndex.find`, a few anchors per hold of the lock; at most `ANCHORED_MAX`."""
        found: list[Anchored] = []
        given, by_content = frozenset(anchors), self._index.by_content
        for start in range(0, len(anchors), SLICE):
            with self._lock:
                some = by_content.find(namespace, space_digest, anchors[start : start + SLICE], given)
                found += islice(some, ANCHORED_MAX - len(found))
        return found

    # Putting

    def begin_put(self, manifest: ChunkManifest, options: PutOptions, wait_s: float) -> ChunkPut | None:
        """Reserve room in RAM. If the chunk is present, retain it and return None. Waits at most `wait_s`.
        Raises `ResourceExhausted` for a chunk that can never fit, `NoRoomYet` if `wait_s` was too short."""
        self.shares.check_size(manifest)
        limit_s, deadline_s = hides_s(self.ratio, options.recompute_ms), self._clock() + wait_s
        address, until_s = (manifest.namespace, manifest.key), self._wall_clock() + options.ttl_s
        with self._lock:
            while True:
                self.check_alive()
                if self.draining:
                    raise Unavailable("this shard is draining; put to another shard")
                if self._retain_near(address, until_s):
                    return None
                if options.is_copy and not self._room.takes_copy(manifest, options.is_hot):
                    return None
                if self._room.make_in_index(manifest):
                    tier, residence = self._room.make_to_put(manifest, options, limit_s)
                    if residence is not None:
                        break
                if self._clock() >= deadline_s:
                    raise self._room.refusal(manifest)
                self._changed.wait(deadline_s - self._clock())
            life.acquire(residence)
            entry = ChunkEntry(manifest, until_s, options.recompute_ms, is_hot=options.is_hot)
            put = ChunkPut(entry, residence, self._ram, tier, options)
            self._puts.add(put)
        return put

    def retain(self, addresses: Iterable[Address], ttl_s: float) -> list[bool]:
        """Keep chunks for at least `ttl_s` from now. Returns whether each is present. No lifetime gets
        shorter. `unrecorded` receives the chunks whose lifetimes got longer."""
        with self._lock:
            until_s = self._wall_clock() + ttl_s
            return [self._retain(address, until_s) for address in addresses]

    def _retain(self, address: Address, until_s: float) -> bool:
        entry = self._find(address)
        if entry is not None and entry.expires_at_s < until_s:
            life.extend(entry, until_s)
            self.unrecorded.add(entry)
        return entry is not None

    def _retain_near(self, address: Address, until_s: float) -> bool:
        """As `_retain`, but not for a chunk that a put replaces."""
        entry = self._index.get(address)
        return (entry is None or entry.is_kept) and self._retain(address, until_s)

    def commit(self, put: ChunkPut) -> Committed:
        """Make a chunk with all its frames present. Raises `NoRoomYet` if concurrent puts exceed the
        namespace's limit of RAM, `NotFound` if the chunk was deleted or erased meanwhile."""
        entry = put.entry
        with self._lock:
            if put.is_erased and not put.is_copy:
                self.abort(put)
                raise erased_meanwhile(entry.manifest)
            gone = put.is_erased or (put.is_copy and not self._room.keeps_copy(entry))
            if gone or self._retain_near(entry.address, entry.expires_at_s):
                self.abort(put)
                return Committed(False, None)
            if not self._room.make_share(entry.manifest):
                self.abort(put)
                raise NoRoomYet(f"the RAM of {entry.manifest.namespace!r} is in use; try again later")
            self._puts.discard(put)
            if (far := self._find(entry.address)) is not None:
                life.inherit(entry, far)
                self._forget(far)
            self._index.add(entry)
            self.counters.copied += put.is_copy
            life.add_copy(entry, put.residence)
            queue = find_queue(self.queues, put.tier)
            writing = None if queue is None else self._begin_write(entry, queue)
            life.release(put.residence)
        return Committed(far is None, writing)

    def abort(self, put: ChunkPut) -> None:
        """Free the room of a put that is not committed."""
        with self._lock:
            self._puts.discard(put)
            life.condemn(put.residence)
            life.release(put.residence)

    # Forgetting

    def _forget(self, entry: ChunkEntry) -> None:
        life.forget(entry)
        self._index.remove(entry)

    def widen(self, scope: Scope) -> Scope:
        """Return the scope with the chunks that were prefilled after one of its chunks."""
        with self._lock:
            stored = self._index.find_prepared_after(scope.namespace, scope.keys or ())
            return scope.with_keys(stored | scope.find_prepared(put.entry.manifest for put in self._puts))

    def remove(self, scope: Scope) -> Removed:
        """Forget chunks, a few per hold of the lock. Running puts of them end without effect. Durable when
        `flush` is done."""
        removed = Removed()
        with self._lock:
            for put in self._puts:
                put.is_erased = put.is_erased or (scope.covers(put.entry.address) and scope.takes(put.entry))
            if scope.keys is None:
                addresses = self._index.addresses_within(scope.namespace)
            else:
                addresses = [(scope.namespace, key) for key in scope.keys]
            if not scope.is_erasure:  # erasures are recorded with their time
                self._deletions.note([scope.namespace] if scope.keys is None else addresses, scope.within)
        for start in range(0, len(addresses), CLEAR_BATCH):
            with self._lock:
                batch = self._find_all(addresses[start : start + CLEAR_BATCH])
                for entry in filter(scope.takes, batch):
                    removed.count(entry)
                    self._forget(entry)
        return removed

    def is_in_hand(self, scope: Scope) -> bool:
        """Return whether any call or thread still uses the bytes of removed chunks."""
        with self._lock:
            return is_in_hand(scope, self._tiers, self._puts, self._demoting)

    def take_leftovers(self, start: int, stop: int) -> list[tuple[int, int]]:
        """As `ExtentAllocator.take_leftovers`, of RAM."""
        with self._lock:
            return self._ram.allocator.take_leftovers(start, stop)

    def return_wiped(self, start: int, size: int) -> None:
        """As `ExtentAllocator.return_wiped`, of RAM."""
        with self._lock:
            self._ram.allocator.return_wiped(start, size)
            self._changed.notify_all()

    def expire(self) -> None:
        """End expired leases and forget expired chunks."""
        with self._lock:
            for lease_id in self._leases.due():
                self.unpin(lease_id)
        now_s = self._wall_clock()
        due = [entry.address for entry in self.entries() if entry.expires_at_s <= now_s]  # without the lock
        with self._lock:
            self._find_all(due)

    def quarantine_copies(
        self, entry: ChunkEntry, verified: Sequence[Residence], damaged: Sequence[Residence]
    ) -> None:
        """Drop damaged copies. The chunk stays only if another verified copy is whole and the chunk is not
        being written or copied. A chunk that is left in RAM alone is written to disk again."""
        with self._lock:
            at_rest = entry.writing is None and all(residence in verified for residence in entry.copies)
            if entry.gone or not at_rest or all(residence in damaged for residence in entry.copies):
                self._quarantine(entry)
                return
            self.counters.quarantined += 1
            log.error("quarantined a copy of chunk %s of %s", entry.manifest.key, entry.manifest.namespace)
            for residence in entry.copies:
                if residence in damaged:
                    life.drop_copy(entry, residence)
                    if entry.disk is None and self.shares.may_be_on_ssd(entry.manifest):
                        self._begin_write(entry, self.queues[0])

    def _quarantine(self, entry: ChunkEntry) -> None:
        self.counters.quarantined += 1
        log.error("quarantined chunk %s of %s", entry.manifest.key, entry.manifest.namespace)
        if not entry.gone:
            self._forget(entry)

    # Write-back

    def _begin_write(self, entry: ChunkEntry, queue: WriteQueue, leaving: bool = False) -> Future[None]:
        job = life.begin_write(entry, leaving, self._clock())
        queue.add(job)
        self._changed.notify_all()
        return job.done

    def make_durable(self, address: Address) -> Future[None] | None:
        """Write a chunk to disk if only RAM has it. Returns a future that is done when the chunk is on disk;
        None if it is on disk already, or absent. Raises `InvalidField` without an SSD tier, `Unavailable` if
        only a bucket may have the chunk."""
        with self._lock:
            entry = self._index.get(address)
            if not self.queues:
                raise InvalidField("ack", NO_SSD_TIER)
            if entry is None or entry.is_durable or entry.is_loading:
                return None
            if entry.writing is None:
                self.shares.check_write(entry)
            return entry.writing or self._begin_write(entry, self.queues[0])

    def drain(self, timeout_s: float) -> int:
        """Refuse puts and write back the chunks that only RAM holds. Waits. Returns the bytes that only RAM
        still holds, because time ran out or a disk refused them."""
        with self._lock:
            self.draining = True
            for entry in self._room.unwritten():
                if life.is_in_ram_alone(entry):
                    self._begin_write(entry, self.queues[0])
            self._changed.wait_for(
                lambda: self.failure or not any(queue.queue_bytes for queue in self.queues), timeout_s
            )
            return sum(entry.manifest.chunk_bytes for entry in self._room.unwritten())

    def flush(self, *last: Callable[[], Future[None]]) -> list[Future[None]]:
        """Return futures, one per tier, that are done when every earlier put and deletion is on disk. A tier
        is flushed after the tier above it, whose writer may be moving down deleted chunks. `last`: the tiers
        below the disks."""
        return run_in_turn([*(partial(self._flush_tier, queue) for queue in self.queues), *last])

    def _flush_tier(self, queue: WriteQueue) -> Future[None]:
        with self._lock:
            self._changed.notify_all()
            return queue.add_flush()

    def next_writes(self, queue: WriteQueue) -> WriteBatch | None:
        """Wait for work and take it. Returns None when the queue is closed and empty."""
        with self._lock:
            self._changed.wait_for(lambda: queue.has_work or queue.closed)
            return queue.take_batch() if queue.has_work else None

    def close_writes(self, queue: WriteQueue) -> None:
        """Make the writer end after the pending work, deletions included."""
        with self._lock:
            queue.close()
            self._changed.notify_all()

    def abandon_writes(self, queue: WriteQueue) -> WriteBatch:
        """Take the pending work of a writer that died. It is never written."""
        with self._lock:
            return queue.abandon()

    def end_write(self, queue: WriteQueue, job: WriteJob, target: Residence | None) -> None:
        """Note that the catalog names `target`; None for a chunk that was gone before it was written."""
        with self._lock:
            queue.end(job)
            life.end_write(job, target)
            self._room.trim_ssd(job.entry.manifest.namespace)
            self._changed.notify_all()

    def fail_write(self, queue: WriteQueue, job: WriteJob) -> None:
        """Note that a chunk could not be written. It stays in RAM."""
        with self._lock:
            queue.end(job)
            life.fail_write(job)
            self._changed.notify_all()

    # Demotion

    def evict_from_disk(self, tier: LowerTier, needed_bytes: int) -> list[Eviction]:
        """Take chunks that the tier's policy gives up, for more bytes than needed. Their copies stay until
        `end_demotions`."""
        with self._lock:
            evictions = give_up(tier, needed_bytes)
            self._demoting.update(evictions)
        return evictions

    def begin_copy(self, eviction: Eviction) -> bool:
        """Hold the leaving copy until `end_copy`. Returns False for a chunk that is gone or being loaded."""
        with self._lock:
            if eviction.entry.disk is not eviction.source or eviction.entry.is_loading:
                return False
            life.acquire(eviction.source)
            return True

    def end_copy(self, eviction: Eviction, upload: Residence | None = None) -> None:
        """Release a copy that has been read. `upload`: a new copy to hold until `end_upload`."""
        with self._lock:
            life.release(eviction.source)
            if upload is not None:
                life.acquire(upload)

    def end_upload(self, entry: ChunkEntry, target: Residence, failed: bool) -> None:
        """Note that an upload to the bucket has ended. If it failed, the copy is lost."""
        with self._lock:
            if failed and life.lose_copy(entry, target):
                self._room.forget(entry)
            life.release(target)
            self._changed.notify_all()

    def end_demotions(
        self, evictions: Iterable[Eviction], placed: Mapping[Eviction, Residence] | None
    ) -> None:
        """Drop the leaving copies. `placed`: new copies in the next tier; None: it failed, so all copies
        stay."""
        with self._lock:
            self._demoting.difference_update(evictions)
            for eviction in evictions:
                if placed is None:
                    life.cancel_demotion(eviction)
                elif life.end_demotion(eviction, placed.get(eviction)):
                    self._room.forget(eviction.entry)
                elif self.draining and life.is_in_ram_alone(eviction.entry):
                    self._room.write_or_forget(eviction.entry, eviction.source.tier)

    # Reading and promotion

    def open(self, addresses: Sequence[Address], layers: range, heads: HeadRange) -> Reading:
        """Hold chunks in place until `close`, and start to load those that RAM lacks. Chunks that only the
        bucket holds are absent if RAM has no room for them. Raises `InvalidField` for a range that a chunk
        lacks."""
        with self._lock:
            entries = [self._find(address) for address in addresses]
            for entry in entries:
                if entry is not None:
                    check_range(entry.manifest, layers, heads)
            # First the chunks in RAM: loads evict, and must not evict chunks of this reading.
            held = [None if e is None or e.ram is None else life.hold(e, e.ram, heads) for e in entries]
            self._begin_loads(entry for entry in entries if entry is not None)
            for position, entry in enumerate(entries):
                if entry is not None and held[position] is None and not entry.is_far:
                    held[position] = life.hold(entry, entry.copies[0], heads)
            return Reading(held)

    def open_copies(self, address: Address) -> tuple[ChunkEntry, Reading] | None:
        """Hold every whole copy of a chunk until `close`, except in a bucket, whose copies are verified at
        every read. Returns None for an absent chunk."""
        with self._lock:
            if (entry := self._find(address)) is None:
                return None
            heads = HeadRange(0, entry.manifest.layout.num_kv_heads)
            return entry, Reading([life.hold(entry, copy, heads) for copy in entry.copies if copy.is_at_hand])

    def close(self, reading: Reading) -> None:
        """Release the chunks."""
        with self._lock:
            for chunk in reading.chunks:
                if chunk is not None:
                    life.release(chunk.residence)

    def prefetch(self, addresses: Iterable[Address]) -> int:
        """Start to load chunks into RAM. Returns how many are loaded or loading."""
        with self._lock:
            entries = self._find_all(addresses)
            self._begin_loads(entries)
            return sum(entry.ram is not None for entry in entries)

    def _begin_loads(self, entries: Iterable[ChunkEntry]) -> None:
        """Begin to load chunks that RAM lacks and has room for."""
        if self.loads.begin(entries):
            self._load_added.notify_all()

    def next_load(self, queue: LoadQueue) -> LoadStep | None:
        """Wait for work and take it. Returns None when the queue is closed and empty."""
        with self._lock:
            while (step := queue.take_step()) is None and not queue.closed:
                self._load_added.wait()
            self._load_added.notify_all()
            return step

    def close_loads(self, queue: LoadQueue) -> None:
        """Make the queue's threads end."""
        with self._lock:
            queue.closed = True
            self._load_added.notify_all()

    def advance_load(self, step: LoadStep, lost: str, is_unreachable: bool = False) -> None:
        """Note that a step has ended. `lost`: why the bytes cannot be read; with `is_unreachable`, the chunk
        stays."""
        with self._lock:
            entry = step.load.entry
            limit_s, now_s = hides_s(self.ratio, entry.recompute_ms), self._clock()
            is_newly_lost = life.advance_load(step, lost)
            self.loads.end(step)
            if is_newly_lost and is_unreachable:
                life.give_up_load(step.load)
            elif is_newly_lost:
                self._quarantine(entry)
            elif not self.draining and (
                queue := find_faster_queue(self.queues, entry, limit_s, now_s, self._demoting)
            ):
                self._begin_write(entry, queue)

    def await_layer(self, chunk: HeldChunk, layer: int, callback: Callable[[], None]) -> bool:
        """Return whether a layer is in RAM or lost. Otherwise `callback` is called once, under the lock, at
        the next progress."""
        with self._lock:
            if chunk.lost or chunk.ready(layer):
                return True
            life.await_progress(chunk.residence, callback)
            return False

    # Leases

    def pin(self, namespace: str, keys: Iterable[ChunkKey], lease_s: float) -> tuple[str, int]:
        """Keep chunks from leaving. Returns the lease's id and how many chunks it holds. Raises like
        `Leases.grant`."""
        with self._lock:
            entries = self._find_all((namespace, key) for key in keys)
            lease_id = self._leases.grant(namespace, entries, lease_s, self.shares.rules)
            for entry in entries:
                life.pin(entry)
            return lease_id, len(entries)

    def unpin(self, lease_id: str) -> int:
        """End a lease. Returns how many chunks it held."""
        with self._lock:
            entries = self._leases.end(lease_id)
            for entry in entries:
                life.unpin(entry)
            return len(entries)
