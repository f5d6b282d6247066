"""What a restart knows about uses, and that it never depends on it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kintsugi.core.layout import ChunkManifest
from kintsugi.store.shard.entry import ChunkEntry
from kintsugi.store.shard.eviction.policy import POLICIES
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.put import PutOptions
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers import uses
from kintsugi.store.shard.tiers.catalog import catalog_key
from kintsugi.store.shard.tiers.uses import Use, load_uses, save_uses
from kintsugi.store.shard.workers.keeper import Keeper
from tests.contracts.store_contract import make_chunk

MIB = 1 << 20


def spec(folder: Path, policy: str = "lru") -> ShardSpec:
    return ShardSpec(MIB, folder / "data", (SsdSpec(folder / "disk", 2 * MIB),), policy)


def put(shard: Shard, start: int) -> ChunkManifest:
    """About 0.3 MiB, on disk."""
    manifest, frames = make_chunk(range(start, start + 400))
    begun = shard.begin_put(manifest, PutOptions(durable=True), wait_s=10.0)
    assert begun is not None
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    durable = shard.commit(begun).durable
    assert durable is not None
    durable.result(10.0)
    return manifest


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_used_before_a_restart_stays_longer_after_it(tmp_path: Path, policy: str) -> None:
    shard = open_shard(spec(tmp_path, policy))
    chunks = [put(shard, 1000 * i) for i in range(6)]
    used = [chunks[0], chunks[3]]
    for _ in range(2):
        shard.lookup("acme", [manifest.key for manifest in used])
    shard.close()
    shard = open_shard(spec(tmp_path, policy))
    for i in range(10, 13):
        put(shard, 1000 * i)
    found = shard.lookup("acme", [manifest.key for manifest in chunks])
    assert found[0] is not None
    assert found[3] is not None
    assert None in found
    shard.close()


def test_the_keeper_saves_once_a_minute(tmp_path: Path) -> None:
    shard = open_shard(spec(tmp_path))
    manifest = put(shard, 0)
    shard.lookup("acme", [manifest.key])
    keeper, file = Keeper(shard, turn_s=30.0), tmp_path / "data/uses"
    keeper.turn()
    assert not file.exists()
    keeper.turn()
    (use,) = load_uses(file).values()
    assert use.times == 1
    shard.close()


def test_chunks_newer_than_the_snapshot_are_the_newest(tmp_path: Path) -> None:
    shard = open_shard(spec(tmp_path))
    old = put(shard, 0)
    shard.save_uses()
    snapshot = (tmp_path / "data/uses").read_bytes()
    new = put(shard, 1000)
    shard.close()
    (tmp_path / "data/uses").write_bytes(snapshot)
    shard = open_shard(spec(tmp_path))
    assert all(entry.used_at_s <= time.time() for entry in shard.table.entries())
    victims = [shard.disks[0].policy.evict(lambda _: True) for _ in range(2)]
    assert [entry.manifest.key for entry in victims if entry is not None] == [old.key, new.key]
    for entry in victims:
        assert entry is not None
        shard.disks[0].policy.admit(entry, 1, 0.0)
    shard.close()


@pytest.mark.parametrize("damage", [b"", b"short", bytes(40)])
def test_a_damaged_snapshot_costs_nothing_but_order(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    shard = open_shard(spec(tmp_path))
    manifest = put(shard, 0)
    shard.close()
    (tmp_path / "data/uses").write_bytes(damage)
    shard = open_shard(spec(tmp_path))
    assert shard.lookup("acme", [manifest.key])[0] is not None
    assert "count as unused" in caplog.text
    shard.close()


def test_any_flipped_bit_is_found_and_rows_survive() -> None:
    manifest, _ = make_chunk(range(40))
    data = uses.encode_uses([ChunkEntry(manifest, uses=7, used_at_s=12.5)])
    assert uses.decode_uses(data) == {catalog_key(("acme", manifest.key)): Use(7, 12.5)}
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="checksum"):
            uses.decode_uses(bytes(flipped))


def test_a_disk_that_refuses_the_snapshot_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    save_uses(tmp_path / "uses", [])
    assert "No space left" in caplog.text
    assert load_uses(None) == {}
