"""A chunk that is read often moves from a tier that has become too slow for it, and survives a restart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kintsugi.store.client.grpc_store import GrpcOptions, GrpcStore
from kintsugi.store.shard.admission import ShardConfig
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from tests.contracts.store_contract import make_chunk, read_all

MIB = 1 << 20


def whole(frames: list[bytes]) -> list[tuple[int, int, bytes | None]]:
    """What `read_all` gives for one chunk of these frames."""
    return [(0, layer, bytes(frame)) for layer, frame in enumerate(frames)]


@pytest.mark.parametrize("drains", [False, True])
def test_a_chunk_that_is_read_often_leaves_a_tier_that_has_become_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """Unless the shard drains: that is to end with nothing left to write. The slow tier is throttled once the
    chunks lie there; RAM holds six of them, so every round reads."""
    chunks = [make_chunk(range(start, start + 400)) for start in range(0, 10_000, 1000)]
    often, seldom = chunks[:9], chunks[9]
    keys = [manifest.key for manifest, _ in often]
    config = ShardSpec(
        2 * MIB,
        tmp_path / "data",
        tuple(SsdSpec(tmp_path / name, 16 * MIB) for name in ("fast", "slow")),
        config=ShardConfig(recompute_ms_per_token=0.5),
    )
    shard = open_shard(config)
    fast, slow = shard.disks
    # As if each had been measured: a blend of a chunk takes 30 ms, 0.3 MB from either take less.
    fast.read_bytes_per_s, slow.read_bytes_per_s = 1e9, 1e8
    with ShardServer(shard, "127.0.0.1:0") as server:
        store = GrpcStore(server.address, GrpcOptions(ack="durable"))
        for manifest, frames in chunks:
            assert store.put(manifest, frames)
        assert (fast.chunks, slow.chunks) == (0, 10)

        read = slow.slab.read

        def throttled(offset: int, frames: Sequence[memoryview]) -> None:
            time.sleep(0.1)
            read(offset, frames)

        monkeypatch.setattr(slow.slab, "read", throttled)
        if drains:
            assert shard.drain(10.0) == 0
        moved = 0 if drains else 9
        for turn in range(40):
            store.lookup("acme", keys)  # a use of each
            for manifest, frames in often:
                assert read_all(store, [manifest.key]) == whole(frames)
            for flush in shard.table.flush():
                flush.result(10.0)
            if turn >= 8 and fast.chunks == moved:
                break
        assert (fast.chunks, slow.chunks) == (moved, 10 - moved)
        store.close()
    shard.close()

    # Each has one copy that outlives the shard.
    shard = open_shard(config)
    assert [disk.chunks for disk in shard.disks] == [moved, 10 - moved]
    with ShardServer(shard, "127.0.0.1:0") as server:
        store = GrpcStore(server.address, GrpcOptions(ack="durable"))
        for manifest, frames in (*often, seldom):
            assert read_all(store, [manifest.key]) == whole(frames)
        store.close()
    shard.close()
