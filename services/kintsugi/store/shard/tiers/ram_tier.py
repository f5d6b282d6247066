"""The RAM tier: an arena, its free space, the order in which chunks leave it, and the puts that fill it.

The arena is one memfd, so that peers of the same host can map it read-only. The first block holds the
generations of the same-host path's leases; frames follow. The file is sealed after we have mapped it: it can
neither shrink under a reader nor be mapped for writing by another process.

A put copies its frames into the arena and verifies them there; only the table's `commit` makes them visible.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from kintsugi.core.errors import Corrupted, InvalidField, NotFound, ResourceExhausted
from kintsugi.core.layout import ChunkManifest, HeadRange
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


def check_ttl(ttl_s: float) -> None:
    """Raise `InvalidField` unless the lifetime is positive."""
    if not ttl_s > 0:
        raise InvalidField("ttl_s", f"{ttl_s} is not positive")


def erased_meanwhile(manifest: ChunkManifest) -> NotFound:
    """The error for a put of a chunk that was deleted or erased after its save was requested."""
    return NotFound(
        f"chunk {manifest.key} of {manifest.namespace!r} was erased after its save was requested; "
        "save it again to keep it"
    )


@dataclass(frozen=True)
class PutOptions:
    """Options of a put."""

    durable: bool = False
    ttl_s: float = math.inf
    recompute_ms: float = 0.0
    is_copy: bool = False
    """Whether the chunk is copied from another shard."""
    erasures_seen: int = 0
    """With `is_copy`: up to which number the other shard has applied this shard's erasures."""
    is_hot: bool = False
    """With `is_copy`: whether the copy is a hot one (`ChunkEntry.is_hot`)."""

    def __post_init__(self) -> None:
        check_ttl(self.ttl_s)
        if not (self.recompute_ms >= 0 and math.isfinite(self.recompute_ms)):
            raise InvalidField("recompute_ms", f"{self.recompute_ms} is not a duration")
        if self.is_hot and not self.is_copy:
            raise InvalidField("is_hot", "is for copies between shards; set is_copy, too")


@dataclass(frozen=True)
class Committed:
    """The outcome of a commit."""

    inserted: bool
    """False if the chunk was stored already, or was in a bucket that cannot be reached."""
    durable: Future[None] | None
    """A future that is done when the chunk is on disk; None if it was not inserted or stays in RAM."""


class ChunkPut:
    """Takes the frames of one chunk, in layer order. One thread at a time.

    Cost per byte: one copy into the arena and one xxh3 pass over it.
    """

    def __init__(
        self,
        entry: ChunkEntry,
        residence: Residence,
        ram: RamTier,
        tier: str,
        options: PutOptions,
    ) -> None:
        self.entry = entry
        self.residence = residence
        self.tier = tier
        """Tier that the chunk is written to after the commit: `ram` or the name of an SSD tier."""
        self.is_copy = options.is_copy
        self.erasures_seen = options.erasures_seen
        self.is_erased = False
        """Whether the chunk was deleted after the put began. The commit then has no effect."""
        self._ram = ram
        self._next = 0
        """Index of the next frame."""

    @property
    def complete(self) -> bool:
        return self._next == self.entry.manifest.num_frames

    def write(self, first_layer: int, payload: memoryview) -> None:
        """Copy whole frames; the first one is of `first_layer`, which may be a side frame. Raises
        `InvalidField` for frames that are out of order, too many or cut, `Corrupted` for a wrong digest."""
        manifest = self.entry.manifest
        layers = manifest.layers[self._next :]
        if not layers or first_layer != layers[0]:
            follows = f"layer {layers[0]} comes next" if layers else "no more frames may follow"
            raise InvalidField("first_layer", f"{first_layer}; {follows}")
        every_head = HeadRange(0, manifest.layout.num_kv_heads)
        for layer in layers[: self._count_frames(layers, len(payload))]:
            size, index = manifest.frame_bytes_of(layer), self._next
            place = self._ram.frame(self.residence, index, 0, size)
            place[:] = payload[:size]
            self._ram.clear_padding(self.residence, index, size)
            if not manifest.frame_is_intact(layer, every_head, place):
                raise Corrupted(f"frames[{index}] does not match the manifest's digest; send it again")
            payload = payload[size:]
            self._next += 1

    def _count_frames(self, layers: Sequence[int], payload_bytes: int) -> int:
        """Return how many frames of `layers` a payload holds. Raises `InvalidField` unless they are whole."""
        count, left = 0, payload_bytes
        while left:
            if count == len(layers):
                raise InvalidField(
                    "payload",
                    f"has {left} bytes too many from layer {layers[0]}; the last layer is {layers[-1]}",
                )
            size = self.entry.manifest.frame_bytes_of(layers[count])
            if left < size:
                raise InvalidField(
                    "payload", f"ends after {left} of the {size} bytes of layer {layers[count]}"
                )
            left -= size
            count += 1
        return count
