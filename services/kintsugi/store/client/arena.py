"""A shard's memory, mapped read-only by a client of the same host.

The shard says over gRPC where frames lie and keeps them there for the length of a lease. A frame counts only
if the lease has the same generation after the copy as before: that detects a lease that ended early (the
client stalled, the shard took its memory back). The digest is checked on the copy, the very bytes that are
used. Cost per byte: one copy and one xxh3 pass, a head at a time, while it is still in the cache.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

from kintsugi.core.layout import DIGEST_BYTES, ChunkManifest, HeadRange, digests_of
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.chunk_cipher import ChunkCipher

GENERATION_BYTES = 8
_CONNECT_TIMEOUT_S = 2.0


class ArenaMap:
    """One shard process's arena. It is unmapped with the last reference to it."""

    def __init__(self, opened: pb.OpenArenaResponse) -> None:
        """Raises `OSError` where the socket does not exist: on another host, or in another pod."""
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
        """Whether a descriptor lies inside the arena."""
        return offset >= 0 and offset + size <= len(self._view)

    def generation(self, offset: int) -> int:
        """Read the generation of the lease at `offset`, which must lie inside the arena."""
        value: int = struct.unpack_from("<Q", self._view, offset)[0]
        return value

    def copy_frame(
        self, offset: int, into: memoryview, manifest: ChunkManifest, layer: int, heads: HeadRange
    ) -> bool:
        """Copy the bytes of `heads` of a layer and return whether they match their digests; those of an
        encrypted chunk are left to whoever decrypts it."""
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

        Straight from the shard's memory: a copy before would cost a quarter of the rate. So unlike a shard on
        another host, one on this host is trusted not to change bytes while they are decrypted; that the lease
        keeps them in place is checked behind it.
        """
        return cipher.decrypt(layer, heads, self._view[offset : offset + len(into)], into)
