"""Measures the cost of encryption: reads from a namespace with keys and from one without, in one shard's RAM.

Chunks are those of `benchmarks/store.py`: 512 tokens of an 8-head, 32-layer, bf16 model. Each round reads
both namespaces and runs the bare cipher, in an order that the seed decides; a figure is the median of the
rounds' ratios. Digests or tags are verified in every measured read. The shard runs in a process of its own.

The *bare* reads bound what encryption leaves possible on this machine: reads of the unencrypted chunks with a
loop of AES-GCM, head range by head range, in place of their copies and digests.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from benchmarks.store import (
    EVERY_HEAD,
    GB,
    LAYOUT,
    TOKENS,
    Server,
    make_chunk,
    own_cpu_s,
    served,
)
from benchmarks.support.figures import Figure, spread
from kintsugi.core.layout import ChunkManifest, Codec, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.key_file import KeyFile, create_keys
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.received import ArenaMap
from kintsugi.store.protocol.interface import LayerFrame

PLAIN, ENCRYPTED, BARE = "plain", "encrypted", "bare"
SHORT_TOKENS = 64
"""Small head ranges, for which a cipher's fixed cost matters most."""
BARS = {"same_host": 0.8, "grpc": 0.95}
OF_BARE = 0.95


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    chunks: int
    rounds: int


FULL = Scale(chunks=4, rounds=21)
QUICK = Scale(chunks=4, rounds=5)

Chunk = tuple[ChunkManifest, list[memoryview]]


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """Read rates with encryption ÷ without, over both paths, beside the bare cipher; puts and other shapes
    besides, without a bar."""
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
            for path in BARS:
                options = GrpcOptions(same_host=path == "same_host", keys=keys)
                with closing(GrpcStore(server.address, options)) as store:
                    if not figures:
                        figures.append(_put_ratio(store, chunks))
                        _put_ratio(store, short)
                    figures += _path_figures(path, _Reads(store, server), chunks, short, scale, order)
    return figures


def _path_figures(
    path: str,
    reads: _Reads,
    chunks: Sequence[Chunk],
    short: Sequence[Chunk],
    scale: Scale,
    order: random.Random,
) -> list[Figure]:
    """The figures of one path. Its ratio holds if it reaches the bar or, on the same host, .95 of the bare
    ratio."""
    kinds: dict[str, Callable[[], int]] = {
        PLAIN: partial(reads.read, PLAIN, _keys_of(chunks)),
        ENCRYPTED: partial(reads.read, ENCRYPTED, _keys_of(chunks)),
        BARE: partial(reads.read_bare, _keys_of(chunks)),
    }
    rounds = reads.measure(kinds, scale, order)
    ratios, of_bare = rounds.rates_against(ENCRYPTED, PLAIN), rounds.rates_against(ENCRYPTED, BARE)
    ratio, share = statistics.median(ratios), statistics.median(of_bare)
    holds = ratio >= BARS[path] or (path == "same_host" and share >= OF_BARE)
    bar = f"≥ {BARS[path]:g}" + (f" or {OF_BARE:g} of bare" if path == "same_host" else "")
    figures = [
        Figure(f"encryption_{path}_ratio", ratio, "×", bar, holds, spread(ratios, "×")),
        Figure(f"encryption_{path}_of_bare_ratio", share, "×", detail=spread(of_bare, "×")),
        *(
            Figure(f"encryption_{path}_{kind}_cpu_s_per_gb", statistics.median(costs), "s/GB")
            for kind, costs in rounds.cpu_s_per_gb.items()
        ),
    ]
    for name, some, heads in (
        ("one_head", chunks, HeadRange(0, 1)),
        (f"{SHORT_TOKENS}_tokens", short, EVERY_HEAD),
    ):
        others: dict[str, Callable[[], int]] = {
            namespace: partial(reads.read, namespace, _keys_of(some), heads)
            for namespace in (PLAIN, ENCRYPTED)
        }
        ratios = reads.measure(others, scale, order).rates_against(ENCRYPTED, PLAIN)
        figures.append(Figure(f"encryption_{path}_{name}_ratio", statistics.median(ratios), "×"))
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


@dataclass(frozen=True)
class _Rounds:
    """What each kind of read took in each round."""

    gb_per_s: dict[str, list[float]]
    cpu_s_per_gb: dict[str, list[float]]

    def rates_against(self, kind: str, base: str) -> list[float]:
        return [one / other for one, other in zip(self.gb_per_s[kind], self.gb_per_s[base], strict=True)]


@dataclass(frozen=True)
class _Reads:
    """Reads from one shard over one path."""

    store: GrpcStore
    server: Server

    def measure(self, kinds: dict[str, Callable[[], int]], scale: Scale, order: random.Random) -> _Rounds:
        """Run each kind once in every round. A kind returns the number of bytes that it read."""
        rounds = _Rounds({kind: [] for kind in kinds}, {kind: [] for kind in kinds})
        for read in kinds.values():
            read()  # what is touched first is mapped first
        for _ in range(scale.rounds):
            for kind in order.sample(list(kinds), len(kinds)):
                cpu_s, began_s = own_cpu_s() + self.server.cpu_s(), time.perf_counter()
                gb = kinds[kind]() / GB
                rounds.gb_per_s[kind].append(gb / (time.perf_counter() - began_s))
                rounds.cpu_s_per_gb[kind].append((own_cpu_s() + self.server.cpu_s() - cpu_s) / gb)
        return rounds

    def read(self, namespace: str, keys: Sequence[ChunkKey], heads: HeadRange = EVERY_HEAD) -> int:
        size = frames = 0
        for item in self.store.stream(namespace, keys, range(LAYOUT.num_layers), heads, deadline_s=600.0):
            assert isinstance(item, LayerFrame), item
            size += len(item.data)
            frames += 1
        assert frames == len(keys) * LAYOUT.num_layers
        return size

    def read_bare(self, keys: Sequence[ChunkKey]) -> int:
        with _bare_cipher():
            return self.read(PLAIN, keys)


@contextmanager
def _bare_cipher() -> Iterator[None]:
    """Make reads of unencrypted chunks decrypt every head range instead of verifying it; the output is
    ignored."""
    aes, size = AES(bytes(32)), LAYOUT.head_bytes(Codec.RAW, TOKENS)
    room = memoryview(bytearray(LAYOUT.frame_bytes(Codec.RAW, TOKENS)))

    def decrypt(data: memoryview, into: memoryview) -> bool:
        for start in range(0, len(data), size):
            decryptor = Cipher(aes, GCM(bytes(12), bytes(16))).decryptor()
            decryptor.update_into(data[start : start + size], into[start : start + size])
            with suppress(InvalidTag):
                decryptor.finalize()
        return True

    def copy(
        arena: ArenaMap, offset: int, into: memoryview, manifest: ChunkManifest, layer: int, heads: HeadRange
    ) -> bool:
        return decrypt(arena._view[offset : offset + len(into)], into)

    def is_intact(manifest: ChunkManifest, layer: int, heads: HeadRange, frame: memoryview) -> bool:
        return decrypt(frame, room)

    with (
        patch.object(ArenaMap, "copy_frame", copy),
        patch.object(ChunkManifest, "frame_is_intact", is_intact),
    ):
        yield
