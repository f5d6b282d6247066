"""Frames that a stream receives: read from messages or from a shard's memory, verified, decrypted.

From a shard on the same host, descriptors come over gRPC, and bytes from the shard's mapped memory. If that
is impossible (another host, a pod without the shared folder, a shard that does not share its arena, no room
in its RAM), the caller reads over gRPC and tries this path again later. A shard keeps frames in place while a
lease lasts. A frame counts only if the generation of the lease is the same after the copy: otherwise the
lease ended early, because the client stalled or the shard took its memory back. The digest is computed from
the copy. Cost per byte: one copy and one xxh3 pass, head by head, while the bytes are in the CPU's cache.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from kintsugi.core.errors import DeadlineExceeded, Unavailable
from kintsugi.core.layout import DIGEST_BYTES, ChunkManifest, HeadRange, digests_of
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.calls import Patience
from kintsugi.store.client.chunk_cipher import ChunkCipher, is_readable
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame
from kintsugi.store.protocol.keys import NamespaceKeys

log = logging.getLogger(__name__)

GENERATION_BYTES = 8
RETRY_S = 60.0
CROWDED_RETRY_S = 1.0
"""Wait before the next attempt if the shard had no free lease or no room in RAM."""
_CONNECT_TIMEOUT_S = 2.0
MESSAGES_BYTES_SLACK = 16 << 20
"""Bytes that a stream may send beyond twice the size of the requested frames: headers, and chunks that were
put again with another layout."""
REASON_CHARS_MAX = 500


class ArenaMap:
    """The arena of one shard process, mapped read-only. It is unmapped with the last reference to it."""

    def __init__(self, opened: pb.OpenArenaResponse) -> None:
        """Raises `OSError` if the socket does not exist, as on another host or in another pod."""
        self.arena_id = opened.arena_id
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(_CONNECT_TIMEOUT_S)
            door.connect(opened.socket_path)
            door.sendall(opened.token)
            _, fds, _, _ = socket.recv_fds(door, 1, 1)
        if len(fds) != 1:
            raise ConnectionRefusedError(f"{opened.socket_path} did not accept the token")
        try:
            if os.fstat(fds[0]).st_size != opened.arena_bytes:
                raise ConnectionRefusedError(f"{opened.socket_path} handed out another file than the arena")
            self._map = mmap.mmap(fds[0], opened.arena_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fds[0])
        self._view = memoryview(self._map)

    def holds(self, offset: int, size: int) -> bool:
        """Return whether a range lies inside the arena."""
        return offset >= 0 and offset + size <= len(self._view)

    def generation(self, offset: int) -> int:
        """Read the generation of the lease at `offset`, which must lie inside the arena."""
        value: int = struct.unpack_from("<Q", self._view, offset)[0]
        return value

    def copy_frame(
        self, offset: int, into: memoryview, manifest: ChunkManifest, layer: int, heads: HeadRange
    ) -> bool:
        """Copy the bytes of `heads` of a layer and return whether they match their digests. Bytes of an
        encrypted chunk are verified later, when they are decrypted."""
        _, size, digests = manifest.head_digests(layer, heads)
        intact = True
        for head in range(len(digests) // DIGEST_BYTES):
            start = head * size
            part = into[start : start + size]
            part[:] = self._view[offset + start : offset + start + size]
            if not manifest.key_id:
                expected = digests[head * DIGEST_BYTES : (head + 1) * DIGEST_BYTES]
                intact = intact and digests_of(part, size) == expected
        return intact

    def decrypt_frame(
        self, offset: int, into: memoryview, cipher: ChunkCipher, layer: int, heads: HeadRange
    ) -> bool:
        """Decrypt the bytes of `heads` of a layer and return whether they match their tags.

        Decrypts directly from the shard's memory, because a copy would cost a quarter of the rate. So the
        shard is trusted not to change bytes during decryption. Afterwards the caller checks that the lease
        still held."""
        return cipher.decrypt(layer, heads, self._view[offset : offset + len(into)], into)


class FrameLease:
    """A lease on the frames of one request, which the shard keeps in place while the call lasts."""

    def __init__(self, arena: ArenaMap, first: pb.LeaseLayersResponse) -> None:
        """`first` is the call's first message."""
        self._arena = arena
        self._first = first

    def copy(
        self,
        frame: pb.FrameDescriptor,
        into: memoryview,
        manifest: ChunkManifest,
        heads: HeadRange,
        cipher: ChunkCipher | None = None,
    ) -> bool:
        """Copy a frame, or decrypt it with `cipher`, and return whether its digests or tags match. Raises
        `DeadlineExceeded` after the lease."""
        layer = frame.layer
        start, stop = manifest.head_range_bytes(heads, layer)
        held = self._arena.holds(frame.offset, frame.size_bytes)
        has_generation = self._arena.holds(self._first.generation_offset, GENERATION_BYTES)
        if frame.size_bytes != stop - start or not held or not has_generation:
            return False
        if cipher is None:
            intact = self._arena.copy_frame(frame.offset, into, manifest, layer, heads)
        else:
            intact = self._arena.decrypt_frame(frame.offset, into, cipher, layer, heads)
        if self._arena.generation(self._first.generation_offset) != self._first.generation:
            raise DeadlineExceeded(f"the lease of {self._first.lease_s:.0f} s ended while it was read")
        return intact


