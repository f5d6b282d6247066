"""The way from the host's memory to the device: the one place that knows pinned memory, streams and events.

On a CPU nothing is staged: what is uploaded is the tensor itself, and a frame is decoded where it arrives.

On a GPU the bytes of a layer are gathered in pinned memory and cross the bus as they are stored, in one copy,
which the device decodes; copy and decoding are queued on a stream of their own, beside the computation. The
host never waits for either. Torch keeps pinned memory until the copies from it are done, and reuses it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kintsugi.core.layout import ChunkManifest
from kintsugi.fusor.codecs import DTYPES, as_bytes, check_scales, decode_into
from kintsugi.fusor.rope import Rotary

THREADS_ON_DEVICE = 4
"""Loader threads of a pass on a GPU. One verifies and copies an estimated 5 to 6 GB/s, a tenth of what the
bus carries. On a CPU there is one: more would take cores from the computation."""

ALIGNMENT_BYTES = 16
"""Frames start at multiples of it, so that every element type can be read in place."""


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` without waiting for the copy. On a CPU, the same tensor."""
    if device.type == "cpu":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Copy to the host without waiting for the copy: wait for the device before reading. On a CPU, the same
    tensor."""
    if tensor.device.type == "cpu":
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class ChunkPlacement:
    """One chunk's stored tokens and where they go in the prompt."""

    manifest: ChunkManifest
    first_row: int
    """First stored token to load; the engine's prefix cache already holds those before it."""
    positions: Tensor
    """int64 `[rows]`: prompt positions of the stored tokens `[first_row, first_row + rows)`."""

    @property
    def stored_rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.positions))

    def frame_bytes(self, num_heads: int) -> int:
        """Bytes of `num_heads` heads of one of its frames."""
        return num_heads * self.manifest.layout.head_bytes(self.manifest.codec, self.manifest.num_tokens)


StagedLayer = tuple[Tensor, Tensor, torch.cuda.Event | None]
"""K after RoPE and V, `[rows, heads, head_dim]`, of all placements; and the event behind the last operation
that was queued for them, None on a CPU."""


class LayerStaging(ABC):
    """One layer on its way. Any thread may `put` a frame; one thread calls `finish` after the last."""

    @abstractmethod
    def put(self, index: int, data: memoryview) -> None:
        """Take the frame of placement `index`; `data` may be overwritten afterwards. Raises `Corrupted`."""

    @abstractmethod
    def finish(self, rotary: Rotary) -> StagedLayer:
        """Rotate the keys to their positions."""


class Staging:
    """What the layers of one pass have in common, and the stream that they use."""

    def __init__(self, placements: Sequence[ChunkPlacement], num_heads: int, device: torch.device) -> None:
        layout = placements[0].manifest.layout
        self.placements = placements
        self.num_heads = num_heads
        self.device = device
        self.positions = upload(torch.cat([placement.positions for placement in placements]), device)
        self.shape = (len(self.positions), num_heads, layout.head_dim)
        self.dtype = DTYPES[layout.dtype]
        ends = list(accumulate(len(placement.positions) for placement in placements))
        self.rows = [slice(end - len(p.positions), end) for p, end in zip(placements, ends, strict=True)]
        self._stream: torch.cuda.Stream | None = None
        if device.type != "cpu":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The positions come on the stream of the pass, and are read on this one, also after `close`.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self.positions.record_stream(self._stream)

    @property
    def threads(self) -> int:
        """How many threads should fill a layer."""
        return 1 if self._stream is None else min(THREADS_ON_DEVICE, len(self.placements))

    def on_stream(self) -> AbstractContextManager[object]:
        """What a thread that stages works in."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin_layer(self) -> LayerStaging:
        return _DecodedAtOnce(self) if self._stream is None else _GatheredBytes(self, self._stream)

    def empty(self) -> tuple[Tensor, Tensor]:
        """Room for K and V of a layer."""
        key = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return key, torch.empty_like(key)

    def zeros(self) -> tuple[Tensor, Tensor]:
        """K and V in the place of those that are lost."""
        key = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return key, torch.zeros_like(key)

    def decode(self, index: int, frame: Tensor, key: Tensor, value: Tensor) -> None:
        """Decode a frame's bytes into its rows of `key` and `value`."""
        placement = self.placements[index]
        manifest, rows = placement.manifest, self.rows[index]
        decode_into(
            frame,
            manifest.layout,
            manifest.codec,
            manifest.num_tokens,
            placement.stored_rows,
            key[rows],
            value[rows],
        )

    def check(self, index: int, frame: Tensor) -> None:
        """Check the frame's scales on the host. Raises `Corrupted`."""
        manifest = self.placements[index].manifest
        check_scales(frame, manifest.layout, manifest.codec, manifest.num_tokens)

    def consume(self, key: Tensor, value: Tensor, ready: torch.cuda.Event | None) -> None:
        """Let the computation's stream wait for a layer; called by the thread that computes."""
        if ready is None:
            return
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(ready)
        for tensor in (key, value):
            tensor.record_stream(compute)


class _DecodedAtOnce(LayerStaging):
    """On a CPU: every frame is decoded into its rows when it arrives."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._key, self._value = staging.empty()

    def put(self, index: int, data: memoryview) -> None:
        frame = as_bytes(data).view(self._staging.num_heads, -1)
        self._staging.check(index, frame)
        self._staging.decode(index, frame, self._key, self._value)

    def finish(self, rotary: Rotary) -> StagedLayer:
        return rotary.rotate(self._key, self._staging.positions), self._value, None


class _GatheredBytes(LayerStaging):
    """On a GPU: frames are gathered in pinned memory, copied together and decoded there."""

    def __init__(self, staging: Staging, stream: torch.cuda.Stream) -> None:
        self._staging = staging
        self._stream = stream
        sizes = [placement.frame_bytes(staging.num_heads) for placement in staging.placements]
        ends = accumulate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        starts = [0, *ends]
        self._frames = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)

    def put(self, index: int, data: memoryview) -> None:
        frame = as_bytes(data)
        self._staging.check(index, frame.view(self._staging.num_heads, -1))
        self._pinned[self._frames[index]].copy_(frame)

    def finish(self, rotary: Rotary) -> StagedLayer:
        staging = self._staging
        on_device = self._pinned.to(staging.device, non_blocking=True)
        key, value = staging.empty()
        for index, frame in enumerate(self._frames):
            staging.decode(index, on_device[frame].view(staging.num_heads, -1), key, value)
        key = rotary.rotate(key, staging.positions)
        return key, value, self._stream.record_event()
