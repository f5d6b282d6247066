"""A namespace is charged what its chunks take, whatever their shape, and manifests take bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.namespaces import NamespaceLimits, NamespaceRules
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint
from kintsugi.store.protocol.wire import memory_bytes
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions

MIB = 1 << 20
SPACE = ChunkSpace(ModelFingerprint(bytes(32)), "acme")
SHAPES = {
    "one token": KVLayout.uniform(1, 1, 1, "float16"),
    "many layers": KVLayout.uniform(256, 1, 1, "float16"),
    "many heads": KVLayout.uniform(4, 512, 1, "float16"),
}


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    ssd = SsdSpec(tmp_path / "disk", 64 * MIB)
    with closing(open_shard(ShardSpec(16 * MIB, tmp_path / "data", (ssd,)))) as opened:
        yield opened


def manifest_of(layout: KVLayout, number: int) -> tuple[ChunkManifest, Sequence[bytes]]:
    frames = [bytes(layout.frame_bytes(Codec.RAW, 1))] * layout.num_layers
    key = ChunkKey(number.to_bytes(32, "little"))
    return ChunkManifest.of(SPACE, key, (number,), 1, layout, Codec.RAW, frames), frames


def put(shard: Shard, layout: KVLayout, number: int, wait_s: float = 10.0) -> ChunkKey:
    manifest, frames = manifest_of(layout, number)
    begun = shard.begin_put(manifest, PutOptions(durable=True), wait_s=wait_s)
    assert begun is not None
    for layer, frame in zip(manifest.layers, frames, strict=True):
        begun.write(layer, memoryview(frame))
    durable = shard.commit(begun).durable
    assert durable is not None
    durable.result(10.0)
    return manifest.key


@pytest.mark.parametrize("layout", SHAPES.values(), ids=SHAPES)
def test_a_chunk_is_charged_what_it_takes(shard: Shard, layout: KVLayout, tmp_path: Path) -> None:
    keys = [put(shard, layout, number) for number in range(8)]
    manifest, _ = manifest_of(layout, 0)
    files = sum(file.stat().st_blocks << 9 for file in tmp_path.rglob("catalog/data.mdb"))
    charged = {tier.name: tier.bytes_by_namespace["acme"] for tier in (shard.ram, *shard.disks)}
    assert charged["ram"] >= shard.ram.used_bytes + 8 * len(manifest.digests)
    assert charged["ssd0"] >= shard.disks[0].used_bytes + 8 * 2 * len(manifest.digests)
    assert sum(charged.values()) >= shard.table.used_bytes() + files - MIB // 16
    shard.delete("acme", keys)
    for tier in (shard.ram, *shard.disks):
        assert tier.bytes_by_namespace == {}


def test_a_limit_holds_for_chunks_that_hardly_have_frames(shard: Shard) -> None:
    limits = NamespaceLimits(ram_gib=1 / 1024, ssd_gib=1 / 1024)
    shard.table.shares.rules = NamespaceRules({"acme": limits})
    for number in range(300):
        put(shard, SHAPES["one token"], number)
    assert shard.ram.used_bytes + shard.disks[0].used_bytes <= 2 * MIB
    assert 0 < len(shard.table) < 150
    with pytest.raises(ResourceExhausted, match="ram_gib"):
        put(shard, SHAPES["many layers"], 0)


def test_manifests_take_no_more_memory_than_they_may(shard: Shard) -> None:
    layout = SHAPES["many heads"]
    each = memory_bytes(manifest_of(layout, 0)[0])
    shard.table._room.index_bytes_max = 10 * each
    for number in range(40):
        put(shard, layout, number)
    assert shard.table._index.memory_bytes == 10 * each
    assert len(shard.table) == 10
    kept = [entry.manifest.key for entry in shard.table.entries()]
    lease_id, pinned = shard.pin("acme", kept, 60.0)
    assert pinned == 10
    with pytest.raises(ResourceExhausted):
        put(shard, layout, 99, wait_s=0.0)
    shard.table.unpin(lease_id)
    put(shard, layout, 99)
    assert len(shard.table) == 10
