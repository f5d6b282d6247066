"""Streams the frames of one request, as bytes or as descriptors.

Frames in RAM are sent at once; frames on disk follow as the promotion reads them, layer by layer. Cost per
byte: one join into a gRPC message; none as a descriptor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kintsugi.core.errors import Corrupted, DeadlineExceeded, ResourceExhausted
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.shard.reading import HeldChunk, Reading
from kintsugi.store.shard.shard import Shard

WRITE_STALL_S_MAX = 60.0
"""A stream whose reader accepts nothing for this long ends and releases its chunks."""
DESCRIPTORS_MAX = 4096
"""Maximum per message."""


@dataclass(frozen=True)
class _Ready:
    """A frame that can be sent, or why it is lost."""

    chunk: int
    layer: int
    frame: memoryview | None
    lost: str = ""


class LayerStream:
    """One request. Single use."""

    def __init__(self, shard: Shard, reading: Reading, layers: range, deadline_s: float) -> None:
        """`deadline_s` bounds the wait for each layer."""
        self.bytes_sent = 0
        self._shard = shard
        self._reading = reading
        self._layers = layers
        self._deadline_s = deadline_s

    @property
    def message_bytes_max(self) -> int:
        """Size of the largest message of `write_frames`."""
        held = [chunk for chunk in self._reading.chunks if chunk is not None]
        largest = max((chunk.manifest.range_bytes_max(chunk.heads) for chunk in held), default=0)
        if largest >= wire.MESSAGE_BYTES_TARGET:
            return largest
        return min(wire.MESSAGE_BYTES_TARGET + largest, len(held) * len(self._layers) * largest)

    async def write_frames(self, context: Any) -> None:
        """Send frames as `StreamLayersResponse` messages. Raises `DeadlineExceeded`."""
        batch = _Batch()
        async for item in self._items():
            if batch if item is None else batch.add(item):
                await _write_message(context, batch.take_message())
        if batch:
            await _write_message(context, batch.take_message())

    async def write_descriptors(self, context: Any, message: pb.LeaseLayersResponse) -> None:
        """Send descriptors as `LeaseLayersResponse` messages. `message` carries the lease. Raises
        `DeadlineExceeded`, and `ResourceExhausted` for a chunk that RAM has no room for."""
        if any(chunk is not None and not chunk.in_ram for chunk in self._reading.chunks):
            raise ResourceExhausted("RAM has no room for these chunks now; read them over gRPC")
        frames_max = len(self._reading.chunks)  # send the first layer before describing the rest
        async for item in self._items():
            if item is not None:
                message.frames.append(self._descriptor(item))
            if message.frames and (item is None or len(message.frames) >= frames_max):
                await _write_message(context, message.SerializeToString())
                del message.frames[:]
                frames_max = DESCRIPTORS_MAX
        message.last = True
        await _write_message(context, message.SerializeToString())

    def _descriptor(self, item: _Ready) -> pb.FrameDescriptor:
        if item.frame is None:
            return pb.FrameDescriptor(chunk=item.chunk, layer=item.layer, lost_reason=item.lost)
        held = self._reading.chunks[item.chunk]
        assert held is not None
        start, _ = held.manifest.head_range_bytes(held.heads, item.layer)
        offset = held.residence.offsets[held.manifest.place_of(item.layer)] + start
        return pb.FrameDescriptor(
            chunk=item.chunk,
            layer=item.layer,
            offset=self._shard.ram.arena.file_offset(offset),
            size_bytes=len(item.frame),
        )

    async def _items(self) -> AsyncIterator[_Ready | None]:
        """Yield frames layer by layer, and None before each pause. A chunk's loss is its last item."""
        lost: set[int] = set()
        for layer in self._layers:
            expires_s = time.monotonic() + self._deadline_s
            for index, chunk in enumerate(self._reading.chunks):
                if index in lost or (chunk is not None and layer not in chunk.manifest.layers):
                    continue
                frame: memoryview | str | None = "absent" if chunk is None else _frame_in_place(chunk, layer)
                if chunk is not None and frame is None:
                    yield None
                    frame = await self._await_frame(chunk, layer, expires_s)
                if isinstance(frame, memoryview):
                    self.bytes_sent += len(frame)
                    yield _Ready(index, layer, frame)
                else:
                    lost.add(index)
                    yield _Ready(index, layer, None, frame or "absent")

    async def _await_frame(self, chunk: HeldChunk, layer: int, expires_s: float) -> memoryview | str:
        """Wait for a frame that is not in RAM yet. Returns it, or why it is lost. Raises
        `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(expires_s - time.monotonic()):
                if chunk.in_ram:
                    await self._wait_for_progress(chunk, layer)
                    return chunk.lost or chunk.frame(layer)
                return await asyncio.to_thread(chunk.read, layer)
        except TimeoutError:
            raise DeadlineExceeded(f"layer {layer} of chunk {chunk.manifest.key} is still on disk") from None
        except Corrupted as error:
            return str(error)

    async def _wait_for_progress(self, chunk: HeldChunk, layer: int) -> None:
        """Wait until a layer is in RAM or lost."""
        loop, progress = asyncio.get_running_loop(), asyncio.Event()
        while not self._shard.table.await_layer(chunk, layer, partial(_set, loop, progress)):
            await progress.wait()
            progress.clear()


def _frame_in_place(chunk: HeldChunk, layer: int) -> memoryview | None:
    """Return a frame that is in RAM; None if it is not in RAM yet."""
    if not chunk.in_ram or chunk.lost or not chunk.ready(layer):
        return None
    return chunk.frame(layer)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the server, and with it the stream, has ended
        loop.call_soon_threadsafe(event.set)


async def _write_message(context: Any, message: bytes) -> None:
    async with asyncio.timeout(WRITE_STALL_S_MAX):  # wait_for would make a task of each write
        await context.write(message)


class _Batch:
    """Frames that travel in one message."""

    def __init__(self) -> None:
        self._headers: list[pb.FrameHeader] = []
        self._views: list[memoryview] = []
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._headers)

    def add(self, item: _Ready) -> bool:
        """Add a frame. Returns whether the batch has reached the target size of a message."""
        size = 0 if item.frame is None else len(item.frame)
        self._headers.append(
            pb.FrameHeader(chunk=item.chunk, layer=item.layer, size_bytes=size, lost_reason=item.lost)
        )
        if item.frame is not None:
            self._views.append(item.frame)
        self._size += size
        return self._size >= wire.MESSAGE_BYTES_TARGET

    def take_message(self) -> bytes:
        """Build the message and empty the batch."""
        header = pb.StreamLayersResponse(frames=self._headers).SerializeToString()
        message = wire.with_payload(header, self._views)
        self._headers, self._views, self._size = [], [], 0
        return message
