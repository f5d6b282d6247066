"""The object tier: chunks that full SSD tiers gave up, in a bucket. A catalog on disk says which.

What the bucket is trusted with: nothing. It is a place for chunks that would be lost otherwise, and each of
its failures costs chunks, never answers:

* It forgets: the read finds no object; the chunk is dropped and computed again.
* It lies: bytes that do not match the manifest's digests are dropped, and the chunk with them
  (`workers.promotion` verifies; of encrypted chunks, whoever decrypts them).
* It hangs or refuses: each call has a deadline. After some failures in a row no calls are made, lookups do
  not find what only the bucket holds, and what leaves the SSD tiers is lost, until a probe passes.

A chunk is one object: its frames in a row, each padded as in RAM. From its demotion to the end of its upload
its bytes are in memory, of which all uploads together take at most `staging_bytes`; a chunk that finds no
room there is lost instead. A chunk whose upload fails is lost, too. The catalog names a chunk once its object
is stored, and a restart believes the catalog. An object that the catalog does not name is deleted when the
next sweep lists it: what a crash, a late upload or an unanswered deletion left behind.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.core.layout import ChunkManifest
from kintsugi.store.protocol.durable_files import make_folder, sync_folder
from kintsugi.store.shard.entry import Address, ChunkEntry, Residence
from kintsugi.store.shard.eviction.policy import EvictionPolicy, Lru
from kintsugi.store.shard.tiers.bucket import (
    DELETED_AT_ONCE,
    PROBE_NAME,
    BucketError,
    BucketLeftAlone,
    S3Bucket,
    VersionsKept,
    object_name,
)
from kintsugi.store.shard.tiers.catalog import Catalog, catalog_key, check_format
from kintsugi.store.shard.tiers.extents import Extent, Strides
from kintsugi.store.shard.tiers.lower_tier import LowerTier, Recovered
from kintsugi.store.shard.tiers.records import entry_of_record, record_of
from kintsugi.store.shard.tiers.uses import UNKNOWN, Use

log = logging.getLogger(__name__)

TIER_NAME = "bucket"
READ_BYTES_PER_S_ASSUMED = 100e6
"""Speed of a bucket that cannot be read when it is opened."""
DEAD_MAX = 100_000
"""Most objects that wait to be deleted by name; more are left to the next sweep."""
WIPE_ROUNDS_MAX = 5
"""Listings of an erasure, until one has nothing to delete."""
STRANGERS_MAX = 1_000_000
"""Most objects beside the tier's own that a listing may have: it may never end."""


@dataclass(eq=False)
class ChunkUpload:
    """A chunk on its way into the bucket, and its bytes until they are there."""

    entry: ChunkEntry
    target: Residence
    name: str
    body: memoryview


