"""The frames of one request for layers: verified as they arrive, or lost."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.core.errors import Unavailable
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.same_host import FrameLease, LeasedFrame
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame


class Received:
    """The state of one request."""

    def __init__(
        self,
        address: str,
        manifests: Sequence[ChunkManifest | None],
        heads: HeadRange,
    ) -> None:
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
        manifest = self._manifest(header.chunk)
        if header.chunk in self._lost:
            return None
        if header.lost_reason or manifest is None:
            return self._lose(header.chunk, header.layer, header.lost_reason or "absent")
        if header.layer >= manifest.layout.num_layers:
            return self._lose_damaged(header.chunk, header.layer, manifest)
        if manifest.frame_is_intact(header.layer, self._heads, data):
            return LayerFrame(header.chunk, header.layer, data)
        return self._lose_damaged(header.chunk, header.layer, manifest)

    def copy_leased_frame(self, frame: LeasedFrame, lease: FrameLease) -> LayerFrame | ChunkLost | None:
        """What to yield for a frame in the shard's memory, copied from there; None if its chunk is lost
        already."""
        manifest = self._manifest(frame.chunk)
        if frame.chunk in self._lost:
            return None
        if frame.lost_reason or manifest is None:
            return self._lose(frame.chunk, frame.layer, frame.lost_reason or "absent")
        if frame.layer < manifest.layout.num_layers and frame.size_bytes <= wire.FRAME_BYTES_MAX:
            data = self._target(frame)
            if lease.copy(frame, data, manifest, self._heads):
                return LayerFrame(frame.chunk, frame.layer, data)
        return self._lose_damaged(frame.chunk, frame.layer, manifest)

    def _target(self, frame: LeasedFrame) -> memoryview:
        if len(self._buffer) < frame.size_bytes:
            self._buffer = memoryview(bytearray(frame.size_bytes))
        return self._buffer[: frame.size_bytes]

    def _manifest(self, chunk: int) -> ChunkManifest | None:
        if chunk >= len(self._manifests):
            raise Unavailable(
                f"{self._address}: sent a frame of chunk {chunk}; {len(self._manifests)} were asked for"
            )
        return self._manifests[chunk]

    def _lose_damaged(self, chunk: int, layer: int, manifest: ChunkManifest) -> ChunkLost:
        self.damaged.append(manifest)
        return self._lose(chunk, layer, "digest mismatch")

    def _lose(self, chunk: int, layer: int, reason: str) -> ChunkLost:
        self._lost.add(chunk)
        return ChunkLost(chunk, layer, reason)
