"""What a shard does with a folder that another version of kintsugi wrote."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kintsugi.cli.exits import ExitCode
from kintsugi.core.deploy import StoreSpec, TierSpec
from kintsugi.core.errors import VersionMismatch
from kintsugi.core.layout import FORMAT, ChunkManifest, Codec, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.serving.store_shard import claim_shard
from kintsugi.store.shard import work
from kintsugi.store.shard.entry import charge_of
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.reading import HeldChunk
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.lower_tier import _decode_catalog_record, _encode_catalog_record
from kintsugi.store.shard.workers import writeback
from tests.contracts.store_contract import Chunk, make_encrypted_chunk, make_mixed_chunk
from tests.integration.store.test_disk_tiers import MIB, many, put, spec

OTHER = FORMAT + 1
"""A format of a later version."""


def filled(shard_spec: ShardSpec, first: int = 0, stop: int = 5) -> list[ChunkKey]:
    """Keys of chunks that a shard now has on its first SSD tier."""
    chunks = many(stop, tokens=40)[first:]
    with closing(open_shard(shard_spec)) as shard:
        for manifest, frames in chunks:
            put(shard, manifest, frames)
    return [manifest.key for manifest, _ in chunks]


def intact(shard_spec: ShardSpec, keys: list[ChunkKey]) -> int:
    """How many of the chunks the shard has, every byte as it was."""
    with closing(open_shard(shard_spec)) as shard:
        return sum(shard.verify("acme", keys).values())


def digests_below(folder: Path) -> dict[Path, str]:
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def rewrite(tier: Path, change: Callable[[pb.CatalogRecord], None], count: int | None = None) -> None:
    """Change the first records of a disk's catalog, with right checksums; without a count, all."""
    catalog = lmdb.open(str(tier / "kintsugi-tier/catalog"))
    with catalog, catalog.begin(write=True) as transaction:
        for key, value in list(transaction.cursor())[:count]:
            record = _decode_catalog_record(key, value)
            assert record is not None
            change(record)
            transaction.put(key, _encode_catalog_record(key, record))


def stamp(tier: Path, version: int, count: int | None = None) -> None:
    """Have the first chunks of a disk say that they are of another format."""

    def change(record: pb.CatalogRecord) -> None:
        record.manifest.format_version = version

    rewrite(tier, change, count)


def test_a_folder_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    keys = filled(spec(tmp_path))
    stamp(tmp_path / "disk0", OTHER)
    before = digests_below(tmp_path)
    with pytest.raises(VersionMismatch) as refused:
        open_shard(spec(tmp_path, ssd_mib=(32,)))  # and the slab does not grow
    assert str(refused.value) == (
        f"{tmp_path / 'disk0/kintsugi-tier'} holds 5 chunks of format {OTHER}; this version of kintsugi "
        "reads format 1. Nothing was changed: use the version that wrote them, or name another folder"
    )
    assert digests_below(tmp_path) == before
    stamp(tmp_path / "disk0", FORMAT)
    assert intact(spec(tmp_path), keys) == 5


def test_a_folder_with_one_chunk_of_another_version_is_refused(tmp_path: Path) -> None:
    filled(spec(tmp_path))
    stamp(tmp_path / "disk0", OTHER, 2)
    before = digests_below(tmp_path)
    with pytest.raises(VersionMismatch, match=f"3 chunks of format 1 and 2 chunks of format {OTHER};"):
        open_shard(spec(tmp_path))
    assert digests_below(tmp_path) == before


@pytest.mark.parametrize("make", [make_mixed_chunk, make_encrypted_chunk])
def test_chunks_of_every_shape_survive_a_restart_side_by_side(
    make: Callable[[range], Chunk], tmp_path: Path
) -> None:
    chunks = [*many(3, tokens=40), make(range(5000, 5300))]
    with closing(open_shard(spec(tmp_path))) as shard:
        for manifest, frames in chunks:
            put(shard, manifest, frames)
        for flushed in shard.flush_writers():
            flushed.result(10.0)
    with closing(open_shard(spec(tmp_path))) as shard:
        for manifest, frames in chunks:
            entry = shard.table.get(("acme", manifest.key))
            assert entry is not None
            assert entry.manifest == manifest
            assert entry.disk is not None
            reading = shard.open("acme", [manifest.key], every_frame(manifest), every_head(manifest))
            (held,) = reading.chunks
            assert held is not None
            read = [bytes(frame_of(shard, held, layer)) for layer in manifest.layers]
            shard.table.close(reading)
            assert read == frames
        assert shard.verify("acme", [manifest.key for manifest, _ in chunks]) == {
            manifest.key: True for manifest, _ in chunks
        }


def test_frames_of_several_sizes_are_demoted_and_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "_BOUNCE_BYTES", 1 << 17)  # a chunk moves in several steps
    monkeypatch.setattr(work, "LOAD_STEP_BYTES", 1 << 17)
    chunks = [make_mixed_chunk(range(start, start + 400)) for start in range(0, 24_000, 1000)]
    keys = [manifest.key for manifest, _ in chunks]
    tiers = spec(tmp_path, ssd_mib=(3, 16))
    with closing(open_shard(tiers)) as shard:
        for manifest, frames in chunks:
            put(shard, manifest, frames)
        assert shard.disks[0].evictions > 0
        assert shard.disks[1].chunks > 0
        assert shard.verify("acme", keys) == dict.fromkeys(keys, True)
    with closing(open_shard(tiers)) as shard:
        assert shard.verify("acme", keys) == dict.fromkeys(keys, True)
        manifest, frames = chunks[0]
        assert shard.lookup("acme", keys[:1])[0] is not None
        reading = shard.open("acme", keys[:1], every_frame(manifest), every_head(manifest))
        (held,) = reading.chunks
        assert held is not None
        assert [bytes(frame_of(shard, held, layer)) for layer in manifest.layers] == frames
        shard.table.close(reading)