class SameHost:
    """State of reading from one shard's memory: its arena, mapped when first needed. Thread-safe; makes no
    call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: ArenaMap | None = None
        self._retry_at_s = 0.0

    @property
    def attached(self) -> bool:
        return self._arena is not None

    def arena(self, arena_id: int | None) -> ArenaMap | None:
        """Return the mapped arena; None if another arena than `arena_id` is mapped, as after a restart of the
        shard."""
        with self._lock:
            arena = self._arena
            return arena if arena is not None and arena_id in (None, arena.arena_id) else None

    def may_try(self) -> bool:
        """Return whether reading from memory may be tried; False shortly after a failure."""
        with self._lock:
            return time.monotonic() >= self._retry_at_s

    def attach(self, opened: pb.OpenArenaResponse) -> None:
        """Map an arena. Raises `OSError` if that is impossible here."""
        arena = ArenaMap(opened)
        with self._lock:
            self._arena = arena  # views of a running stream keep an old map alive

    def suspend(self, reason: object, wait_s: float = RETRY_S) -> None:
        """Read over gRPC for the next `wait_s`."""
        log.info("reading over gRPC: %s", reason)
        with self._lock:
            self._retry_at_s = max(self._retry_at_s, time.monotonic() + wait_s)

    def close(self) -> None:
        with self._lock:
            self._arena = None
            self._retry_at_s = float("inf")


LookUpAgain = Callable[[ChunkManifest], ChunkManifest | None]
_ReadFrame = Callable[[ChunkManifest], memoryview | None]


class Received:
    """State of one stream."""

    def __init__(
        self,
        address: str,
        manifests: Sequence[ChunkManifest | None],
        heads: HeadRange,
        layer_s: float = math.inf,
        keys: NamespaceKeys | None = None,
        look_up_again: LookUpAgain = lambda manifest: None,
    ) -> None:
        """`manifests` has one entry per requested chunk, None for a chunk that the shard does not have.
        `layer_s`: maximum time to wait for all frames of a layer.
        `keys` are the namespace's keys; None if it is not encrypted. `look_up_again` returns the shard's
        current manifest of a chunk."""
        self.damaged: list[ChunkManifest] = []
        """Chunks whose bytes did not match their digests. The caller reports them and removes them from the
        list."""
        self.patience = Patience(layer_s)
        """The time that the stream may wait for the rest of the present layer."""
        self._bytes_left = MESSAGES_BYTES_SLACK + 2 * sum(
            one.chunk_bytes for one in manifests if one is not None
        )
        self._place = (-math.inf, 0.0)
        """Layer and chunk of the last frame. Frames come layer by layer, so a shard cannot send forever."""
        self._address = address
        self._manifests = list(manifests)
        self._heads = heads
        self._keys = keys
        self._look_up_again = look_up_again
        self._ciphers: dict[int, ChunkCipher] = {}
        self._intact: set[int] = set()
        """Chunks with at least one yielded frame."""
        self._lost: set[int] = set()
        self._buffer = memoryview(bytearray())

    def count_message(self, num_bytes: int) -> None:
        """Raise `Unavailable` if the shard sends more than was requested."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0 or not num_bytes:
            raise Unavailable(f"{self._address}: sent other messages than the requested frames")

    def verify_frame(self, header: pb.FrameHeader, data: memoryview) -> LayerFrame | ChunkLost | None:
        """Return the item to yield for a frame that arrived in a message; None if its chunk is already
        lost."""

        def verify(manifest: ChunkManifest) -> memoryview | None:
            layer, cipher = header.layer, self._ciphers.get(header.chunk)
            if cipher is None:
                return data if manifest.frame_is_intact(layer, self._heads, data) else None
            into = self._room(len(data))
            return into if cipher.decrypt(layer, self._heads, data, into) else None

        return self._take(header, verify)

    def copy_leased_frame(
        self, frame: pb.FrameDescriptor, lease: FrameLease
    ) -> LayerFrame | ChunkLost | None:
        """Return the item to yield for a frame copied from the shard's memory; None if its chunk is already
        lost."""

        def copy(manifest: ChunkManifest) -> memoryview | None:
            if frame.size_bytes > wire.FRAME_BYTES_MAX:
                return None
            data, cipher = self._room(frame.size_bytes), self._ciphers.get(frame.chunk)
            return data if lease.copy(frame, data, manifest, self._heads, cipher) else None

        return self._take(frame, copy)

    def _room(self, size: int) -> memoryview:
        """Return a buffer, which the next frame reuses."""
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        return self._buffer[:size]

    def _take(
        self, frame: pb.FrameHeader | pb.FrameDescriptor, read: _ReadFrame
    ) -> LayerFrame | ChunkLost | None:
        """Return the item to yield. `read` returns the frame's bytes; None if they do not match their
        digests."""
        if frame.chunk >= len(self._manifests):
            raise Unavailable(
                f"{self._address}: sent a frame of chunk {frame.chunk}, but the request has "
                f"{len(self._manifests)} chunks"
            )
        layer = frame.layer
        if (layer, frame.chunk) <= self._place:
            raise Unavailable(f"{self._address}: sent layer {layer} of chunk {frame.chunk} out of order")
        if layer > self._place[0]:
            self.patience.renew()
        self._place = (layer, frame.chunk)
        manifest = self._manifests[frame.chunk]
        if frame.chunk in self._lost:
            return None
        reason = frame.lost_reason[:REASON_CHARS_MAX] or "absent"
        if manifest is not None and not frame.lost_reason:
            if is_readable(self._keys, manifest):
                data = self._read(frame, manifest, read)
                if data is not None:
                    self._intact.add(frame.chunk)
                    return LayerFrame(frame.chunk, layer, data)
                reason = "digest mismatch"
            else:
                reason = "no key to read it with"
        self._lost.add(frame.chunk)
        return ChunkLost(frame.chunk, layer, reason)

    def _read(
        self, frame: pb.FrameHeader | pb.FrameDescriptor, manifest: ChunkManifest, read: _ReadFrame
    ) -> memoryview | None:
        """Return the frame's bytes; None if they are damaged."""
        layer = frame.layer
        self._decrypt_by(frame.chunk, manifest)
        data = read(manifest) if layer in manifest.layers else None
        if data is None and manifest.is_encrypted and frame.chunk not in self._intact:
            # The chunk may have been put again; then its salt and tags differ from the remembered ones.
            newer = self._look_up_again(manifest)
            if newer is not None and newer.salt != manifest.salt and is_readable(self._keys, newer):
                manifest = newer
                self._decrypt_by(frame.chunk, manifest)
                data = read(manifest) if layer in manifest.layers else None
        if data is None:
            self.damaged.append(manifest)
        return data

    def _decrypt_by(self, chunk: int, manifest: ChunkManifest) -> None:
        """Create the cipher of an encrypted chunk, unless the one for this manifest exists."""
        if manifest.is_encrypted and (chunk not in self._ciphers or manifest is not self._manifests[chunk]):
            assert self._keys is not None
            self._manifests[chunk] = manifest
            self._ciphers[chunk] = ChunkCipher(self._keys.by_id[manifest.key_id], manifest)
