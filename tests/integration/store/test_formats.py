"""What a shard does with a folder that another version of kintsugi wrote."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kintsugi.cli.exits import ExitCode
from kintsugi.core.deploy import StoreSpec, TierSpec
from kintsugi.core.errors import VersionMismatch
from kintsugi.core.layout import Codec
from kintsugi.core.spaces import FORMAT_VERSION, ChunkKey
from kintsugi.rpc.v1 import catalog_pb2 as pb
from kintsugi.serving.store_shard import claim_shard
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.tiers.catalog import _decode_catalog_record, _encode_catalog_record
from tests.integration.store.test_disk_tiers import MIB, many, put, spec

OTHER = FORMAT_VERSION + 1


def become(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Write and read chunks of this format from now on."""
    monkeypatch.setattr("kintsugi.store.protocol.wire.FORMAT_VERSION", version)
    monkeypatch.setattr("kintsugi.store.shard.tiers.catalog.FORMAT_VERSION", version)


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


def test_a_folder_of_another_version_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, OTHER)
    keys = filled(spec(tmp_path))
    before = digests_below(tmp_path)
    become(monkeypatch, FORMAT_VERSION)
    with pytest.raises(VersionMismatch) as refused:
        open_shard(spec(tmp_path, ssd_mib=(32,)))  # and the slab does not grow
    assert str(refused.value) == (
        f"{tmp_path / 'disk0/kintsugi-tier'} holds 5 chunks of format {OTHER}; this version of kintsugi "
        f"reads format {FORMAT_VERSION}. Nothing was changed: use the version that wrote them, or name "
        "another folder"
    )
    assert digests_below(tmp_path) == before
    become(monkeypatch, OTHER)
    assert intact(spec(tmp_path), keys) == 5


def rewrite(folder: Path, count: int, change: Callable[[pb.CatalogRecord], None]) -> None:
    """Change the first records of the first tier's catalog, with right checksums."""
    catalog = lmdb.open(str(folder / "disk0/kintsugi-tier/catalog"))
    with catalog, catalog.begin(write=True) as transaction:
        for key, value in list(transaction.cursor())[:count]:
            record = _decode_catalog_record(key, value)
            assert record is not None
            change(record)
            transaction.put(key, _encode_catalog_record(key, record))


def test_a_folder_that_mixes_versions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def age(record: pb.CatalogRecord) -> None:
        record.manifest.format_version = OTHER

    filled(spec(tmp_path))
    rewrite(tmp_path, 2, age)
    before = digests_below(tmp_path)
    for version in (FORMAT_VERSION, OTHER):
        become(monkeypatch, version)
        with pytest.raises(VersionMismatch, match="name another folder") as refused:
            open_shard(spec(tmp_path))
        assert f"3 chunks of format {FORMAT_VERSION} and 2 chunks of format {OTHER}" in str(refused.value)
        assert "use the version" not in str(refused.value)
    assert digests_below(tmp_path) == before


def test_a_chunk_in_an_unknown_codec_is_not_deleted(tmp_path: Path) -> None:
    """A version that adds a codec need not change the format."""

    def recode(record: pb.CatalogRecord) -> None:
        record.manifest.codec = 99

    def restore(record: pb.CatalogRecord) -> None:
        record.manifest.codec = int(Codec.RAW)

    keys = filled(spec(tmp_path))
    rewrite(tmp_path, 2, recode)
    with pytest.raises(VersionMismatch, match=r"codec: 99 is unknown.*name another folder"):
        open_shard(spec(tmp_path))
    rewrite(tmp_path, 2, restore)
    assert intact(spec(tmp_path), keys) == 5


def test_a_refused_tier_leaves_the_tier_before_it_closed_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = spec(tmp_path, ssd_mib=(16, 16))
    keys = filled(both)
    become(monkeypatch, OTHER)
    swapped = replace(both, ssds=(SsdSpec(tmp_path / "disk1", 16 * MIB),))
    filled(swapped, first=5, stop=6)
    become(monkeypatch, FORMAT_VERSION)
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


def test_serve_ends_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, OTHER)
    filled(spec(tmp_path))
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


def test_a_replica_does_not_take_another_folder_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = StoreSpec(
        ram_gib=2 / 1024, data_dir=str(tmp_path / "data"), tiers=(TierSpec(str(tmp_path), 16 / 1024),)
    )
    shard_0 = ShardSpec(2 * MIB, tmp_path / "data/shard-0", (SsdSpec(tmp_path / "shard-0", 16 * MIB),))
    become(monkeypatch, OTHER)
    filled(shard_0)
    become(monkeypatch, FORMAT_VERSION)
    with pytest.raises(VersionMismatch, match="name another folder") as refused:
        claim_shard(folders)
    assert "\n" not in str(refused.value), "what Serve says is searched for one line"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["shard-0"]
