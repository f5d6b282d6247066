"""Replaces stored chunks by chunks with other bytes and right digests, as another codec or a defect would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kintsugi.core.exchange import ChunkLost
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout, digests_of
from kintsugi.fusor.codecs import NAMES, decode_frame, encode_frame
from kintsugi.quality.measure import NAMESPACE
from kintsugi.store.client.ram import RamStore

CHUNKS_MAX = 1_000_000
DEADLINE_S = 60.0

Alter = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Layer, K before RoPE and V -> K and V."""


@dataclass(frozen=True)
class Stored:
    """A chunk outside its store."""

    manifest: ChunkManifest
    frames: tuple[bytes, ...]


def stored(store: RamStore) -> list[Stored]:
    """Copies of every chunk that a bench has stored."""
    return [_copied(store, manifest) for manifest in store.list(NAMESPACE, CHUNKS_MAX)]


def _copied(store: RamStore, manifest: ChunkManifest) -> Stored:
    layers, heads = range(manifest.layout.num_layers), HeadRange(0, manifest.layout.num_kv_heads)
    frames = []
    for frame in store.stream(NAMESPACE, [manifest.key], layers, heads, DEADLINE_S):
        assert not isinstance(frame, ChunkLost)
        frames.append(bytes(frame.data))
    return Stored(manifest, tuple(frames))


def unaltered(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


def quantised(codec: Codec, first_layer: int = 0) -> Alter:
    """What `codec` makes of K and V, from `first_layer` on."""

    def alter(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer < first_layer:
            return key, value
        layout = KVLayout.uniform(1, key.shape[1], key.shape[2], NAMES[key.dtype])
        return decode_frame(encode_frame(key, value, codec), layout, codec, len(key))

    return alter


def put_back(store: RamStore, chunk: Stored, codec: Codec, alter: Alter = unaltered) -> None:
    """Replace what `store` holds of a chunk."""
    manifest = chunk.manifest
    layout, num_tokens = manifest.layout, manifest.num_tokens
    pairs = (decode_frame(memoryview(frame), layout, manifest.codec, num_tokens) for frame in chunk.frames)
    frames = [encode_frame(*alter(layer, *pair), codec) for layer, pair in enumerate(pairs)]
    digests = b"".join(digests_of(frame, layout.head_bytes(codec, num_tokens)) for frame in frames)
    store.delete(NAMESPACE, [manifest.key])
    assert store.put(dataclasses.replace(manifest, codec=codec, digests=digests), frames)
