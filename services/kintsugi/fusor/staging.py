"""Moves frames from the host's memory to the device. Only this module uses pinned memory, streams and events.

On a CPU nothing is staged: an upload returns the tensor itself, and a frame is decoded when it arrives.

On a GPU the bytes of a layer are gathered in pinned memory and copied in one piece, still encoded; the device
decodes them. Copy and decoding are queued on one stream for all passes, separate from the computation's. The
host never waits for either. Torch keeps pinned memory until the copies from it are done, and reuses it.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.fusor.codecs import DTYPES, Encoding, as_bytes, check_scales, decode_into
from kintsugi.fusor.rope import Rotary

THREADS_ON_DEVICE = 4
"""Loader threads of a pass on a GPU. One thread verifies and copies an estimated 5 to 6 GB/s, a tenth of the
bus's rate. On a CPU there is one thread: more would take cores from the computation."""

ALIGNMENT_BYTES = 16
"""Alignment of frames, so that every element type can be read in place."""


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for the copy. On a CPU, returns the same tensor."""
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Copy to the host without waiting for the copy: wait for the device before reading. On a CPU, returns
    the same tensor."""
    return tensor if tensor.device.type == "cpu" else _pinned(tensor).copy_(tensor, non_blocking=True)


def _pinned(tensor: Tensor) -> Tensor:
    """Allocate pinned memory of the tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@functools.cache
def loading_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which every pass loads. All passes share it, because torch keeps freed memory for
    the stream that it was allocated on: on their own streams, passes could not use the reserved memory or
    each other's.

    The first call creates it. The stream waits once for the work queued by the caller's stream until then,
    such as the tables of rotations.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def keep_for_loading(num_bytes: int, device: torch.device) -> None:
    """Reserve device memory in torch's allocator for loads. Raises `torch.OutOfMemoryError`."""
    with torch.cuda.stream(loading_stream(device)):
        torch.empty(num_bytes, dtype=torch.uint8, device=device)  # freed at once, and kept by torch


@dataclass(frozen=True)
class ChunkRows:
    """A chunk's stored tokens and their positions in the prompt."""

    manifest: ChunkManifest
    first_row: int
    """First stored token to load; the engine's prefix cache already holds those before it."""
    positions: Tensor
    """int64 `[rows]`: prompt positions of the stored tokens `[first_row, first_row + rows)`."""

    @property
    def stored_rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.positions))

    def encoding(self, layer: int) -> Encoding:
        """Return how a layer of the chunk is encoded."""
        return Encoding.of(self.manifest.layout, layer, self.manifest.codec, self.manifest.num_tokens)


StagedLayer = tuple[Tensor, Tensor, torch.cuda.Event | None]
"""K after RoPE and V, `[rows, heads, head_dim]`, of all placements; and the event after the last operation
queued for them, None on a CPU."""


class LayerStaging(ABC):
    """A layer that is being staged. Any thread may `put` a frame; one thread calls `finish` after the
    last."""

    @abstractmethod
    def put(self, index: int, data: memoryview) -> None:
        """Take the frame of placement `index`; `data` may be overwritten afterwards. Raises `Corrupted`."""

    @abstractmethod
    def finish(self, rotary: Rotary | None) -> StagedLayer:
        """Rotate the keys to their positions; None: they have no rotation."""


