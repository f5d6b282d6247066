"""A preallocated file of frames, written past the page cache.

Chunk KV is read once into an arena; caching it again in the kernel costs memory and CPU (0.34 CPU s/GB for
values inside LMDB, 0.07 here). Offsets, sizes and memory are whole blocks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kintsugi.core.errors import Corrupted, ResourceExhausted
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES

log = logging.getLogger(__name__)

PROBE_BYTES = 4 << 20
"""The size of one read of a promotion."""
_IOV_MAX = 1024
_ZERO_RANGE = 0x10
_libc = ctypes.CDLL(None, use_errno=True)


class Slab:
    """A file of `capacity_bytes`. Thread-safe: positions are explicit. Methods raise `OSError`."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        """Raises `ResourceExhausted` if the filesystem has no room for the file."""
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
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        log.warning("%s: the filesystem refuses O_DIRECT; frames go through the page cache", self.path)
        return os.open(self.path, flags, 0o600)

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
