"""How long a shard keeps a chunk: over restarts, in every tier, and while a disk fails."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.shard.opening import open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from kintsugi.store.shard.workers.keeper import Keeper
from tests.integration.store.test_disk_tiers import DURABLE, many, put, spec


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with closing(open_shard(spec(tmp_path))) as shard:
        yield shard


@pytest.mark.parametrize("ssd_mib", [(16,), (3, 16)])
def test_a_longer_lifetime_survives_a_restart(tmp_path: Path, ssd_mib: tuple[int, ...]) -> None:
    """Also of chunks that moved to another tier."""
    chunks = many(16)
    keys = [manifest.key for manifest, _ in chunks]
    shard = open_shard(spec(tmp_path, ssd_mib=ssd_mib))
    with ShardServer(shard, "127.0.0.1:0") as server, closing(GrpcStore(server.address, DURABLE)) as store:
        for manifest, frames in chunks:
            assert store.put(manifest, frames, ttl_s=3600.0)
        assert shard.disks[-1].chunks > 0
        before = {entry.manifest.key: entry.expires_at_s for entry in shard.table.entries()}
        assert store.retain("acme", keys[:4]) == [True] * 4
        assert not store.put(*chunks[4], ttl_s=7200.0)
    # Killed: nothing is written at the end.
    shard.table.unrecorded.record(lambda entries: pytest.fail("a durable call left something to be recorded"))
    shard.close()
    shard = open_shard(spec(tmp_path, ssd_mib=ssd_mib))
    try:
        after = {entry.manifest.key: entry.expires_at_s for entry in shard.table.entries()}
        assert after.keys() == before.keys()
        assert [after[key] for key in keys[:4]] == [math.inf] * 4
        assert after[keys[4]] > before[keys[4]] + 3500.0
        assert all(after[key] == before[key] for key in keys[5:])
        assert all(shard.verify("acme", keys).values())
    finally:
        shard.close()


def test_a_disk_that_fails_is_told_the_lifetime_later(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    (manifest, frames), *_ = many(1)
    put(shard, manifest, frames)
    assert shard.retain("acme", [manifest.key], 60.0) == [True], "it lasts already: no disk is asked"
    shard.delete("acme", [manifest.key])
    put(shard, manifest, frames, ttl_s=60.0)

    def fail(expiries: object) -> None:
        raise lmdb.Error("by the test")

    with monkeypatch.context() as broken:
        broken.setattr(shard.disks[0].catalog, "extend", fail)
        with pytest.raises(Unavailable, match="do not survive a restart"):
            shard.retain("acme", [manifest.key], 600.0)
        Keeper(shard).turn()
    Keeper(shard).turn()
    ((_, record),) = shard.disks[0].catalog.records()
    assert record is not None
    (entry,) = shard.lookup("acme", [manifest.key])
    assert entry is not None
    assert record.expires_at_s == entry.expires_at_s > time.time() + 500.0


def test_a_chunk_put_after_a_deletion_keeps_the_lifetime_of_its_own_put(shard: Shard) -> None:
    """What its deleted namesake had, and no catalog was told, is not its own."""
    (manifest, frames), *_ = many(1)
    put(shard, manifest, frames, ttl_s=60.0)
    assert shard.begin_put(manifest, PutOptions(durable=True)) is None, "the first one is kept for good now"
    shard.delete("acme", [manifest.key])
    put(shard, manifest, frames, ttl_s=60.0)
    shard.record_lifetimes()
    ((_, record),) = shard.disks[0].catalog.records()
    assert record is not None
    assert record.expires_at_s < time.time() + 61.0