class Staging:
    """The placements of a pass, and the stream that its layers use."""

    def __init__(self, placements: Sequence[ChunkRows], num_heads: int, device: torch.device) -> None:
        """`num_heads`: the largest number of heads that this rank loads of a layer."""
        self.layout = placements[0].manifest.layout
        self.placements = placements
        self.device = device
        self._heads = HeadRange(0, num_heads)
        self._stream = None if device.type == "cpu" else loading_stream(device)
        with self.on_stream():
            self.positions = upload(torch.cat([placement.positions for placement in placements]), device)
        self.dtype = DTYPES[self.layout.dtype]
        ends = list(accumulate(len(placement.positions) for placement in placements))
        self.rows = [slice(end - len(p.positions), end) for p, end in zip(placements, ends, strict=True)]

    @property
    def threads(self) -> int:
        """Number of threads that should fill a layer."""
        return 1 if self._stream is None else min(THREADS_ON_DEVICE, len(self.placements))

    def on_stream(self) -> AbstractContextManager[object]:
        """Return the context in which a thread stages."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin_layer(self, layer: int) -> LayerStaging:
        return (
            _DecodedAtOnce(self, layer) if self._stream is None else _GatheredBytes(self, layer, self._stream)
        )

    def num_heads(self, layer: int) -> int:
        """Return the number of heads that this rank loads of a layer: the same share of each layer."""
        return len(self.layout.heads_of(layer, self._heads))

    def empty(self, layer: int) -> tuple[Tensor, Tensor]:
        """Allocate K and V of a layer."""
        key, value = (self._tensor(torch.empty, layer, which, len(self.positions)) for which in (0, 1))
        return key, value

    def zeros(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return zeros in place of a layer's lost K and V: views of one row, because memory may be short."""
        key, value = (self._tensor(torch.zeros, layer, which, 1) for which in (0, 1))
        rows = len(self.positions)
        return key.expand(rows, -1, -1), value.expand(rows, -1, -1)

    def _tensor(self, make: Callable[..., Tensor], layer: int, which: int, rows: int) -> Tensor:
        width = self.placements[0].encoding(layer).widths[which]
        return make(rows, self.num_heads(layer), width, dtype=self.dtype, device=self.device)

    def decode(self, layer: int, index: int, frame: Tensor, key: Tensor, value: Tensor) -> None:
        """Decode a frame's bytes into its rows of `key` and `value`."""
        placement, rows = self.placements[index], self.rows[index]
        decode_into(frame, placement.encoding(layer), placement.stored_rows, key[rows], value[rows])

    def rotate(self, key: Tensor, rotary: Rotary | None) -> Tensor:
        """Rotate the keys of a layer to their positions."""
        return key if rotary is None else rotary.rotate(key, self.positions)

    def check(self, layer: int, index: int, frame: Tensor) -> None:
        """Check the frame's scales on the host. Raises `Corrupted`."""
        check_scales(frame, self.placements[index].encoding(layer))

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after the work queued on the computation's stream so far; None on a CPU. Called by
        the computing thread."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def consume(self, key: Tensor, value: Tensor, ready: torch.cuda.Event | None) -> None:
        """Let the computation's stream wait for a layer. Called by the computing thread."""
        if ready is None:
            return
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(ready)
        for tensor in (key, value):
            tensor.record_stream(compute)


class _DecodedAtOnce(LayerStaging):
    """On a CPU: every frame is decoded into its rows when it arrives."""

    def __init__(self, staging: Staging, layer: int) -> None:
        self._staging = staging
        self._layer = layer
        self._key, self._value = staging.empty(layer)

    def put(self, index: int, data: memoryview) -> None:
        frame = as_bytes(data).view(self._staging.num_heads(self._layer), -1)
        self._staging.check(self._layer, index, frame)
        self._staging.decode(self._layer, index, frame, self._key, self._value)

    def finish(self, rotary: Rotary | None) -> StagedLayer:
        return self._staging.rotate(self._key, rotary), self._value, None


class _GatheredBytes(LayerStaging):
    """On a GPU: frames are gathered in pinned memory, copied together and decoded there."""

    def __init__(self, staging: Staging, layer: int, stream: torch.cuda.Stream) -> None:
        self._staging = staging
        self._layer = layer
        self._stream = stream
        self._heads = staging.num_heads(layer)
        sizes = [self._heads * placement.encoding(layer).head_bytes for placement in staging.placements]
        ends = accumulate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        starts = [0, *ends]
        self._frames = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        self._pinned_bytes = self._pinned.numpy()

    def put(self, index: int, data: memoryview) -> None:
        rows = self._frames[index]
        # numpy accepts read-only bytes and copies without the interpreter's lock, which would block the other
        # threads that fill the layer and the engine's.
        np.copyto(self._pinned_bytes[rows], np.frombuffer(data, np.uint8))
        self._staging.check(self._layer, index, self._pinned[rows].view(self._heads, -1))

    def finish(self, rotary: Rotary | None) -> StagedLayer:
        staging = self._staging
        on_device = self._pinned.to(staging.device, non_blocking=True)
        key, value = staging.empty(self._layer)
        for index, frame in enumerate(self._frames):
            staging.decode(self._layer, index, on_device[frame].view(self._heads, -1), key, value)
        key = staging.rotate(key, rotary)
        return key, value, self._stream.record_event()
