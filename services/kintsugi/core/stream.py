"""What a stream of chunk KV yields: produced by `client` stores, consumed by `fusor.loader`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFrame:
    """The bytes of some heads of one layer of one chunk, verified, as they arrive."""

    chunk: int
    """Index into the request's keys."""
    layer: int
    data: memoryview
    """`layout.head_bytes(codec, tokens) · len(heads)` bytes, valid until the next frame is taken."""


@dataclass(frozen=True)
class ChunkLost:
    """In place of a frame: this chunk can no longer be read. Its other frames do not follow."""

    chunk: int
    layer: int
    reason: str
