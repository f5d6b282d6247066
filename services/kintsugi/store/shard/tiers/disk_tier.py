"""One SSD tier: a catalog, a preallocated file of frames (the slab), its free space, and the order of
eviction.

Frames are written past the page cache: chunk KV is read once into an arena, and caching it again in the
kernel costs memory and CPU (0.34 CPU s/GB for values inside LMDB, 0.07 here). Offsets, sizes and memory are
whole blocks.

The bytes of a slab are reused only after the catalog has forgotten them: a dropped residence waits until
`bury` has committed its deletion. So after a crash, records name intact frames.

A catalog names a chunk by its address, and the chunk may be deleted and put again while its old copy is still
being written. So `commit` leaves out copies whose source was dropped, and a chunk is committed only after
faster tiers have forgotten older records of its address: a restart uses the fastest tier's record.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kintsugi.core.errors import Corrupted, ResourceExhausted
from kintsugi.store.protocol.files import make_private
from kintsugi.store.shard.entry import ChunkEntry, Copying, MakePolicy, Residence
from kintsugi.store.shard.eviction.policy import Lru
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, ExtentAllocator, Strides, windows_of
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.lower_tier import LowerTier

log = logging.getLogger(__name__)

PROBE_BYTES = 4 << 20
"""The size of one read of a promotion."""
_IOV_MAX = 1024
_ZERO_RANGE = 0x10
_libc = ctypes.CDLL(None, use_errno=True)


class Slab:
    """A file of `capacity_bytes`. Thread-safe: positions are explicit. Methods raise `OSError`."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        """Raises `ResourceExhausted` if the filesystem has no room for it, `InvalidField` for a link."""
        self.path = path
        self.capacity_bytes = capacity_bytes // BLOCK_BYTES * BLOCK_BYTES
        self._fd = self._open_file()
        self.intact_bytes = os.fstat(self._fd).st_size
        """Size of the file when it was opened: less than the capacity if the file is new or was cut."""
        self.syncs_failed = 0
        """Syncs that failed since the file was opened."""
        self._sync_lock = threading.Lock()
        try:
            if self.intact_bytes < self.capacity_bytes:
                os.posix_fallocate(self._fd, 0, self.capacity_bytes)
        except OSError as error:
            os.close(self._fd)
            raise ResourceExhausted(
                f"{path}: no room for {self.capacity_bytes} bytes ({error.strerror}); make the tier smaller"
            ) from error

    def _open_file(self) -> int:
        make_private(self.path)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        log.warning("%s: the filesystem refuses O_DIRECT; frames go through the page cache", self.path)
        return os.open(self.path, flags)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write the views one after the other, from `offset` on."""
        for position, part in _parts(offset, views):
            left = part
            while left:
                left = _after(left, os.pwritev(self._fd, left, position + _size(part) - _size(left)))

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views one after the other, from `offset` on. Raises `Corrupted` at the end of the file."""
        for position, part in _parts(offset, views):
            left = part
            while left:
                count = os.preadv(self._fd, left, position + _size(part) - _size(left))
                if not count:
                    raise Corrupted(f"{self.path} ends before byte {position + _size(part)}")
                left = _after(left, count)

    def measure_read_bytes_per_s(self) -> float:
        """Time a read of the first blocks. A new slab is written first, because unwritten blocks are not read
        from the disk. Call it before anything else uses the slab. Takes about 10 ms on an SSD."""
        block = memoryview(mmap.mmap(-1, min(PROBE_BYTES, self.capacity_bytes)))
        if not self.intact_bytes:
            self.write(0, [block])
            self.sync(self.syncs_failed)
        began_s = time.perf_counter()
        self.read(0, [block])
        return len(block) / max(time.perf_counter() - began_s, 1e-6)

    def wipe(self, offset: int, size: int) -> None:
        """Make blocks read as zeros; not synced. Writes nothing if the filesystem can mark blocks as zero."""
        if _fallocate(self._fd, _ZERO_RANGE, offset, size):
            return
        block = memoryview(mmap.mmap(-1, min(PROBE_BYTES, size)))
        for start in range(offset, offset + size, len(block)):
            self.write(start, [block[: min(len(block), offset + size - start)]])

    def cut_tail(self) -> None:
        """Cut the part of the file beyond the capacity, which an earlier configuration may have left."""
        if os.fstat(self._fd).st_size > self.capacity_bytes:
            os.ftruncate(self._fd, self.capacity_bytes)

    def sync(self, since: int) -> None:
        """Make the writes before this call survive a crash. `since`: `syncs_failed` before the first of them.

        Raises `OSError` if that fails, or if any sync has failed since that first write. The kernel reports a
        page that it could not write only once, to the first sync, and then treats the page as written; the
        success of a later sync does not cover that page.
        """
        with self._sync_lock:  # so that a failed sync is counted before another one succeeds
            if self.syncs_failed == since:
                try:
                    os.fdatasync(self._fd)
                except OSError:
                    self.syncs_failed += 1
                    raise
            else:
                raise OSError(errno.EIO, "an earlier sync failed, so what was written before it may be lost")

    def close(self) -> None:
        os.close(self._fd)


def _fallocate(fd: int, mode: int, offset: int, size: int) -> bool:
    """Call Linux's `fallocate`, whose modes Python lacks. Returns False if the filesystem lacks the mode."""
    if not _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(size)):
        return True
    error = ctypes.get_errno()
    if error in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(error, os.strerror(error))


def _size(views: Sequence[memoryview]) -> int:
    return sum(len(view) for view in views)


def _parts(offset: int, views: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """Split views into groups for one system call each."""
    parts = []
    for start in range(0, len(views), _IOV_MAX):
        part = list(views[start : start + _IOV_MAX])
        parts.append((offset, part))
        offset += _size(part)
    return parts


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the views without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


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
        """Delete the records of dropped copies from the catalog, then free the copies without readers.
        Returns the freed bytes. Raises `lmdb.Error`; then nothing changed."""
        with self._lock:
            if not self._unlinked and not self._graveyard:
                return 0  # without waiting for another commit
        with self._catalog_lock:
            return self._bury()

    def _bury(self) -> int:
        """Like `bury`, for a caller that holds the catalog's lock."""
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
        """Wipe the bytes of dropped chunks without readers from the tier's files. Raises `OSError` and
        `lmdb.Error`; then some bytes may remain."""
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
        """Record chunks whose frames are on disk in the catalog. Copies whose source was dropped meanwhile
        are left out. Raises `lmdb.Error`; then nothing changed."""
        with self._catalog_lock:
            self._record([(one.entry, target) for one, target in written if not one.source.condemned])

    def forget_older(self, written: Iterable[Copying]) -> None:
        """Delete from the catalog older copies of chunks that a slower tier is about to record. Raises
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
