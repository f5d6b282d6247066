"""A shard: chunk KV in this process's arena, on its disks, and in a bucket if it has one. Thread-safe.

It validates calls and owns the tiers' files and the threads that do their I/O. `EntryTable` decides about
chunks.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import blake3
import lmdb

from kintsugi.core.errors import DeadlineExceeded, InvalidField, Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.namespaces import EVERY_NAMESPACE, NamespaceRules, matches
from kintsugi.core.spaces import ChunkKey, check_namespace
from kintsugi.store.protocol.interface import Anchored, Erasure, ErasureRange
from kintsugi.store.protocol.save_times import CLOCKS_DIFFER_S
from kintsugi.store.shard.entry import Address, ChunkEntry, CopyTier
from kintsugi.store.shard.erasure import Erasures, Holders, Removed, Scope, Shared, scopes_of
from kintsugi.store.shard.heat import Heat
from kintsugi.store.shard.reading import Reading
from kintsugi.store.shard.reports import Reports
from kintsugi.store.shard.table import EntryTable
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.extents import windows_of
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.lower_tier import LowerTier
from kintsugi.store.shard.tiers.object_tier import ObjectTier
from kintsugi.store.shard.tiers.ram_tier import (
    ChunkPut,
    Committed,
    PutOptions,
    RamTier,
    check_ttl,
    erased_meanwhile,
)
from kintsugi.store.shard.workers.bucket_writer import BucketWriter
from kintsugi.store.shard.workers.promotion import FAR_READERS, Promoter
from kintsugi.store.shard.workers.writeback import Below, TierWriter, WriteBack

log = logging.getLogger(__name__)

ERASE_S_MAX = 300.0
"""How long an erasure waits for readers and writers of its chunks."""
ERASE_GRACE_S = 2.0
"""How long an erasure waits for clients' reads and puts of its chunks before it cuts them: longer than a
client needs to read its chunks."""
CUT_PERIOD_S = 1.0
"""Interval at which an erasure cuts the calls that it waits for."""
FREE_POLL_S, FREE_POLL_S_MAX, FREE_POLL_GROWTH = 0.002, 0.1, 1.25
"""Shortest and longest time between two checks whether chunks are still in use, and its growth factor."""

T = TypeVar("T")
Steps = Generator[float, None, T]
"""Work in steps. Each step yields the time in seconds before the next one. No step waits for a client, so the
work of many clients can share a few threads."""


class Shard:
    """The chunk KV of one process. The owner must call `close`."""

    def __init__(
        self,
        ram: RamTier,
        disks: Sequence[DiskTier] = (),
        shard_id: str | None = None,
        home: Home | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        bucket: ObjectTier | None = None,
    ) -> None:
        """`bucket`: the object tier, below the SSD tiers. The shard closes all tiers that it is given."""
        self.shard_id = shard_id or str(uuid.uuid4())
        self.ram = ram
        self.disks = disks
        self.bucket = bucket
        far = () if bucket is None else (bucket,)
        self.table = EntryTable(ram, disks, wall_clock, clock, far)
        self.heat = Heat(clock)
        self.reports = Reports(None if home is None else home.path / "reports")
        self.erasures = Erasures(None if home is None else home.path / "erasures")
        self._wall_clock = wall_clock
        self.holders = Holders()
        self._wiper = Shared()
        self._home = home
        self._writers: list[WriteBack] = []
        self.bucket_writer = None if bucket is None else BucketWriter(self.table, bucket, wall_clock)
        below: Below | None = self.bucket_writer
        for rank, queue in reversed([*enumerate(self.table.queues)]):
            below = TierWriter(self.table, queue.tier, below, disks[:rank])
            self._writers.insert(0, WriteBack(self.table, queue, below, ram.arena))
        self._promoter = Promoter(self.table, self.table.loads.near, ram.arena)
        self.far_promoter = Promoter(self.table, self.table.loads.far, ram.arena, FAR_READERS, "fetch")
        try:
            for tier in (*disks, *far):
                self._recover(tier)
            self.erasures.record((), tiers=self._tier_names)
        except BaseException:
            self.reports.close()  # LMDB opens a folder once in a process
            self.erasures.close()
            raise
        for writer in self._writers:
            writer.start()
        self._promoter.start()
        if self.bucket_writer is not None:
            self.bucket_writer.start()
            self.far_promoter.start()

    def _recover(self, tier: DiskTier | ObjectTier) -> None:
        """Add the chunks of a tier's catalog, except those that a faster tier has and those that were erased
        while the shard ran without this tier. Raises `Unavailable`."""
        applied = self.erasures.applied_in(_name_of(tier))
        erased = 0

        def is_unwanted(manifest: ChunkManifest) -> bool:
            nonlocal erased
            if self._is_erased(manifest, applied):
                erased += 1
                return True
            return self.table.get((manifest.namespace, manifest.key)) is not None

        self.table.recover(*tier.recover(is_unwanted))
        if erased:
            log.warning("%s: dropped %d chunks erased while the shard ran without it", tier.name, erased)
        if erased and isinstance(tier, DiskTier):  # a bucket's objects go with its next sweep
            tier.wipe()

    @property
    def _tier_names(self) -> list[str]:
        """Names of the tiers that apply erasures."""
        return [_name_of(tier) for tier in self.lower_tiers]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def tiers(self) -> tuple[CopyTier, ...]:
        """All tiers, fastest first."""
        return (self.ram, *self.lower_tiers)

    @property
    def local_tiers(self) -> tuple[CopyTier, ...]:
        """RAM and SSD tiers."""
        return (self.ram, *self.disks)

    @property
    def lower_tiers(self) -> tuple[DiskTier | ObjectTier, ...]:
        """The tiers below RAM, fastest first."""
        return (*self.disks, *(() if self.bucket is None else (self.bucket,)))

    def tier_failures(self) -> dict[str, str]:
        """Return why the last write to a tier, or the last read from it, failed. Healthy tiers are left
        out."""
        failures = {tier.name: tier.failure or tier.read_failure for tier in self.lower_tiers}
        return {name: failure for name, failure in failures.items() if failure}

    def bucket_faults(self) -> dict[str, int]:
        """Count the chunks that the bucket has lost or not taken since the start: objects that it forgot
        (`missing`), wrong bytes (`damaged`), calls without an answer (`failed`), uploads that were not
        possible (`refused`)."""
        if self.bucket is None:
            return {}
        counts = self.bucket.faults + self.far_promoter.faults
        return {fault: counts[fault] for fault in ("missing", "damaged", "failed", "refused")}

    @property
    def failure(self) -> BaseException | None:
        """The error that ended one of the shard's threads. From then on, it serves nothing."""
        return self.table.failure

    def _check(self, namespace: str) -> None:
        """Raise `InvalidField` for a malformed namespace, `Unavailable` if the shard has failed."""
        check_namespace(namespace)
        self.table.check_alive()

    def _addresses(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Address]:
        """Check the namespace and return the addresses of its keys."""
        self._check(namespace)
        return [(namespace, key) for key in keys]

    # Finding

    def lookup(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkEntry | None]:
        """Return the entry of each key, None if absent. A hit counts as a use."""
        found = self.table.use(self._addresses(namespace, keys))
        for entry in filter(None, found):
            self.heat.note_use(entry)
        return found

    def peek(self, namespace: str, keys: Sequence[ChunkKey]) -> list[ChunkEntry | None]:
        """Return the entry of each key, None if the chunk is absent or cannot be read now. Counts no use."""
        found = map(self.table.get, self._addresses(namespace, keys))
        return [entry if entry is not None and entry.is_in_reach else None for entry in found]

    def lookup_anchors(self, namespace: str, space_digest: bytes, anchors: Sequence[int]) -> list[Anchored]:
        """As `ChunkStore.lookup_anchors`."""
        self._check(namespace)
        return self.table.find_anchored(namespace, space_digest, anchors)

    def page(self, namespace: str, limit: int, after: ChunkKey | None) -> list[ChunkEntry]:
        """Entries in key order."""
        self._check(namespace)
        return self.table.page(namespace, limit, after)

    # Writing

    def begin_put(
        self, manifest: ChunkManifest, options: PutOptions | None = None, wait_s: float = 0.0
    ) -> ChunkPut | None:
        """Reserve room for a chunk. Returns None if the shard already has it, or if it is another shard's
        copy of an erased chunk. End the put with `commit` or `EntryTable.abort`.

        Raises `NotFound` for a chunk that was erased after its save was requested, `ResourceExhausted` for a
        chunk that can never fit, `NoRoomYet` if `wait_s` was too short.
        """
        options = options or PutOptions()
        now_s = self._wall_clock()
        if not (manifest.asked_at_s or options.is_copy):
            manifest = replace(manifest, asked_at_s=now_s)
        manifest = replace(manifest, asked_at_s=min(manifest.asked_at_s, now_s + CLOCKS_DIFFER_S))
        if self._is_erased(manifest, options.erasures_seen):
            if options.is_copy:
                return None
            raise erased_meanwhile(manifest)
        return self.table.begin_put(manifest, options, wait_s)

    def _is_erased(self, manifest: ChunkManifest, erasures_seen: int) -> bool:
        return any(
            self.erasures.cover((manifest.namespace, key), manifest.asked_at_s, erasures_seen)
            for key in manifest.erased_by
        )

    def commit(self, put: ChunkPut) -> Committed:
        """Make the chunk visible. Raises `InvalidField` if frames are missing, `NoRoomYet` if concurrent puts
        exceed the namespace's limit of RAM, `NotFound` if the chunk was deleted or erased meanwhile."""
        if not put.complete:
            self.table.abort(put)
            raise InvalidField("frames", "end before the last layer; send every layer before the commit")
        # An erasure that is recorded later marks the put as erased.
        if self._is_erased(put.entry.manifest, put.erasures_seen):
            put.is_erased = True
        return self.table.commit(put)

    def retain(self, namespace: str, keys: Sequence[ChunkKey], ttl_s: float) -> list[bool]:
        """Keep chunks for at least `ttl_s` from now (inf: forever). Returns whether each exists. No lifetime
        gets shorter. Durable for chunks on disk. Blocks. Raises `InvalidField`, and `Unavailable` if a disk
        fails."""
        check_ttl(ttl_s)
        held = self.table.retain(self._addresses(namespace, keys), ttl_s)
        self.record_lifetimes()
        return held

    def record_lifetimes(self) -> None:
        """Write every extended lifetime to the catalogs. Raises `Unavailable`; the next call then tries
        again."""

        def record(entries: Collection[ChunkEntry]) -> None:
            for tier in self.lower_tiers:
                try:
                    tier.extend(entries)
                except lmdb.Error as error:
                    raise Unavailable(
                        f"{tier.name}: {error}; the longer lifetimes do not survive a restart: request them "
                        "again when the disk works"
                    ) from error

        self.table.unrecorded.record(record)

    def delete(self, namespace: str, keys: Sequence[ChunkKey], within: str = EVERY_NAMESPACE) -> int:
        """Delete chunks, and those prefilled after them. Returns how many were stored. Durable when
        `flush_writers` is done. `within`: the pattern of namespaces that the caller may use."""
        self._check(namespace)
        return self.table.remove(self.table.widen(Scope.of(namespace, keys, within))).chunks

    def clear(self, namespace: str, within: str = EVERY_NAMESPACE) -> int:
        """Delete a namespace's chunks. Returns how many were stored."""
        self._check(namespace)
        return self.table.remove(Scope(namespace, within=within)).chunks

    def erase(self, scope: Scope, at_s: float, timeout_s: float = ERASE_S_MAX) -> Removed:
        """Do the steps of `erasing` in this thread. Blocks while clients use the chunks."""
        return _run_through(self.erasing(scope, at_s, timeout_s))

    def erasing(self, scope: Scope, at_s: float, timeout_s: float = ERASE_S_MAX) -> Steps[Removed]:
        """Delete the chunks whose saves were requested until `at_s` (Unix seconds; 0: now), wipe their bytes,
        and record the erasure, so that later puts of such chunks are refused.

        Waits while clients use the chunks; cuts their calls after `ERASE_GRACE_S`. Raises
        `ResourceExhausted` before anything is deleted; `DeadlineExceeded` or `Unavailable` if the chunks are
        deleted but some bytes may remain.
        """
        self._check(scope.namespace)
        now_s = self._wall_clock()
        scope = replace(scope, until_s=min(at_s or now_s, now_s + CLOCKS_DIFFER_S))
        keys = (None,) if scope.keys is None else sorted(scope.keys)
        erasures = [Erasure(scope.namespace, key, scope.until_s, scope.within) for key in keys]
        scope = self.table.widen(scope)
        removed = self._remove(scope)  # first: caches that follow the record must not find the chunks
        scope = replace(scope, until_s=self.erasures.record(erasures, tiers=self._tier_names))
        yield from self._wiping(scope, removed, timeout_s)
        removed.gone_at_s = self._wall_clock()
        return removed

    def _remove(self, scope: Scope) -> Removed:
        return self.table.remove(replace(scope, latest_s=self._wall_clock() + CLOCKS_DIFFER_S))

    def _wiping(self, scope: Scope, removed: Removed, timeout_s: float = ERASE_S_MAX) -> Steps[None]:
        """Delete the chunks that a recorded erasure covers, count them in `removed`, and wipe their bytes.
        Raises like `erasing`."""
        began_s = time.monotonic()
        cut_s, waits_s = began_s + ERASE_GRACE_S, poll_waits_s()
        removed.add(self._remove(scope))
        flushes = self.flush_writers()
        while not all(flush.done() for flush in flushes) or self.table.is_in_hand(scope):
            now_s = time.monotonic()
            if now_s >= began_s + timeout_s:
                raise DeadlineExceeded(
                    f"chunks of {scope.namespace!r} were deleted but are still in use; erase them again"
                )
            if now_s >= cut_s:
                self.holders.cut(scope)
                cut_s = now_s + CUT_PERIOD_S  # a call may have begun just before its chunks were deleted
            yield next(waits_s)
        for flush in flushes:
            flush.result()
        wiping, waits_s = self._wiper.join(), poll_waits_s()
        while not self._wiper.run(wiping, self._wipe_tiers):
            yield next(waits_s)

    def apply_erasures(self, peer: str, found: ErasureRange) -> None:
        """Apply erasures that another shard has recorded and this one has missed.

        `found`: the erasures of the shard `peer` after its number `self.erasures.seen_of(peer)`. For merged
        erasures the erased chunks are unknown, so every chunk that such an erasure may cover is deleted.
        Raises like `erase`."""
        for pattern, mark in found.merged.items():
            held = {entry.manifest.namespace for entry in self.table.entries()}
            doomed = sorted(name for name in held if matches(pattern, name))
            log.warning(
                "shard %s has merged erasures that this shard missed, in %d namespaces", peer, len(doomed)
            )
            self.erasures.merge(pattern, mark.at_s)
            for name in doomed:
                _run_through(self._wiping(Scope(name, None, mark.at_s), Removed()))
        missed = [erasure for erasure in found.erasures if not self.erasures.is_known(erasure)]
        self.erasures.record(missed, learned=True, tiers=self._tier_names)
        for scope in scopes_of(missed):
            _run_through(self._wiping(self.table.widen(scope), Removed()))
        self.erasures.note_seen(peer, found.next)

    def _wipe_tiers(self) -> None:
        """Zero the free space of every tier. Raises `Unavailable`."""
        for window in windows_of(self.ram.capacity_bytes):
            for start, size in self.table.take_leftovers(*window):
                self.ram.arena.wipe(start, size)
                self.table.return_wiped(start, size)
        for tier in self.lower_tiers:
            try:
                tier.wipe()
            except (OSError, lmdb.Error) as error:
                raise Unavailable(f"{tier.name}: {error}; erase again when it works") from error

    def flush_writers(self) -> list[Future[None]]:
        """Return futures that are done when every earlier put and deletion is on disk."""
        return self.table.flush(*([] if self.bucket_writer is None else [self.bucket_writer.flush]))

    # Reading

    def open(self, namespace: str, keys: Sequence[ChunkKey], layers: range, heads: HeadRange) -> Reading:
        """Hold chunks in place and start to load those on disk into RAM. End with `EntryTable.close`. Raises
        `InvalidField` for a range that a chunk lacks."""
        return self.table.open(self._addresses(namespace, keys), layers, heads)

    def prefetch(self, namespace: str, keys: Sequence[ChunkKey]) -> int:
        """Start to load chunks into RAM. Returns how many are loaded or loading."""
        return self.table.prefetch(self._addresses(namespace, keys))

    def verify(
        self, namespace: str, keys: Sequence[ChunkKey], failed_salts: Collection[bytes] = ()
    ) -> dict[ChunkKey, bool]:
        """Read chunks from every tier that holds them, and quarantine copies with wrong digests.

        Returns whether all copies of each key are intact. Absent chunks are left out, and chunks that only a
        bucket holds: those are verified at every read. Blocks; one xxh3 pass over the bytes. Of encrypted
        chunks only the length is checked. `failed_salts`: salts of encrypted chunks that could not be
        decrypted; every copy of them is quarantined.
        """
        check_namespace(namespace)
        intact: dict[ChunkKey, bool] = {}
        for key in keys:
            opened = self.table.open_copies((namespace, key))
            if opened is None:
                continue
            entry, reading = opened
            held = [chunk for chunk in reading.chunks if chunk is not None]
            has_failed = entry.manifest.is_encrypted and entry.manifest.salt in failed_salts
            damaged = [chunk.residence for chunk in held if has_failed or not chunk.is_intact()]
            self.table.close(reading)
            if not held and not has_failed:
                continue
            intact[key] = not damaged and not has_failed
            if not intact[key]:
                self.table.quarantine_copies(entry, [chunk.residence for chunk in held], damaged)
        return intact

    # Keeping

    def pin(self, namespace: str, keys: Sequence[ChunkKey], lease_s: float) -> tuple[str, int]:
        """Keep chunks from leaving. Returns the lease's id and how many chunks it holds."""
        self._check(namespace)
        return self.table.pin(namespace, keys, lease_s)

    def set_rules(self, rules: NamespaceRules) -> None:
        """Replace the rules for namespaces. Chunks beyond a new limit leave when more are put."""
        self.table.shares.rules = rules

    def set_ratio(self, ratio: float) -> None:
        """Place later chunks for blends that compute this share of a chunk's prefill. A tier is fast enough
        for a chunk if its load takes no longer than that share. Raises `InvalidField` outside (0, 1]."""
        if not 0 < ratio <= 1:
            raise InvalidField("ratio", f"{ratio} is outside (0, 1]")
        self.table.ratio = ratio

    def drain(self, timeout_s: float) -> int:
        """Refuse puts and write back the chunks that only RAM holds. Returns the bytes not written in time.
        Raises `InvalidField` for an invalid duration."""
        if not timeout_s >= 0:
            raise InvalidField("timeout_s", f"{timeout_s} is not a duration")
        deadline_s = time.monotonic() + timeout_s
        left = self.table.drain(timeout_s)
        if self.bucket_writer is not None:
            left += self.bucket_writer.await_uploads(max(0.0, deadline_s - time.monotonic()))
        return left

    def close(self) -> None:
        """Write pending chunks, stop the threads, release memory and directories. Call it once."""
        self._promoter.close()
        if self.bucket_writer is not None:
            self.far_promoter.close()
        for writer in self._writers:
            writer.close()
        if self.bucket_writer is not None:
            self.bucket_writer.close()
        with suppress(Unavailable):
            self.record_lifetimes()
        self._wiper.close()  # before the files: a wipe must not write to reused descriptors
        for tier in self.lower_tiers:
            tier.close()
        self.reports.close()
        self.erasures.close()
        self.ram.arena.close()
        if self._home is not None:
            self._home.close()


def poll_waits_s() -> Iterator[float]:
    """Yield the times between checks. They grow slowly, so that the chunks' release is noticed soon."""
    wait_s = FREE_POLL_S
    while True:
        yield wait_s
        wait_s = min(FREE_POLL_GROWTH * wait_s, FREE_POLL_S_MAX)


def _run_through(steps: Steps[T]) -> T:
    """Do all steps in this thread, and return their result."""
    while True:
        try:
            time.sleep(next(steps))
        except StopIteration as end:
            result: T = end.value
            return result


def _name_of(tier: LowerTier) -> str:
    """A tier's name in the record of erasures: a digest of its folder, because LMDB's keys have at most 511
    bytes."""
    return f"tier {blake3.blake3(os.fsencode(tier.folder.resolve())).hexdigest()}"
