"""The RAM tier: an arena, its free space, and the order in which chunks leave it.

The arena is one memfd, so that peers of the same host can map it read-only. The first block holds the
generations of the same-host path's leases; frames follow. The file is sealed after we have mapped it: it can
neither shrink under a reader nor be mapped for writing by another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard.entry import ChunkEntry, CopyTier, MakePolicy, Residence
from kintsugi.store.shard.eviction.policy import Lru
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES, ExtentAllocator, Strides

LEASES_MAX = BLOCK_BYTES // 8
"""Maximum number of concurrent same-host leases: generations in the first block."""

_F_SEAL_FUTURE_WRITE = 0x10
_WIPE_STEP_BYTES = 1 << 20
"""Bytes wiped in one step, for which other threads wait."""


class ArenaLease(NamedTuple):
    """Offset of a lease's generation in the file, and its value during the lease."""

    offset: int
    generation: int


class Arena:
    """Memory for `capacity_bytes` of frames, which the kernel fills with zeros when they are first
    touched."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < BLOCK_BYTES:
            raise InvalidField("ram", f"{capacity_bytes} bytes is less than one block of {BLOCK_BYTES}")
        self.capacity_bytes = capacity_bytes // BLOCK_BYTES * BLOCK_BYTES
        self.file_bytes = BLOCK_BYTES + self.capacity_bytes
        self.fd = os.memfd_create("kintsugi-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.file_bytes)
            self._map = mmap.mmap(self.fd, self.file_bytes)
        except OSError as error:
            os.close(self.fd)
            raise ResourceExhausted(
                f"no address space for {self.capacity_bytes} bytes of RAM ({error.strerror}); "
                "make the tier smaller"
            ) from error
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        )
        with contextlib.suppress(OSError, AttributeError):  # a kernel or filesystem without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self.frames = self._view[BLOCK_BYTES:]
        self.arena_id = secrets.randbits(64)
        """Distinguishes this arena from an earlier process's."""
        self._free_leases = list(range(LEASES_MAX))

    def view(self, offset: int, size: int) -> memoryview:
        """Return writable bytes from `offset` on, as the tier's allocator counts."""
        return self.frames[offset : offset + size]

    def wipe(self, offset: int, size: int) -> None:
        """Zero free bytes by writing, because the seal against writers forbids punching a hole."""
        for start in range(offset, offset + size, _WIPE_STEP_BYTES):
            step = min(_WIPE_STEP_BYTES, offset + size - start)
            self.view(start, step)[:] = bytes(step)

    def file_offset(self, view_offset: int) -> int:
        """Return the offset of a frame's byte in the mapped file."""
        return BLOCK_BYTES + view_offset

    def begin_lease(self) -> ArenaLease:
        """Begin a lease. Raises `ResourceExhausted` if there are too many. Not thread-safe: leases belong to
        the server's event loop."""
        if not self._free_leases:
            raise ResourceExhausted(f"{LEASES_MAX} readers of the same host hold leases; read over gRPC")
        offset = 8 * self._free_leases.pop()
        return ArenaLease(offset, self._generation(offset))

    def end_lease(self, lease: ArenaLease) -> None:
        """End a lease. Its reader can see that the bytes may change from now on."""
        struct.pack_into("<Q", self._view, lease.offset, lease.generation + 1)
        self._free_leases.append(lease.offset // 8)

    def _generation(self, offset: int) -> int:
        value: int = struct.unpack_from("<Q", self._view, offset)[0]
        return value

    def read_only_fd(self) -> int:
        """Return a read-only descriptor for a peer. Close it afterwards."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap the memory. Views that are still held keep the mapping alive until they are released."""
        self.frames.release()
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            return  # a reader still holds a view, and with it the mapping
        finally:
            os.close(self.fd)


class RamTier(CopyTier):
    """The RAM tier. Not thread-safe except for views: the table calls the rest under its lock."""

    def __init__(self, capacity_bytes: int, policy: MakePolicy = Lru[ChunkEntry]) -> None:
        self.arena = Arena(capacity_bytes)
        self.allocator = ExtentAllocator(self.arena.capacity_bytes)
        super().__init__("ram", lambda: policy(self.arena.capacity_bytes))
        self.on_free: Callable[[], None] = lambda: None
        """Called under the table's lock whenever room is freed."""

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    def allocate(self, manifest: ChunkManifest) -> Residence | None:
        """Allocate room for a chunk; None if other chunks must leave first."""
        strides = Strides.of(manifest.frame_runs)
        extents = self.allocator.allocate(strides)
        if extents is None:
            return None
        return Residence(self, (manifest.namespace, manifest.key), extents, strides)

    def free(self, residence: Residence) -> None:
        """Free the bytes of a residence."""
        self.lingering.discard(residence)
        self.allocator.free(residence.extents)
        self.on_free()

    def frame(self, residence: Residence, index: int, start: int, stop: int) -> memoryview:
        """Return bytes `[start, stop)` of frame `index` of a chunk, in place."""
        return self.arena.view(residence.offsets[index] + start, stop - start)

    def clear_padding(self, residence: Residence, index: int, frame_bytes: int) -> None:
        """Zero the padding after frame `index`, which may hold bytes of an earlier chunk."""
        stride = residence.strides.each[index]
        if stride > frame_bytes:
            self.frame(residence, index, frame_bytes, stride)[:] = bytes(stride - frame_bytes)

    def unlink(self, residence: Residence) -> None:
        """Keep a dropped residence until its last reader is done."""
        self.lingering.add(residence)