def every_frame(manifest: ChunkManifest) -> range:
    return range(manifest.layers[0], manifest.layout.num_layers)


def every_head(manifest: ChunkManifest) -> HeadRange:
    return HeadRange(0, manifest.layout.num_kv_heads)


def frame_of(shard: Shard, chunk: HeldChunk, layer: int) -> memoryview:
    """A frame once its promotion has read it."""
    there = threading.Event()
    while not shard.table.await_layer(chunk, layer, there.set):
        assert there.wait(10.0)
        there.clear()
    return chunk.frame(layer)


def test_what_a_namespace_is_charged_is_recorded(tmp_path: Path) -> None:
    """So it is given back as it was taken, whatever a later version charges."""
    (key,) = filled(spec(tmp_path), stop=1)
    (manifest, _) = many(1, tokens=40)[0]
    more = charge_of(manifest) + 100

    def charge(record: pb.CatalogRecord) -> None:
        assert record.charged_bytes == charge_of(manifest)
        record.charged_bytes = more

    rewrite(tmp_path / "disk0", charge)
    with closing(open_shard(spec(tmp_path))) as shard:
        entry = shard.table.get(("acme", key))
        assert entry is not None
        assert entry.charged_bytes == more
        assert shard.disks[0].bytes_by_namespace == {"acme": more}
        shard.delete("acme", [key])
        assert shard.disks[0].bytes_by_namespace == {}


def test_a_record_that_charges_less_than_its_frames_costs_its_chunk_alone(tmp_path: Path) -> None:
    keys = filled(spec(tmp_path))

    def charge_nothing(record: pb.CatalogRecord) -> None:
        record.charged_bytes = 0

    rewrite(tmp_path / "disk0", charge_nothing, 1)
    assert intact(spec(tmp_path), keys) == 4


def test_a_chunk_in_an_unknown_codec_is_not_deleted(tmp_path: Path) -> None:
    """A version that adds a codec need not change the format."""

    def recode(record: pb.CatalogRecord) -> None:
        record.manifest.codec = 99

    def restore(record: pb.CatalogRecord) -> None:
        record.manifest.codec = int(Codec.RAW)

    keys = filled(spec(tmp_path))
    rewrite(tmp_path / "disk0", recode, 2)
    with pytest.raises(VersionMismatch, match=r"codec: 99 is unknown.*name another folder"):
        open_shard(spec(tmp_path))
    rewrite(tmp_path / "disk0", restore, 2)
    assert intact(spec(tmp_path), keys) == 5


def test_a_refused_tier_leaves_the_tier_before_it_closed_and_whole(tmp_path: Path) -> None:
    both = spec(tmp_path, ssd_mib=(16, 16))
    keys = filled(both)
    swapped = replace(both, ssds=(SsdSpec(tmp_path / "disk1", 16 * MIB),))
    filled(swapped, first=5, stop=6)
    stamp(tmp_path / "disk1", OTHER)
    with pytest.raises(VersionMismatch, match="disk1"):
        open_shard(both)
    assert intact(replace(both, ssds=both.ssds[:1]), keys) == 5


def test_a_torn_record_beside_intact_ones_costs_its_chunk_alone(tmp_path: Path) -> None:
    keys = filled(spec(tmp_path))
    catalog = lmdb.open(str(tmp_path / "disk0/kintsugi-tier/catalog"))
    with catalog, catalog.begin(write=True) as transaction:
        name, value = next(iter(transaction.cursor()))
        transaction.put(name, value[:-1])
    assert intact(spec(tmp_path), keys) == 4


def test_serve_ends_with_what_to_do(tmp_path: Path) -> None:
    filled(spec(tmp_path))
    stamp(tmp_path / "disk0", OTHER)
    ended = subprocess.run(
        [
            *(sys.executable, "-c", "from kintsugi.cli.commands.store import app; app()", "serve"),
            *("--data-dir", str(tmp_path / "data"), "--ram", "2MiB", "--ssd", f"{tmp_path / 'disk0'}:16MiB"),
            *("--listen", "127.0.0.1:0"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"},
    )
    assert ended.returncode == ExitCode.CORRUPTED
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert "use the version that wrote them, or name another folder" in ended.stderr


def test_a_replica_does_not_take_another_folder_instead(tmp_path: Path) -> None:
    folders = StoreSpec(
        ram_gib=2 / 1024, data_dir=str(tmp_path / "data"), tiers=(TierSpec(str(tmp_path), 16 / 1024),)
    )
    shard_0 = ShardSpec(2 * MIB, tmp_path / "data/shard-0", (SsdSpec(tmp_path / "shard-0", 16 * MIB),))
    filled(shard_0)
    stamp(tmp_path / "shard-0", OTHER)
    with pytest.raises(VersionMismatch, match="name another folder") as refused:
        claim_shard(folders)
    assert "\n" not in str(refused.value), "what Serve says is searched for one line"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["shard-0"]
