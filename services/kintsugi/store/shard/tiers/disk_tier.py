"""One SSD tier: a catalog, a slab, its free space, and the order in which chunks leave it.

The bytes of a slab are reused only after the catalog has forgotten them: a dropped residence waits until
`bury` has committed its deletion. So after a crash, records name intact frames.

A catalog names a chunk by its address, and the chunk may be deleted and put again while its old copy is still
being written. So `commit` leaves out copies whose source was dropped, and a chunk is committed only after
faster tiers have forgotten older records of its address: a restart believes the fastest tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from kintsugi.core.errors import Corrupted
from kintsugi.store.shard.entry import ChunkEntry, Copying, MakePolicy, Residence
from kintsugi.store.shard.eviction.policy import Lru
from kintsugi.store.shard.tiers.extents import ExtentAllocator, Strides, windows_of
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.lower_tier import LowerTier
from kintsugi.store.shard.tiers.slab import Slab

log = logging.getLogger(__name__)

READ_BYTES_PER_S_ASSUMED = 1e9
"""Speed assumed for a disk that cannot be measured when it is opened."""


class DiskTier(LowerTier):
    """A catalog, a slab, its free space, and the order in which chunks leave it. Thread-safe."""

    def __init__(
        self, name: str, home: Home, capacity_bytes: int, policy: MakePolicy = Lru[ChunkEntry]
    ) -> None:
        """Raises `VersionMismatch` for chunks of another format, and then changes nothing in the folder;
        `ResourceExhausted`, `OSError` and `lmdb.Error`."""
        super().__init__(name, home.path, capacity_bytes, policy)
        self.home = home
        self.slab = Slab(home.path / "slab", capacity_bytes)
        self._open_catalog()
        self.allocator = ExtentAllocator(self.slab.capacity_bytes)
        self.read_bytes_per_s = self._measure_read_speed()
        self._graveyard: list[Residence] = []
        """Residences that have no readers left, to be freed once the catalog has forgotten them."""

    def _measure_read_speed(self) -> float:
        try:
            return self.slab.measure_read_bytes_per_s()
        except (OSError, Corrupted) as error:
            log.error("%s: %s; its read speed is unknown", self.name, error)
            return READ_BYTES_PER_S_ASSUMED

    @property
    def capacity_bytes(self) -> int:
        return self.slab.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    def allocate(self, entry: ChunkEntry) -> Residence | None:
        """Allocate room for a chunk; None if other chunks must leave first."""
        strides = Strides.of(entry.manifest.frame_runs)
        with self._lock:
            extents = self.allocator.allocate(strides)
        return None if extents is None else Residence(self, entry.address, extents, strides)

    def free(self, residence: Residence) -> None:
        """Free a residence without readers when the catalog has forgotten it."""
        self.lingering.discard(residence)
        with self._lock:
            self._graveyard.append(residence)

    def return_unwritten(self, residence: Residence) -> None:
        """Free room that no record names."""
        with self._lock:
            self.allocator.free(residence.extents)

    def bury(self) -> int:
        """Have the catalog forget the copies that left, then free those without readers. Returns the freed
        bytes. Raises `lmdb.Error`; then nothing changed."""
        with self._lock:
            if not self._unlinked and not self._graveyard:
                return 0  # without waiting for another commit
        with self._catalog_lock:
            return self._bury()

    def _bury(self) -> int:
        """As `bury`. The caller holds the catalog's lock."""
        with self._lock:
            dead, self._graveyard = self._graveyard, []
        try:
            self._forget_unlinked()
        except BaseException:
            with self._lock:
                self._graveyard += dead
            raise
        with self._lock:
            for residence in dead:
                self.allocator.free(residence.extents)
        return sum(residence.size_bytes for residence in dead)

    def wipe(self) -> None:
        """Wipe forgotten chunks without readers from the tier's files. Raises `OSError` and `lmdb.Error`;
        then some bytes may remain."""
        since = self.slab.syncs_failed
        wiped: list[tuple[int, int]] = []
        try:
            for start, stop in windows_of(self.capacity_bytes):
                self._wipe_window(start, stop, wiped)
            self.slab.cut_tail()
            self.slab.sync(since)
        except BaseException:
            with self._lock:
                for run in wiped:
                    self.allocator.note_unwiped(*run)
            raise
        with self._catalog_lock:
            self.catalog.rewrite()

    def _wipe_window(self, start: int, stop: int, wiped: list[tuple[int, int]]) -> None:
        """Zero the free runs of a window and add them to `wiped`; not synced. Raises like `wipe`."""
        with self._catalog_lock:  # another thread's `bury` may be freeing space of this window
            self._bury()
            with self._lock:
                runs = self.allocator.take_leftovers(start, stop)
        for index, run in enumerate(runs):
            try:
                self.slab.wipe(*run)
            except BaseException:
                with self._lock:
                    for left in runs[index:]:
                        self.allocator.return_unwiped(*left)
                raise
            wiped.append(run)
            with self._lock:
                self.allocator.return_wiped(*run)

    def commit(self, written: Sequence[tuple[Copying, Residence]]) -> None:
        """Have the catalog name chunks whose frames are on disk. Copies whose source was dropped meanwhile
        are left out. Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:
            self._record([(one.entry, target) for one, target in written if not one.source.condemned])

    def forget_older(self, written: Iterable[Copying]) -> None:
        """Have the catalog forget older copies of chunks that a slower tier is about to name. Raises
        `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:
            entries = [one.entry for one in written if not one.source.condemned]
            with self._lock:
                older = [e.address for e in entries if self._recorded.get(e.address) not in (None, e.disk)]
            self._forget_records(older)

    def write(self, residence: Residence, frames: Sequence[memoryview], first: int = 0) -> None:
        """Write padded frames from index `first` on; not synced. Raises `OSError`."""
        for start, stop in runs_of(residence.offsets, residence.strides.each, first, len(frames)):
            self.slab.write(residence.offsets[start], frames[start - first : stop - first])

    def read(self, residence: Residence, first: int, frames: Sequence[memoryview]) -> None:
        """Fill padded frames from index `first` on. Raises `OSError` and `Corrupted`."""
        began_s = time.perf_counter()
        try:
            for start, stop in runs_of(residence.offsets, residence.strides.each, first, len(frames)):
                self.slab.read(residence.offsets[start], frames[start - first : stop - first])
        except (OSError, Corrupted) as error:
            self.read_failure = str(error)
            raise
        self._note_read(sum(map(len, frames)), began_s)

    def _can_hold(self, residence: Residence) -> bool:
        end = min(self.slab.intact_bytes, self.capacity_bytes)
        return all(offset + size <= end for offset, size in residence.extents)

    def _occupy(self, entries: Sequence[ChunkEntry]) -> set[ChunkEntry]:
        runs = sorted(
            (*extent, index)
            for index, entry in enumerate(entries)
            for copy in entry.copies
            for extent in copy.extents
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
        return {entries[index] for index in overlapping}

    def close(self) -> None:
        self.catalog.close()
        self.slab.close()
        self.home.close()


def runs_of(offsets: Sequence[int], strides: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """Return the `[start, stop)` runs of adjacent frames among `count` frames from `first` on."""
    runs: list[tuple[int, int]] = []
    start = first
    for index in range(first + 1, first + count + 1):
        if index == first + count or offsets[index] != offsets[index - 1] + strides[index - 1]:
            runs.append((start, index))
            start = index
    return runs
