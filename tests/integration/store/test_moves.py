"""A chunk that is read often moves from a tier that has become too slow for it, and survives a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.core.layout import HeadRange
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard.entry import ChunkEntry, Copying, Residence
from kintsugi.store.shard.eviction.room import MOVE_REST_S, READS_OFTEN
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers import lower_tier
from kintsugi.store.shard.tiers.disk_tier import DiskTier
from kintsugi.store.shard.tiers.home import Home
from kintsugi.store.shard.tiers.lower_tier import catalog_key
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier
from kintsugi.store.shard.workers.writeback import TierWriter
from tests.contracts.store_contract import make_chunk, read_all

MIB = 1 << 20


def whole(frames: list[bytes]) -> list[tuple[int, int, bytes | None]]:
    """What `read_all` gives for one chunk of these frames."""
    return [(0, layer, bytes(frame)) for layer, frame in enumerate(frames)]


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shard(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    """Two SSD tiers whose speeds are what a test says, and RAM for three chunks of 400 tokens."""
    monkeypatch.setattr(lower_tier, "READ_RATE_WEIGHT", 0.0)
    disks = [
        DiskTier(f"ssd{i}", Home(tmp_path / f"ssd{i}", "shard"), size * MIB) for i, size in enumerate((2, 16))
    ]
    with closing(Shard(RamTier(MIB), disks, "shard", clock=clock)) as shard:
        yield shard


def put_durably(shard: Shard, start: int) -> ChunkEntry:
    manifest, frames = make_chunk(range(start, start + 400))
    speeds = [disk.read_bytes_per_s for disk in shard.disks]
    for disk in shard.disks:  # as if only the first tier were fast enough
        disk.read_bytes_per_s = 1e9 if disk is shard.disks[0] else 1.0
    put = shard.begin_put(manifest, PutOptions(durable=True, recompute_ms=200.0), wait_s=10.0)
    for disk, speed in zip(shard.disks, speeds, strict=True):
        disk.read_bytes_per_s = speed
    assert put is not None
    for layer, frame in enumerate(frames):
        put.write(layer, memoryview(frame))
    durable = shard.commit(put).durable
    assert durable is not None
    durable.result(10.0)
    return put.entry


def read_often(shard: Shard, entry: ChunkEntry) -> None:
    """Have a chunk in RAM, from whatever tier it is in, and written wherever that makes it move."""
    keys = [entry.manifest.key]
    for _ in range(READS_OFTEN):
        shard.lookup("acme", keys)
    reading = shard.open("acme", keys, range(3), HeadRange(0, 4))
    (held,) = reading.chunks
    assert held is not None
    deadline_s = time.monotonic() + 10.0
    while held.in_ram and not all(map(held.ready, range(3))):
        assert time.monotonic() < deadline_s
    shard.table.close(reading)
    if (writing := entry.writing) is not None:
        writing.result(10.0)


def test_a_chunk_goes_back_and_forth_no_more_often_than_it_rests(shard: Shard, clock: Clock) -> None:
    """The speeds of the two tiers change places before every read."""
    entries = [put_durably(shard, start) for start in range(0, 5000, 1000)]
    moves = [0] * len(entries)
    for turn in range(12):
        for index, entry in enumerate(entries):  # RAM holds fewer than these: each is read from disk
            assert entry.disk is not None
            held = entry.disk.tier
            for disk in shard.disks:
                disk.read_bytes_per_s = 1e6 if disk is held else 1e9
            read_often(shard, entry)
            assert entry.disk is not None
            moves[index] += entry.disk.tier is not held
        clock.now_s += MOVE_REST_S / 4
        assert moves == [turn // 4 + 1] * len(entries)


def test_a_chunk_that_is_read_while_it_is_demoted_outlives_a_restart(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier below has become the faster one: both the demotion and the reads would write it there."""
    fast, slow = shard.disks
    fast.read_bytes_per_s, slow.read_bytes_per_s = 1e6, 1e9
    commit = TierWriter.sync_and_commit
    demoted: list[ChunkEntry] = []

    def read_before(writer: TierWriter, written: Sequence[tuple[Copying, Residence]], since: int) -> None:
        if writer.tier is slow and not demoted:
            demoted.append(written[0][0].entry)
            read_often(shard, demoted[0])
        commit(writer, written, since)

    monkeypatch.setattr(TierWriter, "sync_and_commit", read_before)
    for start in range(0, 20_000, 1000):
        put_durably(shard, start)
        if demoted:
            break
    (entry,) = demoted
    for flushed in shard.flush_writers():
        flushed.result(10.0)
    assert entry.disk is not None
    assert entry.disk.tier is slow
    assert catalog_key(entry.address) in dict(slow.catalog.records())


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
    )
    shard = open_shard(config)
    fast, slow = shard.disks
    # As if each had been measured: a blend of a chunk takes 30 ms, 0.3 MB from either take less.
    fast.read_bytes_per_s, slow.read_bytes_per_s = 1e9, 1e8
    with ShardServer(shard, "127.0.0.1:0") as server:
        store = GrpcStore(server.address, GrpcOptions(ack="durable"))
        for manifest, frames in chunks:
            assert store.put(manifest, frames, recompute_ms=200.0)
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
