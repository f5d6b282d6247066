"""Measures the bytes that a process keeps per byte charged to a namespace, by kind of item.

Each kind is measured in a separate process, with the shapes whose overhead is largest: chunks with one token,
with a head for each byte, with frames far smaller than a block. Kept is what the process's memory grows by,
and what the tiers and catalogs on disk take. For items other than chunks (`tests.fakes.kept`), it is the
memory that they take of Python's heap.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.support.engines import say
from benchmarks.support.figures import Figure
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout, digests_of
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.protocol import wire
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.fakes.kept import KINDS as OTHERS
from tests.fakes.kept import NAMES, measure_heap

MIB = 1 << 20
ITEMS = 5000
BAR = 1.2
NAMESPACE = "acme"


@dataclass(frozen=True)
class Shape:
    """Chunks of one layout."""

    layers: int
    heads: int
    width: int
    tokens: int
    count: int
    fields: int = 0
    """Anchors; four times as many context keys."""


SHAPES = {
    "ordinary": Shape(30, 3, 64, 256, 40),
    "one token": Shape(1, 1, 1, 1, 6000),
    "many layers": Shape(1024, 1, 1, 1, 60),
    "many heads": Shape(128, 512, 1, 1, 150),
    "many fields": Shape(1, 1, 1, 1, 3000, 16),
}


def _rss_anon() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def _make(shape: Shape, number: int) -> tuple[ChunkManifest, list[bytes]]:
    layout = KVLayout.uniform(shape.layers, shape.heads, shape.width, "float16")
    space = ChunkSpace(ModelFingerprint(bytes(32)), NAMESPACE)
    frame = bytes(layout.frame_bytes(Codec.RAW, shape.tokens))
    digests = digests_of(frame, layout.head_bytes(Codec.RAW, shape.tokens)) * shape.layers
    generator = random.Random(number)
    manifest = ChunkManifest(
        key=ChunkKey(generator.randbytes(32)),
        space_digest=space.digest,
        fingerprint=space.fingerprint,
        namespace=NAMESPACE,
        num_tokens=shape.tokens,
        layout=layout,
        codec=Codec.RAW,
        anchors=tuple(generator.getrandbits(64) for _ in range(shape.fields)),
        digests=digests,
        context_keys=tuple(ChunkKey(generator.randbytes(32)) for _ in range(4 * shape.fields)),
    )
    received = pb.Manifest.FromString(wire.manifest_to_wire(manifest).SerializeToString())
    return wire.manifest_from_wire(received), [frame] * shape.layers


def _put(shard: Shard, shape: Shape, numbers: range) -> None:
    for number in numbers:
        manifest, frames = _make(shape, number)
        begun = shard.begin_put(manifest, PutOptions(), wait_s=60.0)
        assert begun is not None
        for layer, frame in zip(manifest.layers, frames, strict=True):
            begun.write(layer, memoryview(frame))
        shard.commit(begun)
    for done in shard.flush_writers():
        done.result(60.0)


def _chunks(shape: Shape, divisor: int) -> tuple[int, int]:
    """Bytes kept and charged for chunks that mostly lie on disk alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        spec = ShardSpec(16 * MIB, path / "data", (SsdSpec(path / "disk", 1 << 30),))
        with closing(open_shard(spec)) as shard:
            tiers = (shard.ram, *shard.disks)

            def kept() -> int:
                files = sum(file.stat().st_blocks << 9 for file in path.rglob("catalog/data.mdb"))
                return _rss_anon() + files + sum(tier.used_bytes for tier in tiers)

            def charged() -> int:
                return sum(tier.bytes_by_namespace.get(NAMESPACE, 0) for tier in tiers)

            first = max(shape.count // 10, 2)
            _put(shard, shape, range(first))
            before, before_charged = kept(), charged()
            _put(shard, shape, range(first, first + max(shape.count // divisor, 10)))
            return kept() - before, charged() - before_charged


def _beside(kind: str, names: str, divisor: int) -> tuple[int, float]:
    return measure_heap(kind, names, ITEMS // divisor)


KINDS: dict[str, Callable[[int], tuple[int, float]]] = {
    **{f"chunks, {name}": partial(_chunks, shape) for name, shape in SHAPES.items()},
    **{f"{kind}, {names}": partial(_beside, kind, names) for kind in OTHERS for names in NAMES},
}


def _run(kind: str, divisor: int) -> tuple[int, float]:
    return KINDS[kind](divisor)


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """The section's figures."""
    ratios = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for kind in KINDS:
            kept, charged = processes.submit(_run, kind, 5 if quick else 1).result()
            ratios[kind] = kept / max(charged, 1)
            say(f"{kind}: {kept} bytes kept, {charged:.0f} charged")
    detail = "; ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())
    return [Figure.at_most("held_bytes_uncounted", max(ratios.values()), BAR, detail=detail)]
