"""Reading from a shard of the same host: descriptors over gRPC, bytes from its memory.

Where it does not work (another host, a pod that shares no folder, a shard that does not share its arena, no
room in its RAM) the caller reads over gRPC, and the path is tried again after a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from kintsugi.client.arena import ArenaMap
from kintsugi.core.errors import DeadlineExceeded, KintsugiError
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb

log = logging.getLogger(__name__)

RETRY_S = 60.0


@dataclass(frozen=True)
class LeasedFrame:
    """Where a frame lies, or why there is none."""

    chunk: int
    layer: int
    offset: int
    size_bytes: int
    lost_reason: str


class Lease:
    """One request's frames, held in place by the shard."""

    def __init__(
        self, arena: ArenaMap, first: pb.LeaseLayersResponse, messages: Iterator[pb.LeaseLayersResponse]
    ) -> None:
        self._arena = arena
        self._first = first
        self._messages = messages

    def frames(self) -> Iterator[LeasedFrame]:
        """Descriptors as they arrive."""
        message: pb.LeaseLayersResponse | None = self._first
        while message is not None:
            yield from _frames_of(message)
            message = None if message.last else next(self._messages, None)

    def copy(
        self,
        frame: LeasedFrame,
        into: memoryview,
        manifest: ChunkManifest,
        heads: HeadRange,
    ) -> bool:
        """Copy a frame; whether its digests are right. Raises `DeadlineExceeded` once the lease is over."""
        start, stop = manifest.head_range_bytes(heads)
        if frame.size_bytes != stop - start or not self._arena.holds(frame.offset, frame.size_bytes):
            return False
        intact = self._arena.copy_frame(frame.offset, into, manifest, frame.layer, heads)
        if self._arena.generation(self._first.generation_offset) != self._first.generation:
            raise DeadlineExceeded(f"the lease of {self._first.lease_s:.0f} s ended while it was read")
        return intact


class SameHost:
    """The arena of one shard, mapped when it is first needed. Thread-safe."""

    def __init__(self, open_arena: Callable[[], pb.OpenArenaResponse]) -> None:
        self._open_arena = open_arena
        self._lock = threading.Lock()
        self._arena: ArenaMap | None = None
        self._retry_at_s = 0.0

    @property
    def attached(self) -> bool:
        return self._arena is not None

    def lease(self, messages: Iterator[pb.LeaseLayersResponse]) -> Lease | None:
        """The lease that a call's messages describe; None where the path does not work now.

        Raises `KintsugiError` as the call does, but for what a read over gRPC may mend.
        """
        try:
            first = next(messages, None)
        except grpc.RpcError as failure:
            if failure.code() in _NOT_HERE:
                self._back_off()
                return None
            raise
        if first is None:
            return None
        arena = self._attach(first.arena_id)
        return None if arena is None else Lease(arena, first, messages)

    def worth_trying(self) -> bool:
        """Attach if need be; False while an attempt that failed is fresh."""
        return self._attach(None) is not None

    def _attach(self, arena_id: int | None) -> ArenaMap | None:
        """The arena, of this id if one is given: a shard that was restarted has a new one."""
        with self._lock:
            if self._arena is not None and arena_id in (None, self._arena.arena_id):
                return self._arena
            if time.monotonic() < self._retry_at_s:
                return None
            self._arena = None  # views of a stream that still reads keep the old map alive
            try:
                arena = ArenaMap(self._open_arena())
            except (KintsugiError, OSError) as error:
                log.info("reading over gRPC: %s", error)
                self._retry_at_s = time.monotonic() + RETRY_S
                return None
            self._arena = arena
            return arena if arena_id in (None, arena.arena_id) else None

    def _back_off(self) -> None:
        with self._lock:
            self._retry_at_s = time.monotonic() + 1.0

    def close(self) -> None:
        with self._lock:
            self._arena = None
            self._retry_at_s = float("inf")


_NOT_HERE = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)


def _frames_of(message: pb.LeaseLayersResponse) -> Iterator[LeasedFrame]:
    for frame in message.frames:
        yield LeasedFrame(frame.chunk, frame.layer, frame.offset, frame.size_bytes, frame.lost_reason)
