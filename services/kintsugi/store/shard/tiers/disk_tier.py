"""One SSD tier: a catalog, a slab, its free space, and the order in which chunks leave it.

A slab's bytes are reused only after the catalog forgot them: a residence that leaves waits until `bury` has
committed its deletion. So a crash at any point leaves records that name intact frames.

A catalog names a chunk by its address, and the chunk may be deleted and put again while its old copy is still
being made. So `commit` leaves out copies whose source was let go of, and a chunk is committed only after
faster tiers forgot older records of its address: a restart believes the fastest tier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kintsugi.core.errors import Corrupted
from kintsugi.core.layout import ChunkManifest
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.store.protocol.durable_files import sync_folder
from kintsugi.store.shard.entry import Address, ChunkEntry, Copying, Residence
from kintsugi.store.shard.eviction.policy import EvictionPolicy, Lru
from kintsugi.store.shard.tiers.catalog import Catalog, catalog_key, check_format
from kintsugi.store.shard.tiers.extents import ExtentAllocator, Strides
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.leftovers import windows_of
from kintsugi.store.shard.tiers.lower_tier import LowerTier, Recovered
from kintsugi.store.shard.tiers.records import entry_of_record, record_of
from kintsugi.store.shard.tiers.slab import Slab
from kintsugi.store.shard.tiers.uses import UNKNOWN, Use

log = logging.getLogger(__name__)

READ_BYTES_PER_S_ASSUMED = 1e9
"""Speed of a disk that cannot be read when it is opened."""


class DiskTier(LowerTier):
    """The table's lock guards policy and counts. The rest is thread-safe: a lock of the tier's own guards
    allocator and graveyard, and is never held during I/O."""

    def __init__(
        self,
        name: str,
        home: Home,
        capacity_bytes: int,
        policy: Callable[[int], EvictionPolicy[ChunkEntry]] = Lru[ChunkEntry],
    ) -> None:
        """Raises `VersionMismatch` for chunks of another format, and then changes nothing in the folder;
        `ResourceExhausted`, `OSError` and `lmdb.Error`."""
        check_format(home.path / "catalog")
        self.home = home
        self.slab = Slab(home.path / "slab", capacity_bytes)
        self.catalog = Catalog(home.path / "catalog")
        sync_folder(home.path)  # or a power loss takes slab and catalog, whatever was synced in them
        self.allocator = ExtentAllocator(self.slab.capacity_bytes)
        super().__init__(name, home.path, lambda: policy(self.slab.capacity_bytes))
        self.read_bytes_per_s = self._measure_read_speed()
        self._recorded: dict[Address, Residence] = {}
        """What the catalog names. A chunk may be deleted and stored again before `bury`: its new record
        must not go with the old."""
        self._unlinked: list[Residence] = []
        """The catalog still names them."""
        self._graveyard: list[Residence] = []
        """Nobody reads them any more."""
        self._catalog_lock = threading.Lock()
        """Held over each change of the catalog."""
        self._space_lock = threading.Lock()

    def _measure_read_speed(self) -> float:
        try:
            return self.slab.measure_read_bytes_per_s()
        except (OSError, Corrupted) as error:
            log.error("%s: %s; its speed is not known", self.name, error)
            return READ_BYTES_PER_S_ASSUMED

    @property
    def capacity_bytes(self) -> int:
        return self.slab.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    def allocate(self, entry: ChunkEntry) -> Residence | None:
        """Room for a chunk, or None where something must leave first."""
        strides = Strides.of(entry.manifest.frame_runs)
        with self._space_lock:
            extents = self.allocator.allocate(strides)
        return None if extents is None else Residence(self, entry.address, extents, strides)

    def unlink(self, residence: Residence) -> None:
        """Have the catalog forget a residence that no entry holds, at the next `bury`."""
        self.lingering.add(residence)
        with self._space_lock:
            self._unlinked.append(residence)

    def free(self, residence: Residence) -> None:
        """Take back a residence that nobody reads, once the catalog has forgotten it."""
        self.lingering.discard(residence)
        with self._space_lock:
            self._graveyard.append(residence)

    def return_unwritten(self, residence: Residence) -> None:
        """Give back room that no record names."""
        with self._space_lock:
            self.allocator.free(residence.extents)

    def bury(self) -> int:
        """Have the catalog forget what left, then free what nobody reads; the bytes that came back.

        Raises `lmdb.Error`; then nothing changed.
        """
        with self._space_lock:
            if not self._unlinked and not self._graveyard:
                return 0  # and wait for no commit
        with self._catalog_lock:
            return self._bury()

    def _bury(self) -> int:
        """As `bury`, for who holds the catalog's lock."""
        with self._space_lock:
            unlinked, self._unlinked = self._unlinked, []
            dead, self._graveyard = self._graveyard, []
            named = [r.address for r in unlinked if self._recorded.get(r.address) is r]
        try:
            if named:
                self.catalog.apply((), [catalog_key(address) for address in named])
        except BaseException:
            with self._space_lock:
                self._unlinked += unlinked
                self._graveyard += dead
            raise
        with self._space_lock:
            for address in named:
                del self._recorded[address]
            for residence in dead:
                self.allocator.free(residence.extents)
        return sum(residence.size_bytes for residence in dead)

    def wipe(self) -> None:
        """Leave nothing in the tier's files of chunks that are forgotten and read by nobody.

        Raises `OSError` and `lmdb.Error`; then some may still be there.
        """
        since = self.slab.syncs_failed
        wiped: list[tuple[int, int]] = []
        try:
            for start, stop in windows_of(self.capacity_bytes):
                self._wipe_window(start, stop, wiped)
            self.slab.cut_tail()
            self.slab.sync(since)
        except BaseException:
            with self._space_lock:
                for run in wiped:
                    self.allocator.note_unwiped(*run)
            raise
        with self._catalog_lock:
            self.catalog.rewrite()

    def _wipe_window(self, start: int, stop: int, wiped: list[tuple[int, int]]) -> None:
        """Zero what is free in a window, and add it to `wiped`; not synced. Raises as `wipe` does."""
        with self._catalog_lock:  # another thread's `bury` may be about to free what is to be wiped
            self._bury()
            with self._space_lock:
                runs = self.allocator.take_leftovers(start, stop)
        for index, run in enumerate(runs):
            try:
                self.slab.wipe(*run)
            except BaseException:
                with self._space_lock:
                    for left in runs[index:]:
                        self.allocator.return_unwiped(*left)
                raise
            wiped.append(run)
            with self._space_lock:
                self.allocator.return_wiped(*run)

    def commit(self, written: Sequence[tuple[Copying, Residence]]) -> None:
        """Have the catalog name chunks whose frames are on disk, without those that are not wanted any more.
        Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:
            wanted = [(one.entry, target) for one, target in written if not one.source.condemned]
            self.catalog.apply([(entry.address, record_of(entry, target)) for entry, target in wanted])
            with self._space_lock:
                self._recorded.update((entry.address, target) for entry, target in wanted)

    def extend(self, entries: Iterable[ChunkEntry]) -> None:
        """Have the catalog know how long chunks are kept. Leaves out what is gone: its address may name a
        chunk that was put since. Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:  # a chunk that is being committed is named with what it had before
            with self._space_lock:
                named = [entry for entry in entries if not entry.gone and entry.address in self._recorded]
            if named:
                self.catalog.extend((entry.address, entry.expires_at_s) for entry in named)

    def forget_older(self, written: Iterable[Copying]) -> None:
        """Have the catalog forget other copies than their own of chunks that a slower tier is about to name.
        Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:
            entries = [one.entry for one in written if not one.source.condemned]
            with self._space_lock:
                older = [e.address for e in entries if self._recorded.get(e.address) not in (None, e.disk)]
            if not older:
                return  # and wait for no commit
            self.catalog.apply((), [catalog_key(address) for address in older])
            with self._space_lock:
                for address in older:
                    del self._recorded[address]

    def write(self, residence: Residence, frames: Sequence[memoryview], first: int = 0) -> None:
        """Write padded frames from `first` on; not synced. Raises `OSError`."""
        for start, stop in runs_of(residence.offsets, residence.strides.each, first, len(frames)):
            self.slab.write(residence.offsets[start], frames[start - first : stop - first])

    def read(self, residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        """Fill padded frames from `first` on. Raises `OSError` and `Corrupted`."""
        began_s = time.perf_counter()
        try:
            for start, stop in runs_of(residence.offsets, residence.strides.each, first, len(frames)):
                self.slab.read(residence.offsets[start], frames[start - first : stop - first])
        except (OSError, Corrupted) as error:
            self.read_failure = str(error)
            raise
        self._note_read(sum(map(len, frames)), began_s)

    def recover(self, is_unwanted: Callable[[ChunkManifest], bool], uses: Mapping[bytes, Use]) -> Recovered:
        """Entries of the catalog, before anything else uses the tier. Forgets chunks that a faster tier has
        or that were erased (`is_unwanted`), damaged records, and frames beyond the end of the slab. `uses`:
        by catalog key; what was used long ago leaves first again. Raises `VersionMismatch`; then nothing
        changed."""
        kept: list[tuple[ChunkEntry, Residence]] = []
        doomed: list[bytes] = []
        damaged = 0
        for key, record in self.catalog.records():
            found = None if record is None else self._recover_entry(record, uses.get(key, UNKNOWN))
            if found is None:
                damaged += 1
                doomed.append(key)
            elif is_unwanted(found[0].manifest):
                doomed.append(key)
            else:
                kept.append(found)
        kept, overlapping = self._disjoint(kept)
        doomed += overlapping
        if doomed:
            self.catalog.apply((), doomed)
        damaged += len(overlapping)
        if damaged:
            log.error("%s: dropped %d damaged records of %d", self.name, damaged, damaged + len(kept))
        self._recorded.update((entry.address, residence) for entry, residence in kept)
        self._admit_by_use(entry for entry, _ in kept)
        return Recovered([entry for entry, _ in kept], damaged)

    def _recover_entry(self, record: pb.CatalogRecord, use: Use) -> tuple[ChunkEntry, Residence] | None:
        """None for a record whose frames cannot be where it says. Raises `VersionMismatch`."""
        found = entry_of_record(record, use, self, self.home.path)
        end = min(self.slab.intact_bytes, self.capacity_bytes)
        if found is None or max(offset + size for offset, size in found[1].extents) > end:
            return None
        return found

    def _disjoint(
        self, found: list[tuple[ChunkEntry, Residence]]
    ) -> tuple[list[tuple[ChunkEntry, Residence]], list[bytes]]:
        """Mark the frames of entries that overlap no other as used. These, and the keys of the rest."""
        runs = sorted(
            (*extent, index) for index, (_, residence) in enumerate(found) for extent in residence.extents
        )
        overlapping: set[int] = set()
        end, owner = 0, -1
        for start, size, index in runs:
            if start < end:
                overlapping |= {index, owner}
            if start + size > end:
                end, owner = start + size, index
        used = ((start, size) for start, size, index in runs if index not in overlapping)
        self.allocator = ExtentAllocator(self.slab.capacity_bytes, used, self.slab.intact_bytes)
        kept = [pair for index, pair in enumerate(found) if index not in overlapping]
        return kept, [catalog_key(found[index][0].address) for index in overlapping]

    def close(self) -> None:
        self.catalog.close()
        self.slab.close()
        self.home.close()


def runs_of(offsets: Sequence[int], strides: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """`[start, stop)` runs of frames that lie in a row, within `count` frames from `first`."""
    runs: list[tuple[int, int]] = []
    start = first
    for index in range(first + 1, first + count + 1):
        if index == first + count or offsets[index] != offsets[index - 1] + strides[index - 1]:
            runs.append((start, index))
            start = index
    return runs