class ObjectTier(LowerTier):
    """The table's lock guards policy and counts. The rest is thread-safe: a lock of the tier's own guards
    what is in memory, and is never held during I/O."""

    is_remote = True

    def __init__(
        self,
        bucket: S3Bucket,
        folder: Path,
        capacity_bytes: int,
        staging_bytes: int,
        policy: Callable[[int], EvictionPolicy[ChunkEntry]] = Lru[ChunkEntry],
    ) -> None:
        """`folder`: of the catalog, for this bucket alone. Raises `VersionMismatch`, `OSError`, `lmdb.Error`,
        and `InvalidField` for a bucket that keeps versions. A bucket that does not answer raises nothing."""
        make_folder(folder)
        check_format(folder / "catalog")
        super().__init__(TIER_NAME, folder, lambda: policy(capacity_bytes))
        self.bucket = bucket
        self.staged_bytes = 0
        """Memory that uploads take."""
        self.faults: Counter[str] = Counter()
        """Chunks lost, or not taken, by why: `missing`, `damaged`, `failed`, `refused`."""
        self._capacity_bytes = capacity_bytes
        self._staging_bytes = staging_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._names: dict[Residence, str] = {}
        self._uses_of_name: Counter[str] = Counter()
        """Residences by object: a chunk that is put again while it is read has two of one object."""
        self._staged: dict[Residence, memoryview] = {}
        self._recorded: dict[Address, Residence] = {}
        """What the catalog names."""
        self._unlinked: list[Residence] = []
        """The catalog still names them."""
        self._dead: dict[str, None] = {}
        """Objects that are to be deleted, the oldest first."""
        self._deleting: frozenset[str] = frozenset()
        self.needs_sweep = True
        """Whether the bucket may hold objects that nobody knows of."""
        self._catalog_lock = threading.Lock()
        """Held over each change of the catalog."""
        self._delete_lock = threading.Lock()
        """Held over deletions in the bucket."""
        self.check_bucket()  # before the catalog is opened, which LMDB does once in a process
        self.catalog = Catalog(folder / "catalog")
        sync_folder(folder)

    def check_bucket(self) -> None:
        """Measure the bucket by writing and reading an object. One that fails counts as failing. Raises
        `InvalidField` for one that keeps versions."""
        try:
            rate = self.bucket.probe()
        except BucketLeftAlone:
            return
        except VersionsKept as error:
            self.give_up(str(error))
            raise InvalidField("bucket", str(error)) from None
        except (OSError, Corrupted) as error:
            self.give_up(str(error))
        else:
            if self.failure:
                log.info("%s: %s answers again", self.name, self.bucket.url)
            self.failure = self.read_failure = ""
            self.read_bytes_per_s = rate

    def give_up(self, why: str) -> None:
        """Leave the bucket alone until a probe passes."""
        if self.failure != why:
            log.error("%s: %s; chunks that leave the SSD tiers are lost until it answers", self.name, why)
        self.failure = why
        self.read_bytes_per_s = self.read_bytes_per_s or READ_BYTES_PER_S_ASSUMED
        self.bucket.leave_alone()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def is_in_reach(self) -> bool:
        return self.bucket.is_in_reach

    def keeps(self, residence: Residence) -> bool:
        """As `CopyTier.keeps`: while the bucket answers, once the upload has ended."""
        return self.is_in_reach and self.holds(residence)

    def holds(self, residence: Residence) -> bool:
        """As `CopyTier.holds`: once the upload has ended."""
        return residence not in self._staged

    # Uploads

    def reserve(self, entry: ChunkEntry) -> ChunkUpload | None:
        """Room for a chunk in the bucket, and memory for its bytes until it is there. None where either
        lacks; the next upload may find it."""
        strides = Strides.of(entry.manifest.frame_runs)
        size, name = strides.size_bytes, object_name(entry.manifest)
        with self._lock:
            is_full = self._used_bytes + size > self._capacity_bytes
            if is_full or self.staged_bytes + size > self._staging_bytes or name in self._deleting:
                return None
            target = Residence(self, entry.address, (Extent(0, size),), strides)
            upload = ChunkUpload(entry, target, name, memoryview(mmap.mmap(-1, size)))
            self._used_bytes += size
            self.staged_bytes += size
            self._names[target] = name
            self._uses_of_name[name] += 1
            self._staged[target] = upload.body
            self._dead.pop(name, None)
        return upload

    def is_full_for(self, entry: ChunkEntry) -> bool:
        """Whether chunks have to leave the bucket before this one fits."""
        size = Strides.of(entry.manifest.frame_runs).size_bytes
        return self._used_bytes + size > self._capacity_bytes

    def send(self, upload: ChunkUpload) -> None:
        """Store the object, then have the catalog name the chunk, unless it is not wanted any more. Raises
        `BucketError`, `lmdb.Error`; then it is not named."""
        self.bucket.put(upload.name, upload.body)
        with self._catalog_lock:
            if upload.target.condemned:
                return
            self.catalog.apply([(upload.entry.address, record_of(upload.entry, upload.target))])
            with self._lock:
                self._recorded[upload.entry.address] = upload.target
        self.failure = ""

    def end_upload(self, upload: ChunkUpload) -> None:
        """Give back the memory of an upload, however it ended."""
        with self._lock:
            self._staged.pop(upload.target, None)
            self.staged_bytes -= len(upload.body)

    def give_back(self, upload: ChunkUpload) -> None:
        """Undo a `reserve` whose residence nobody was given."""
        self.end_upload(upload)
        self._release(upload.target)

    # Chunks

    def read(self, residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        """As `LowerTier.read`: from memory while the upload is under way. Raises `BucketError`, and
        `Corrupted` where the object is gone or cut."""
        start = residence.offsets[first]
        with self._lock:
            body, name = self._staged.get(residence), self._names[residence]
        if body is not None:
            for frame in frames:
                frame[:] = body[start : start + len(frame)]
                start += len(frame)
            return
        began_s = time.perf_counter()
        try:
            self.bucket.read_into(name, start, frames)
        except BucketError as error:
            self.read_failure = str(error)
            raise
        self._note_read(sum(map(len, frames)), began_s)

    def unlink(self, residence: Residence) -> None:
        """Have the catalog forget a residence that no entry holds, at the next `bury`."""
        self.lingering.add(residence)
        with self._lock:
            self._unlinked.append(residence)

    def free(self, residence: Residence) -> None:
        """Have the object of a residence deleted that nobody reads or uploads."""
        self.lingering.discard(residence)
        self._release(residence)

    def _release(self, residence: Residence) -> None:
        with self._lock:
            self._staged.pop(residence, None)
            self._used_bytes -= residence.size_bytes
            name = self._names.pop(residence)
            self._uses_of_name[name] -= 1
            if not self._uses_of_name[name]:
                del self._uses_of_name[name]
                self._add_dead([name])

    def extend(self, entries: Iterable[ChunkEntry]) -> None:
        """As `DiskTier.extend`. Raises `lmdb.Error`."""
        with self._catalog_lock:
            with self._lock:
                named = [entry for entry in entries if not entry.gone and entry.address in self._recorded]
            if named:
                self.catalog.extend((entry.address, entry.expires_at_s) for entry in named)

    def bury(self) -> None:
        """Have the catalog forget what left. Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:
            with self._lock:
                unlinked, self._unlinked = self._unlinked, []
                named = [r.address for r in unlinked if self._recorded.get(r.address) is r]
            if not named:
                return
            try:
                self.catalog.apply((), [catalog_key(address) for address in named])
            except BaseException:
                with self._lock:
                    self._unlinked += unlinked
                raise
            with self._lock:
                for address in named:
                    del self._recorded[address]

    # Deletions

    def _add_dead(self, names: Iterable[str]) -> None:
        """Have objects deleted. Under the lock."""
        for name in names:
            if len(self._dead) < DEAD_MAX:
                self._dead[name] = None
            else:
                self.needs_sweep = True

    def delete_dead(self) -> None:
        """Delete the objects of chunks that left. Raises `BucketError`; the next call tries again."""
        with self._delete_lock:
            self._delete_dead()

    def _delete_dead(self) -> None:
        while True:
            with self._lock:
                batch = [name for name, _ in zip(self._dead, range(DELETED_AT_ONCE), strict=False)]
                for name in batch:
                    del self._dead[name]
                self._deleting = frozenset(batch)
            if not batch:
                return
            try:
                self.bucket.delete(batch)
            except BaseException:
                with self._lock:
                    self._add_dead(batch)
                raise
            finally:
                with self._lock:
                    self._deleting = frozenset()

    def sweep(self) -> None:
        """Delete the objects that nobody knows of. Raises `BucketError`."""
        with self._delete_lock:
            self._delete_strangers()

    def _delete_strangers(self) -> int:
        """List the bucket, and delete what is there without a chunk; how many. Raises `BucketError`."""
        self.needs_sweep = False
        strangers = listed = 0
        try:
            with self._lock:
                listed_max = STRANGERS_MAX + len(self._uses_of_name)
            for name in self.bucket.list_names():
                listed += 1
                if listed > listed_max:
                    raise BucketError(f"{self.bucket.url} lists more objects than can be there")
                with self._lock:
                    if name == PROBE_NAME or name in self._uses_of_name:
                        continue
                    strangers += 1
                    self._add_dead([name])
                    is_full = len(self._dead) >= DEAD_MAX
                if is_full:
                    self._delete_dead()
            self._delete_dead()
        except BaseException:
            self.needs_sweep = True
            raise
        return strangers

    def wipe(self) -> None:
        """Leave nothing in bucket and catalog of chunks that are forgotten and read by nobody. Raises
        `BucketError` and `lmdb.Error`; then some may still be there."""
        self.bury()
        with self._delete_lock:
            self.bucket.check_versions()  # they may have been turned on while the shard ran
            for _ in range(WIPE_ROUNDS_MAX):  # chunks may leave meanwhile, and late uploads arrive
                if not self._delete_strangers():
                    break
            else:
                raise BucketError(f"{self.bucket.url} still lists objects that it has deleted")
        with self._catalog_lock:
            self.catalog.rewrite()

    # Restarts

    def recover(self, is_unwanted: Callable[[ChunkManifest], bool], uses: Mapping[bytes, Use]) -> Recovered:
        """As `DiskTier.recover`. The bucket is not asked: what it has forgotten is found when it is read."""
        kept: list[ChunkEntry] = []
        doomed: list[bytes] = []
        damaged = 0
        for key, record in self.catalog.records():
            found = record and entry_of_record(record, uses.get(key, UNKNOWN), self, self.folder)
            if found is None or found[1].extents != (Extent(0, found[1].size_bytes),):
                damaged += 1
                doomed.append(key)
            elif is_unwanted(found[0].manifest):
                doomed.append(key)
            else:
                entry, residence = found
                name = object_name(entry.manifest)
                self._names[residence] = name
                self._uses_of_name[name] += 1
                self._recorded[entry.address] = residence
                self._used_bytes += residence.size_bytes
                kept.append(entry)
        if doomed:
            self.catalog.apply((), doomed)
        if damaged:
            log.error("%s: dropped %d damaged records of %d", self.name, damaged, damaged + len(kept))
        self._admit_by_use(kept)
        return Recovered(kept, damaged)

    def close(self) -> None:
        self.catalog.close()
