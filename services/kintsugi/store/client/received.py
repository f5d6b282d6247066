"""The frames of one request for layers: verified as they arrive, or lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kintsugi.core.errors import Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.same_host import FrameLease
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame


class Received:
    """The state of one request."""

    def __init__(self, address: str, manifests: Sequence[ChunkManifest | None], heads: HeadRange) -> None:
        """`manifests`: one per requested chunk, None for a chunk that the shard does not have."""
        self.damaged: list[ChunkManifest] = []
        """Chunks whose bytes did not match their digests, to be reported and then removed."""
        self._address = address
        self._manifests = manifests
        self._heads = heads
        self._lost: set[int] = set()
        self._buffer = memoryview(bytearray())

    def verify_frame(self, header: pb.FrameHeader, data: memoryview) -> LayerFrame | ChunkLost | None:
        """What to yield for a frame that came with its bytes; None if its chunk is lost already."""

        def verify(manifest: ChunkManifest) -> memoryview | None:
            return data if manifest.frame_is_intact(wire.layer_of(header), self._heads, data) else None

        return self._take(header, verify)

    def copy_leased_frame(
        self, frame: pb.FrameDescriptor, lease: FrameLease
    ) -> LayerFrame | ChunkLost | None:
        """What to yield for a frame in the shard's memory, copied from there; None if its chunk is lost
        already."""

        def copy(manifest: ChunkManifest) -> memoryview | None:
            if frame.size_bytes > wire.FRAME_BYTES_MAX:
                return None
            if len(self._buffer) < frame.size_bytes:
                self._buffer = memoryview(bytearray(frame.size_bytes))
            data = self._buffer[: frame.size_bytes]
            return data if lease.copy(frame, data, manifest, self._heads) else None

        return self._take(frame, copy)

    def _take(
        self,
        frame: pb.FrameHeader | pb.FrameDescriptor,
        read: Callable[[ChunkManifest], memoryview | None],
    ) -> LayerFrame | ChunkLost | None:
        """``read`` returns the frame's bytes; None where they do not match their digests."""
        if frame.chunk >= len(self._manifests):
            raise Unavailable(
                f"{self._address}: sent a frame of chunk {frame.chunk}; {len(self._manifests)} were asked for"
            )
        manifest = self._manifests[frame.chunk]
        if frame.chunk in self._lost:
            return None
        layer = wire.layer_of(frame)
        reason = frame.lost_reason or "absent"
        if manifest is not None and not frame.lost_reason:
            data = read(manifest) if layer in manifest.layers else None
            if data is not None:
                return LayerFrame(frame.chunk, layer, data)
            self.damaged.append(manifest)
            reason = "digest mismatch"
        self._lost.add(frame.chunk)
        return ChunkLost(frame.chunk, layer, reason)
