"""The object tier: chunks that full SSD tiers gave up, in a bucket. A catalog on disk names them.

The bucket is not trusted. It takes chunks that would be lost otherwise, and its failures cost chunks, never
answers:

* It forgets: a read finds no object; the chunk is dropped and computed again.
* It lies: a chunk whose bytes do not match the manifest's digests is dropped (`workers.promotion` verifies;
  encrypted chunks are verified where they are decrypted).
* It hangs or refuses: each call has a deadline. After some failures in a row, no calls are made, lookups do
  not find chunks that only the bucket holds, and chunks that leave the SSD tiers are lost, until a probe
  passes.

A chunk is one object: its frames in order, each padded as in RAM. From its demotion to the end of its upload,
its bytes are in memory; all uploads together take at most `staging_bytes`. A chunk that finds no room there
is lost, and so is a chunk whose upload fails. The catalog names a chunk when its object is stored, and a
restart relies on the catalog. A sweep deletes the objects that the catalog does not name: the remains of
crashes, late uploads and unanswered deletions.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kintsugi.core.errors import Corrupted, InvalidField
from kintsugi.store.protocol.files import make_folder
from kintsugi.store.shard.entry import ChunkEntry, MakePolicy, Residence
from kintsugi.store.shard.eviction.policy import Lru
from kintsugi.store.shard.tiers.bucket import (
    DELETED_AT_ONCE,
    PROBE_NAME,
    BucketError,
    BucketLeftAlone,
    S3Bucket,
    VersionsKept,
    object_name,
)
from kintsugi.store.shard.tiers.extents import Extent, Strides
from kintsugi.store.shard.tiers.lower_tier import LowerTier

log = logging.getLogger(__name__)

TIER_NAME = "bucket"
READ_BYTES_PER_S_ASSUMED = 100e6
"""Speed assumed for a bucket that cannot be measured when it is opened."""
DEAD_MAX = 100_000
"""Maximum number of objects that wait to be deleted by name. The next sweep deletes the rest."""
WIPE_ROUNDS_MAX = 5
"""Maximum number of listings in an erasure, which repeats them until there is nothing to delete."""
STRANGERS_MAX = 1_000_000
"""Maximum number of unknown objects in a listing, because a listing may never end."""


@dataclass(eq=False)
class ChunkUpload:
    """A chunk that is being uploaded, and its bytes."""

    entry: ChunkEntry
    target: Residence
    name: str
    body: memoryview


class ObjectTier(LowerTier):
    """The chunks of one shard in a bucket. Thread-safe."""

    is_remote = True

    def __init__(
        self,
        bucket: S3Bucket,
        folder: Path,
        capacity_bytes: int,
        staging_bytes: int,
        policy: MakePolicy = Lru[ChunkEntry],
    ) -> None:
        """`folder` contains the catalog of this bucket alone. Raises `VersionMismatch`, `OSError`,
        `lmdb.Error`, and `InvalidField` for a bucket that keeps versions. A bucket that does not answer
        raises nothing."""
        make_folder(folder)
        super().__init__(TIER_NAME, folder, capacity_bytes, policy)
        self.bucket = bucket
        self.staged_bytes = 0
        """Memory that uploads take."""
        self.faults: Counter[str] = Counter()
        """Number of chunks that were lost or refused, by reason: `missing`, `damaged`, `failed`,
        `refused`."""
        self._capacity_bytes = capacity_bytes
        self._staging_bytes = staging_bytes
        self._used_bytes = 0
        self._names: dict[Residence, str] = {}
        self._uses_of_name: Counter[str] = Counter()
        """Number of residences per object. A chunk that is put again while its object is read has two."""
        self._staged: dict[Residence, memoryview] = {}
        self._dead: dict[str, None] = {}
        """Objects to delete, the oldest first."""
        self._deleting: frozenset[str] = frozenset()
        self.needs_sweep = True
        """Whether the bucket may hold objects that the catalog does not name."""
        self._delete_lock = threading.Lock()
        """Held over deletions in the bucket."""
        self.check_bucket()  # before the catalog is opened: LMDB opens a folder once in a process
        self._open_catalog()

    def check_bucket(self) -> None:
        """Measure the bucket by writing and reading an object. If that fails, the tier counts as failing.
        Raises `InvalidField` if the bucket keeps versions."""
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
        """Make no calls to the bucket until a probe passes."""
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
        """As `CopyTier.keeps`: true if the bucket answers and the upload has ended."""
        return self.is_in_reach and self.holds(residence)

    def holds(self, residence: Residence) -> bool:
        """As `CopyTier.holds`: true if the upload has ended."""
        return residence not in self._staged

    # Uploads

    def reserve(self, entry: ChunkEntry) -> ChunkUpload | None:
        """Reserve room in the bucket for a chunk, and memory for its bytes during the upload. None if there
        is not enough of either now."""
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
        """Return whether chunks have to leave the bucket before this one fits."""
        size = Strides.of(entry.manifest.frame_runs).size_bytes
        return self._used_bytes + size > self._capacity_bytes

    def send(self, upload: ChunkUpload) -> None:
        """Store the object, then have the catalog name the chunk, unless it was dropped meanwhile. Raises
        `BucketError`, `lmdb.Error`; then it is not named."""
        self.bucket.put(upload.name, upload.body)
        with self._catalog_lock:
            if upload.target.condemned:
                return
            self._record([(upload.entry, upload.target)])
        self.failure = ""

    def end_upload(self, upload: ChunkUpload) -> None:
        """Free the memory of an upload that has succeeded or failed."""
        with self._lock:
            self._staged.pop(upload.target, None)
            self.staged_bytes -= len(upload.body)

    def give_back(self, upload: ChunkUpload) -> None:
        """Undo a `reserve` whose residence is not used."""
        self.end_upload(upload)
        self._release(upload.target)

    # Chunks

    def read(self, residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        """As `LowerTier.read`; from memory during the upload. Raises `BucketError`, and `Corrupted` if the
        object is gone or cut."""
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

    def free(self, residence: Residence) -> None:
        """Queue the object of a residence without readers for deletion."""
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

    def bury(self) -> None:
        """Delete the records of dropped chunks from the catalog. Raises `lmdb.Error`; then nothing
        changed."""
        with self._catalog_lock:
            self._forget_unlinked()

    # Deletions

    def _add_dead(self, names: Iterable[str]) -> None:
        """Queue objects for deletion. The caller holds the lock."""
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
        """Delete the objects that belong to no chunk. Raises `BucketError`."""
        with self._delete_lock:
            self._delete_strangers()

    def _delete_strangers(self) -> int:
        """List the bucket and delete the objects that belong to no chunk. Returns their number. Raises
        `BucketError`."""
        self.needs_sweep = False
        strangers = listed = 0
        try:
            with self._lock:
                listed_max = STRANGERS_MAX + len(self._uses_of_name)
            for name in self.bucket.list_names():
                listed += 1
                if listed > listed_max:
                    raise BucketError(f"{self.bucket.url} lists more objects than were stored")
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
        """Delete forgotten chunks without readers from bucket and catalog. Raises `BucketError` and
        `lmdb.Error`; then some may remain."""
        self.bury()
        with self._delete_lock:
            self.bucket.check_versions()  # they may have been turned on while the shard ran
            for _ in range(WIPE_ROUNDS_MAX):  # chunks may leave and late uploads arrive meanwhile
                if not self._delete_strangers():
                    break
            else:
                raise BucketError(f"{self.bucket.url} still lists deleted objects")
        with self._catalog_lock:
            self.catalog.rewrite()

    # Restarts: the bucket is not asked, so a forgotten object is found when it is read

    def _can_hold(self, residence: Residence) -> bool:
        return residence.extents == (Extent(0, residence.size_bytes),)

    def _occupy(self, entries: Sequence[ChunkEntry]) -> tuple[()]:
        for entry in entries:
            name = object_name(entry.manifest)
            for residence in entry.copies:
                self._names[residence] = name
                self._uses_of_name[name] += 1
                self._used_bytes += residence.size_bytes
        return ()

    def close(self) -> None:
        self.catalog.close()
