"""Frames of chunks in two namespaces, in the order that the loader expects."""

from __future__ import annotations

import pytest

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkSpace
from kintsugi.engine.worker.streams import stream_chunks
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame
from tests.contracts.store_contract import SPACE, make_chunk

OWN, SHARED = (ChunkSpace(SPACE.fingerprint, name) for name in ("team/ada", "team"))


def put(store: RamStore, space: ChunkSpace, tokens: int) -> tuple[ChunkManifest, list[bytes]]:
    manifest, frames = make_chunk(range(tokens), space)
    store.put(manifest, frames)
    return manifest, [bytes(frame) for frame in frames]


@pytest.mark.parametrize("lost", [None, 1, 2])
def test_frames_come_layer_by_layer_in_the_order_of_the_chunks(lost: int | None) -> None:
    store = RamStore()
    chunks = [put(store, space, 40 + index) for index, space in enumerate((OWN, SHARED, OWN, SHARED))]
    manifests = [manifest for manifest, _ in chunks]
    layout = manifests[0].layout
    if lost is not None:
        store.delete(manifests[lost].namespace, [manifests[lost].key])
    layers = range(layout.num_layers)
    items = [
        (type(item), item.layer, item.chunk, bytes(item.data) if isinstance(item, LayerFrame) else b"")
        for item in stream_chunks(store, manifests, layers, HeadRange(0, layout.num_kv_heads), 5.0)
    ]
    expected = [
        (ChunkLost, layer, chunk, b"") if chunk == lost else (LayerFrame, layer, chunk, frames[layer])
        for layer in layers
        for chunk, (_, frames) in enumerate(chunks)
        if chunk != lost or layer == 0
    ]
    assert items == expected


def test_closing_early_ends_every_stream() -> None:
    store = RamStore()
    manifests = [put(store, space, 40)[0] for space in (OWN, SHARED)]
    layout = manifests[0].layout
    frames = stream_chunks(store, manifests, range(layout.num_layers), HeadRange(0, layout.num_kv_heads), 5.0)
    next(frames)
    frames.close()
    assert next(frames, None) is None
