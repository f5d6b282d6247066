"""Verifies and decrypts the frames of one stream, and reports chunks as lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kintsugi.core.errors import Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.chunk_cipher import ChunkCipher, is_readable
from kintsugi.store.client.same_host import FrameLease
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame
from kintsugi.store.protocol.keys import NamespaceKeys

LookUpAgain = Callable[[ChunkManifest], ChunkManifest | None]
_ReadFrame = Callable[[ChunkManifest], memoryview | None]


class Received:
    """State of one stream."""

    def __init__(
        self,
        address: str,
        manifests: Sequence[ChunkManifest | None],
        heads: HeadRange,
        keys: NamespaceKeys | None = None,
        look_up_again: LookUpAgain = lambda manifest: None,
    ) -> None:
        """`manifests` has one entry per requested chunk, None for a chunk that the shard does not have.
        `keys` are the namespace's keys; None if it is not encrypted. `look_up_again` returns the shard's
        current manifest of a chunk."""
        self.damaged: list[ChunkManifest] = []
        """Chunks whose bytes did not match their digests. The caller reports them and removes them from the
        list."""
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
        manifest = self._manifests[frame.chunk]
        if frame.chunk in self._lost:
            return None
        layer = frame.layer
        reason = frame.lost_reason or "absent"
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
