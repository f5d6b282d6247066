"""What encryption costs: chunks of a namespace with keys and of one without, in the RAM of one shard.

Chunks are those of `benchmarks/store.py`: 512 tokens of an 8-head, 32-layer, bf16 model. Each round reads
both namespaces, in an order that the seed decides; a figure is the median of the rounds' ratios. Digests or
tags are verified in every measured read. The shard runs in a process of its own.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.store import EVERY_HEAD, GB, LAYOUT, make_chunk, served
from benchmarks.support.figures import Figure, spread
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.key_file import KeyFile, create_keys
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.protocol.interface import LayerFrame

PLAIN, ENCRYPTED = "plain", "encrypted"
SHORT_TOKENS = 64
"""Small head ranges: the fixed cost of a cipher weighs most."""
BARS = {"same_host": 0.8, "grpc": 0.95}


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    chunks: int
    rounds: int


FULL = Scale(chunks=8, rounds=15)
QUICK = Scale(chunks=4, rounds=5)

Chunk = tuple[ChunkManifest, list[memoryview]]


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """Read rates with encryption ÷ without, over both paths; puts and other shapes besides, without a bar."""
    scale, order = QUICK if quick else FULL, random.Random(seed)
    chunks = [make_chunk(index) for index in range(scale.chunks)]
    short = [make_chunk(index, SHORT_TOKENS) for index in range(scale.chunks)]
    total = sum(manifest.chunk_bytes for manifest, _ in (*chunks, *short))
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        create_keys(folder / "keys.json", ENCRYPTED)
        keys = KeyFile(folder / "keys.json")
        with served(folder, f"{3 * total >> 20}MiB") as server:
            for path, bar in BARS.items():
                options = GrpcOptions(same_host=path == "same_host", keys=keys)
                with closing(GrpcStore(server.address, options)) as store:
                    if not figures:
                        figures.append(_put_ratio(store, chunks))
                        _put_ratio(store, short)
                    ratios = _read_ratios(store, _keys_of(chunks), scale, order)
                    figures.append(
                        Figure.at_least(
                            f"encryption_{path}_ratio",
                            statistics.median(ratios),
                            bar,
                            detail=spread(ratios, "×"),
                        )
                    )
                    one_head = _read_ratios(store, _keys_of(chunks), scale, order, HeadRange(0, 1))
                    tiny = _read_ratios(store, _keys_of(short), scale, order)
                    figures += [
                        Figure(f"encryption_{path}_one_head_ratio", statistics.median(one_head), "×"),
                        Figure(
                            f"encryption_{path}_{SHORT_TOKENS}_tokens_ratio", statistics.median(tiny), "×"
                        ),
                    ]
    return figures


def _keys_of(chunks: Sequence[Chunk]) -> list[ChunkKey]:
    return [manifest.key for manifest, _ in chunks]


def _put_ratio(store: GrpcStore, chunks: Sequence[Chunk]) -> Figure:
    """Store the chunks in both namespaces, one in turn with the other."""
    elapsed_s = {PLAIN: 0.0, ENCRYPTED: 0.0}
    for manifest, frames in chunks:
        for namespace in elapsed_s:
            began_s = time.perf_counter()
            assert store.put(replace(manifest, namespace=namespace), frames)
            elapsed_s[namespace] += time.perf_counter() - began_s
    return Figure("encryption_put_ratio", elapsed_s[PLAIN] / elapsed_s[ENCRYPTED], "×")


def _read_ratios(
    store: GrpcStore,
    keys: Sequence[ChunkKey],
    scale: Scale,
    order: random.Random,
    heads: HeadRange = EVERY_HEAD,
) -> list[float]:
    """The encrypted namespace's rate ÷ the plain one's, for each round."""
    namespaces = [PLAIN, ENCRYPTED]
    for namespace in namespaces:
        _read_gb_per_s(store, namespace, keys, heads)  # what is touched first is mapped first
    ratios = []
    for _ in range(scale.rounds):
        order.shuffle(namespaces)
        rates = {namespace: _read_gb_per_s(store, namespace, keys, heads) for namespace in namespaces}
        ratios.append(rates[ENCRYPTED] / rates[PLAIN])
    return ratios


def _read_gb_per_s(store: GrpcStore, namespace: str, keys: Sequence[ChunkKey], heads: HeadRange) -> float:
    size = frames = 0
    began_s = time.perf_counter()
    for item in store.stream(namespace, keys, range(LAYOUT.num_layers), heads, deadline_s=30.0):
        assert isinstance(item, LayerFrame), item
        size += len(item.data)
        frames += 1
    elapsed_s = time.perf_counter() - began_s
    assert frames == len(keys) * LAYOUT.num_layers
    return size / elapsed_s / GB
