"""Streams frames of chunks from two namespaces: a request's own and the one that it shares."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.engine.protocol import LoadSample, ProbeJob
from kintsugi.fusor.control.estimates import Meter
from kintsugi.store.client.merge import ShardStream
from kintsugi.store.protocol.interface import ChunkLost, ChunkStore, LayerFrame

STORE_SHARE = 0.8
"""Share of a layer's deadline that the store gets as its own deadline. A store that misses it reports the
late chunk; if the layer's whole deadline passes without an answer, every chunk counts as lost."""


def stream_chunks(
    store: ChunkStore,
    manifests: Sequence[ChunkManifest],
    layers: range,
    heads: HeadRange,
    deadline_s: float,
) -> Generator[LayerFrame | ChunkLost, None, None]:
    """Stream the chunks of these manifests as `ChunkStore.stream` does."""
    by_namespace: dict[str, list[int]] = {}
    for index, manifest in enumerate(manifests):
        by_namespace.setdefault(manifest.namespace, []).append(index)

    def open_stream(namespace: str) -> Generator[LayerFrame | ChunkLost, None, None]:
        keys = [manifests[index].key for index in by_namespace[namespace]]
        return store.stream(namespace, keys, layers, heads, deadline_s)

    if len(by_namespace) == 1:
        return open_stream(manifests[0].namespace)
    parts = {name: ShardStream(chunks, open_stream(name)) for name, chunks in by_namespace.items()}
    return _in_order([parts[manifest.namespace] for manifest in manifests], layers)


def read_and_drop(
    store: ChunkStore, job: ProbeJob, layers: range, heads: HeadRange, deadline_s: float
) -> LoadSample:
    """Read layers of a job's chunks to measure loading, without decoding them."""
    manifests = [job.manifests[hit.key] for hit in job.hits]
    meter = Meter([hit.source for hit in job.hits], layers.stop)
    for _ in meter.measure(stream_chunks(store, manifests, layers, heads, deadline_s)):
        pass
    return replace(LoadSample.of([meter]), decode_s=0.0, decode_bytes=0)


def _in_order(streams: Sequence[ShardStream], layers: range) -> Generator[LayerFrame | ChunkLost, None, None]:
    """Yield the frames of several streams by layer and chunk. ``streams``: the stream of each chunk."""
    lost: set[int] = set()
    try:
        for stream in dict.fromkeys(streams):
            stream.prime()
        for layer in layers:
            for chunk, stream in enumerate(streams):
                item = None if chunk in lost else stream.next_item(layer)
                if item is None:
                    continue
                if isinstance(item, ChunkLost):
                    lost.add(item.chunk)
                yield item
    finally:
        for stream in dict.fromkeys(streams):
            stream.close()
