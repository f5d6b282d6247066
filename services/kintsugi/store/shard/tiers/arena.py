"""The RAM tier's memory: one memfd, so that peers of the same host can map it read-only.

The first block holds generations of the same-host path's leases; frames lie behind it. The file is sealed
once we have mapped it: it can neither shrink under a reader nor be mapped for writing by anyone else.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from typing import NamedTuple

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.store.shard.tiers.extents import BLOCK_BYTES

LEASES_MAX = BLOCK_BYTES // 8
"""Generations in the first block: concurrent same-host leases."""

_F_SEAL_FUTURE_WRITE = 0x10
_WIPE_STEP_BYTES = 1 << 20
"""Other threads wait for one step."""


class ArenaLease(NamedTuple):
    """Offset in the file of a lease's generation, and its value while the lease lasts."""

    offset: int
    generation: int


class Arena:
    """`capacity_bytes` of frames, zero-filled by the kernel when first touched."""

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
        """Distinguishes this arena from that of an earlier process."""
        self._free_leases = list(range(LEASES_MAX))

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of a frame at `offset` as the tier's allocator counts; writable."""
        return self.frames[offset : offset + size]

    def wipe(self, offset: int, size: int) -> None:
        """Zero free bytes. Writes them: the seal against writers forbids punching a hole."""
        for start in range(offset, offset + size, _WIPE_STEP_BYTES):
            step = min(_WIPE_STEP_BYTES, offset + size - start)
            self.view(start, step)[:] = bytes(step)

    def file_offset(self, view_offset: int) -> int:
        """Where a frame's byte lies for those who map the file."""
        return BLOCK_BYTES + view_offset

    def begin_lease(self) -> ArenaLease:
        """Raises `ResourceExhausted` if too many are held.

        Not thread-safe: leases belong to the server's event loop.
        """
        if not self._free_leases:
            raise ResourceExhausted(f"{LEASES_MAX} readers of the same host hold leases; read over gRPC")
        offset = 8 * self._free_leases.pop()
        return ArenaLease(offset, self._generation(offset))

    def end_lease(self, lease: ArenaLease) -> None:
        """Tell the reader that the bytes may change from now on."""
        struct.pack_into("<Q", self._view, lease.offset, lease.generation + 1)
        self._free_leases.append(lease.offset // 8)

    def _generation(self, offset: int) -> int:
        value: int = struct.unpack_from("<Q", self._view, offset)[0]
        return value

    def read_only_fd(self) -> int:
        """A descriptor to hand to a peer; close it afterwards."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap; views that are still held keep the mapping alive until they go."""
        self.frames.release()
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            return  # a reader still holds a view; the mapping goes with it
        finally:
            os.close(self.fd)
