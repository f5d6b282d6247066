"""A shard with SSD tiers over real gRPC: what RAM forgets, disks keep, and a restart finds."""

from __future__ import annotations

import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kintsugi.core.errors import Corrupted, InvalidField, ResourceExhausted, Unavailable, VersionMismatch
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.registry import open_store
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol.interface import ChunkLost
from kintsugi.store.shard import life
from kintsugi.store.shard.entry import ChunkEntry, Residence
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.reading import Reading
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.disk_tier import READ_BYTES_PER_S_ASSUMED
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier
from kintsugi.store.shard.workers.keeper import Keeper
from kintsugi.store.shard.workers.writeback import TierWriter
from tests.contracts.store_contract import FINGERPRINT, StoreContract, make_chunk, read_all
from tests.fakes.fixed_directory import FixedDirectory

MIB = 1 << 20
DURABLE = GrpcOptions(ack="durable")


def spec(folder: Path, ram_mib: int = 2, ssd_mib: tuple[int, ...] = (16,)) -> ShardSpec:
    ssds = tuple(SsdSpec(folder / f"disk{i}", size * MIB) for i, size in enumerate(ssd_mib))
    return ShardSpec(ram_mib * MIB, folder / "data", ssds)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    shard = open_shard(spec(tmp_path))
    yield shard
    shard.close()


@pytest.fixture
def store(shard: Shard) -> Iterator[GrpcStore]:
    with ShardServer(shard, "127.0.0.1:0") as server:
        store = GrpcStore(server.address, DURABLE)
        yield store
        store.close()


class TestDurableStore(StoreContract):
    pass


TO_RAM = PutOptions(recompute_ms=1e-6)
"""For a chunk that no disk could load in time, so that it stays in RAM."""


def test_stats_say_whether_what_is_stored_outlives_the_shards(shard: Shard) -> None:
    volatile = Shard(RamTier(2 * MIB), shard_id="ram")
    with ShardServer(shard, "127.0.0.1:0") as first, ShardServer(volatile, "127.0.0.1:0") as second:
        disk, ram = ShardAddress("disk", first.address), ShardAddress("ram", second.address)
        for shards, durable in (((disk,), True), ((ram,), False), ((disk, ram), False)):
            several = ShardedStore(FixedDirectory(ShardMap(1, shards)))
            assert several.stats().durable is durable
            several.close()


def put(
    shard: Shard, manifest: ChunkManifest, frames: list[bytes], durable: bool = True, ttl_s: float = math.inf
) -> None:
    begun = shard.begin_put(manifest, PutOptions(durable=durable, ttl_s=ttl_s), wait_s=10.0)
    assert begun is not None
    for layer, frame in zip(manifest.layers, frames, strict=True):
        begun.write(layer, memoryview(frame))
    committed = shard.commit(begun)
    if durable:
        assert committed.durable is not None
        committed.durable.result(10.0)


def many(count: int, tokens: int = 400) -> list[tuple[ChunkManifest, list[bytes]]]:
    """Chunks of about 0.3 MiB."""
    return [make_chunk(range(start, start + tokens)) for start in range(0, 1000 * count, 1000)]


def drop_from_ram(shard: Shard, entry: ChunkEntry) -> None:
    """As if RAM had evicted a chunk that a disk has."""
    with shard.table._lock:
        assert entry.ram is not None
        life.drop_copy(entry, entry.ram)


def test_chunks_that_left_ram_are_read_from_disk(shard: Shard, store: GrpcStore) -> None:
    chunks = many(20)
    for manifest, frames in chunks:
        assert store.put(manifest, frames)
    assert shard.ram.evictions > 0
    keys = [manifest.key for manifest, _ in chunks]
    assert all(store.lookup("acme", keys))
    for start in (0, 10):
        items = read_all(store, keys[start : start + 10])
        assert {(chunk, layer): data for chunk, layer, data in items} == {
            (chunk, layer): chunks[start + chunk][1][layer] for chunk in range(10) for layer in range(3)
        }


def test_a_restart_finds_what_was_durable(tmp_path: Path) -> None:
    chunks = many(8)
    shard = open_shard(spec(tmp_path))
    for manifest, frames in chunks:
        put(shard, manifest, frames)
    shard.delete("acme", [chunks[0][0].key])
    shard.reports.put(FINGERPRINT, "gate", b"passed")
    shard_id = shard.shard_id
    shard.close()
    shard = open_shard(spec(tmp_path))
    try:
        assert shard.shard_id == shard_id
        assert shard.reports.get(FINGERPRINT, "gate") == b"passed"
        found = shard.lookup("acme", [manifest.key for manifest, _ in chunks])
        assert [entry.manifest if entry else None for entry in found] == [None] + [m for m, _ in chunks[1:]]
        assert all(shard.verify("acme", [manifest.key for manifest, _ in chunks[1:]]).values())
        (anchored,) = shard.lookup_anchors("acme", chunks[1][0].space_digest, chunks[1][0].anchors)
        assert anchored.keys == (chunks[1][0].key,)
    finally:
        shard.close()


def test_a_full_disk_demotes_to_the_next_before_it_drops(tmp_path: Path) -> None:
    chunks = many(24)
    shard = open_shard(spec(tmp_path, ssd_mib=(3, 16)))
    try:
        for manifest, frames in chunks:
            put(shard, manifest, frames)
        assert shard.disks[0].evictions > 0
        assert shard.disks[1].chunks > 0
        keys = [manifest.key for manifest, _ in chunks]
        assert all(shard.lookup("acme", keys))
        assert shard.verify("acme", keys) == dict.fromkeys(keys, True)
    finally:
        shard.close()
    shard = open_shard(spec(tmp_path, ssd_mib=(3, 16)))
    try:
        assert shard.verify("acme", keys) == dict.fromkeys(keys, True)
    finally:
        shard.close()


def test_a_chunk_that_is_on_its_way_into_ram_keeps_its_source(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, frames = make_chunk(range(400))
    put(shard, manifest, frames)
    (entry,) = shard.lookup("acme", [manifest.key])
    assert entry is not None
    (disk,), go_on, read = shard.disks, threading.Event(), shard.disks[0].read

    def held_up(residence: Residence, first_layer: int, views: Sequence[memoryview]) -> None:
        assert go_on.wait(10)
        read(residence, first_layer, views)

    monkeypatch.setattr(disk, "read", held_up)
    drop_from_ram(shard, entry)
    evictions = shard.table.evict_from_disk(disk, 1)
    assert [eviction.entry for eviction in evictions] == [entry]
    assert shard.prefetch("acme", [manifest.key]) == 1
    TierWriter(shard.table, disk, None).demote(evictions)
    assert entry.disk is not None
    go_on.set()
    monkeypatch.undo()
    assert shard.drain(10.0) == 0
    assert entry.ram is not None
    deadline_s = time.monotonic() + 10
    while entry.ram.unloaded:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert shard.verify("acme", [manifest.key]) == {manifest.key: True}
    assert disk.policy.evict(lambda _: True) is entry  # and may leave later


def test_a_reading_holds_what_is_in_ram_before_it_loads_the_rest(tmp_path: Path) -> None:
    """With a disk that takes nothing, making room for a load drops chunks that only RAM has."""
    with closing(open_shard(spec(tmp_path, ram_mib=1))) as shard:
        stored, frames = make_chunk(range(600))
        put(shard, stored, frames)
        fresh = [make_chunk(range(start, start + 600)) for start in (1000, 2000)]
        for manifest, frames in fresh:  # the first of them makes `stored` leave RAM
            begun = shard.begin_put(manifest, TO_RAM, wait_s=10.0)
            assert begun is not None
            begun.write(0, memoryview(b"".join(frames)))
            shard.commit(begun)
        shard.disks[0].failure = "read-only"
        keys = [stored.key, *(manifest.key for manifest, _ in fresh)]
        reading = shard.open("acme", keys, range(3), HeadRange(0, 4))
        assert [held is not None and held.in_ram for held in reading.chunks] == [False, True, True]
        shard.table.close(reading)


def test_the_last_disk_drops_what_it_cannot_hold(tmp_path: Path) -> None:
    chunks = many(40)
    shard = open_shard(spec(tmp_path, ssd_mib=(4,)))
    try:
        for manifest, frames in chunks:
            put(shard, manifest, frames)
        found = [entry is not None for entry in shard.lookup("acme", [m.key for m, _ in chunks])]
        assert 8 <= sum(found) < 40
        assert found[-1]
        assert shard.disks[0].allocator.used_bytes <= 4 * MIB
    finally:
        shard.close()


def test_a_chunk_put_to_ram_is_written_when_it_has_to_leave(tmp_path: Path) -> None:
    chunks = many(12)
    shard = open_shard(spec(tmp_path))
    try:
        for manifest, frames in chunks:
            begun = shard.begin_put(manifest, TO_RAM, wait_s=10.0)
            assert begun is not None
            for layer, frame in enumerate(frames):
                begun.write(layer, memoryview(frame))
            assert shard.commit(begun).durable is None
        assert all(shard.lookup("acme", [manifest.key for manifest, _ in chunks]))
        assert shard.drain(10.0) == 0
        assert shard.disks[0].chunks == len(chunks)
        with pytest.raises(Unavailable, match="draining"):
            put(shard, *make_chunk(range(7)))
    finally:
        shard.close()


@pytest.mark.parametrize(
    ("said_ms", "tier"),
    [(0.0, 0), (2.0, 1), (0.1, 0), (0.5, 0)],
    ids=["unknown", "slow to compute", "fast to compute", "ratio"],
)
def test_auto_takes_the_cheapest_tier_that_hides_behind_a_blend(
    tmp_path: Path, said_ms: float, tier: int
) -> None:
    # 0.3 MB: 0.3 ms from the fast disk, 100 ms from the slow one. "ratio": its prefill takes 200 ms, of which
    # a blend computes 30.
    manifest, frames = make_chunk(range(400))
    shard = open_shard(spec(tmp_path, ssd_mib=(8, 8)))
    shard.disks[0].read_bytes_per_s, shard.disks[1].read_bytes_per_s = 1e9, 3e6
    with ShardServer(shard, "127.0.0.1:0") as server:
        store = open_store(f"grpc://{server.address}?ack=durable")
        assert store.put(manifest, frames, recompute_ms=said_ms * manifest.num_tokens)
        assert [disk.chunks for disk in shard.disks] == [tier == 0, tier == 1]
        store.close()
    shard.close()


def test_a_disk_is_measured_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.2)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    for _ in range(2):  # new, and found again
        shard = open_shard(spec(tmp_path))
        assert shard.disks[0].read_bytes_per_s < (4 * MIB) / 0.2
        shard.close()

    def broken(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    shard = open_shard(spec(tmp_path))
    assert shard.disks[0].read_bytes_per_s == READ_BYTES_PER_S_ASSUMED
    shard.close()


def test_a_flipped_bit_on_disk_is_lost_and_quarantined(tmp_path: Path) -> None:
    manifest, frames = make_chunk(range(400))
    shard = open_shard(spec(tmp_path))
    put(shard, manifest, frames)
    shard.close()
    with open(tmp_path / "disk0/kintsugi-tier/slab", "r+b") as slab:
        slab.seek(5000)
        byte = slab.read(1)
        slab.seek(5000)
        slab.write(bytes([byte[0] ^ 4]))
    shard = open_shard(spec(tmp_path))
    with ShardServer(shard, "127.0.0.1:0") as server:
        store = GrpcStore(server.address)
        items = list(store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=5.0))
        assert items == [ChunkLost(0, 0, "digest mismatch")]
        assert store.lookup("acme", [manifest.key]) == [None]
        store.close()
    assert shard.table.counters.quarantined == 1
    shard.close()
    shard = open_shard(spec(tmp_path))
    assert len(shard) == 0
    shard.close()


@pytest.mark.parametrize("damaged", ["ram", "disk"])
def test_a_damaged_copy_goes_and_the_whole_one_stays(tmp_path: Path, damaged: str) -> None:
    manifest, frames = make_chunk(range(400))
    shard = open_shard(spec(tmp_path))
    put(shard, manifest, frames)
    (entry,) = shard.lookup("acme", [manifest.key])
    assert entry is not None
    assert entry.ram is not None
    assert entry.disk is not None
    if damaged == "ram":
        shard.ram.frame(entry.ram, 1, 5, 6)[0] ^= 1
    else:
        page = memoryview(mmap.mmap(-1, 4096))
        shard.disks[0].slab.write(entry.disk.offsets[1], [page])
    assert shard.verify("acme", [manifest.key]) == {manifest.key: False}
    assert shard.table.counters.quarantined == 1
    for flushed in shard.flush_writers():
        flushed.result(10.0)
    assert (entry.ram is None) == (damaged == "ram")
    assert entry.disk is not None  # written anew, where it was the damaged one
    assert shard.verify("acme", [manifest.key]) == {manifest.key: True}
    shard.close()
    shard = open_shard(spec(tmp_path))
    assert shard.verify("acme", [manifest.key]) == {manifest.key: True}
    shard.close()


def test_a_damaged_copy_may_leave_before_it_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, frames = make_chunk(range(400))
    with closing(open_shard(spec(tmp_path))) as shard:
        put(shard, manifest, frames)
        (entry,) = shard.lookup("acme", [manifest.key])
        assert entry is not None
        assert entry.ram is not None
        shard.ram.frame(entry.ram, 1, 5, 6)[0] ^= 1
        close = shard.table.close

        def evicting(reading: Reading) -> None:
            close(reading)
            drop_from_ram(shard, entry)

        monkeypatch.setattr(shard.table, "close", evicting)
        assert shard.verify("acme", [manifest.key]) == {manifest.key: False}
        monkeypatch.undo()
        assert entry.disk is not None
        assert shard.verify("acme", [manifest.key]) == {manifest.key: True}


@pytest.mark.parametrize("damage", ["garbage", "cut", "page"])
def test_a_damaged_catalog_is_refused_with_what_to_do(tmp_path: Path, damage: str) -> None:
    with closing(open_shard(spec(tmp_path))) as shard:
        for manifest, frames in [make_chunk(range(start, start + 20)) for start in range(0, 6000, 100)]:
            put(shard, manifest, frames)
    file = tmp_path / "disk0" / "kintsugi-tier" / "catalog" / "data.mdb"
    content = file.read_bytes()
    file.write_bytes(
        {"garbage": bytes(65536), "cut": content[:16384], "page": content[:16384] + bytes(16384)}[damage]
    )
    with pytest.raises(Corrupted, match="empty its folder"):
        open_shard(spec(tmp_path))


def test_a_slab_that_cannot_be_opened_is_explained(tmp_path: Path) -> None:
    (tmp_path / "disk0" / "kintsugi-tier" / "slab").mkdir(parents=True)
    with pytest.raises(InvalidField, match="cannot be used"):
        open_shard(spec(tmp_path))


def test_more_ram_than_there_are_addresses_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match="smaller"):
        RamTier(1 << 57)


def test_a_shard_drains_for_some_time(shard: Shard) -> None:
    with pytest.raises(InvalidField, match="timeout_s"):
        shard.drain(float("nan"))


def test_a_truncated_slab_loses_only_what_lay_behind_the_cut(tmp_path: Path) -> None:
    chunks = many(6)
    shard = open_shard(spec(tmp_path))
    for manifest, frames in chunks:
        put(shard, manifest, frames)
    shard.close()
    os.truncate(tmp_path / "disk0/kintsugi-tier/slab", MIB)
    shard = open_shard(spec(tmp_path))
    try:
        found = [entry is not None for entry in shard.lookup("acme", [m.key for m, _ in chunks])]
        assert found == [True, True, True, False, False, False]
        assert all(shard.verify("acme", [manifest.key for manifest, _ in chunks[:3]]).values())
    finally:
        shard.close()


def test_two_owners_are_refused(tmp_path: Path, shard: Shard) -> None:
    with pytest.raises(Unavailable, match="another shard"):
        open_shard(spec(tmp_path))


def test_a_directory_of_another_format_or_shard_is_refused(tmp_path: Path) -> None:
    open_shard(spec(tmp_path / "a")).close()
    open_shard(spec(tmp_path / "b")).close()
    identity = tmp_path / "a/disk0/kintsugi-tier/kintsugi.json"
    original = identity.read_bytes()
    identity.write_bytes((tmp_path / "b/data/kintsugi.json").read_bytes())
    with pytest.raises(InvalidField, match="belongs to shard"):
        open_shard(spec(tmp_path / "a"))
    identity.write_bytes(original.replace(b'"format_version": 1', b'"format_version": 9'))
    with pytest.raises(VersionMismatch, match=r"format 9.*name another folder"):
        open_shard(spec(tmp_path / "a"))
    identity.write_bytes(b'{"format_version": 9, "shard": {}}')
    with pytest.raises(VersionMismatch, match="format 9"):
        open_shard(spec(tmp_path / "a"))
    identity.write_bytes(original)
    open_shard(spec(tmp_path / "a")).close()


def test_a_tier_larger_than_its_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceExhausted, match="smaller"):
        open_shard(spec(tmp_path, ssd_mib=(1 << 40,)))


def test_durable_needs_a_disk() -> None:
    shard = open_shard(ShardSpec(2 * MIB))
    try:
        with pytest.raises(InvalidField, match="durable"):
            shard.begin_put(make_chunk(range(40))[0], PutOptions(durable=True))
    finally:
        shard.close()


def test_an_io_error_leaves_the_chunk_in_ram_and_says_so(
    shard: Shard, store: GrpcStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, frames = make_chunk(range(40))

    def broken(since: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shard.disks[0].slab, "sync", broken)
        with pytest.raises(Unavailable, match="Input/output error"):
            store.put(manifest, frames)
    assert store.lookup("acme", [manifest.key]) == [manifest]
    assert shard.disks[0].allocator.used_bytes == 0
    other, other_frames = make_chunk(range(50))
    assert store.put(other, other_frames)


def test_a_flush_hears_of_the_batch_before_it(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, frames = make_chunk(range(40))
    syncing, go_on = threading.Event(), threading.Event()

    def broken(since: int) -> None:
        syncing.set()
        assert go_on.wait(30.0)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shard.disks[0].slab, "sync", broken)
    begun = shard.begin_put(manifest, PutOptions(durable=True))
    assert begun is not None
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    durable = shard.commit(begun).durable
    assert durable is not None
    assert syncing.wait(10.0)
    (flushed,) = shard.flush_writers()
    go_on.set()
    for waiting in (durable, flushed):
        with pytest.raises(Unavailable, match="Input/output error"):
            waiting.result(10.0)


def test_a_batch_is_written_while_the_one_before_is_committed(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = shard.disks[0].slab
    sync, write = slab.sync, slab.write
    syncing, writing = threading.Event(), threading.Event()

    def slow_sync(since: int) -> None:
        syncing.set()
        assert writing.wait(10.0), "the next batch is not written meanwhile"
        sync(since)

    def noted(offset: int, views: list[memoryview]) -> None:
        if syncing.is_set():
            writing.set()
        write(offset, views)

    monkeypatch.setattr(slab, "sync", slow_sync)
    monkeypatch.setattr(slab, "write", noted)
    first, second = many(2, tokens=40)
    put(shard, *first, durable=False)
    assert syncing.wait(10.0)
    put(shard, *second, durable=False)
    assert shard.drain(20.0) == 0
    assert shard.disks[0].chunks == 2


def test_the_death_of_a_thread_is_fatal_and_visible(
    shard: Shard, store: GrpcStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, frames = make_chunk(range(40))

    def bug() -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(shard.disks[0], "bury", bug)
    with pytest.raises(Unavailable):
        store.put(manifest, frames)
    with pytest.raises(Unavailable, match="a bug"):
        store.lookup("acme", [ChunkKey(b"\1" * 32)])


def test_the_death_of_a_reader_or_the_keeper_is_fatal_and_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    manifest, frames = make_chunk(range(40))
    shard = open_shard(spec(tmp_path))
    put(shard, manifest, frames)
    shard.close()
    shard = open_shard(spec(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(shard.disks[0], "read", bug)
        assert shard.prefetch("acme", [manifest.key]) == 1
        until_failed(shard)
    shard.close()
    shard = open_shard(spec(tmp_path))
    monkeypatch.setattr(shard.table, "expire", bug)
    keeper = Keeper(shard, turn_s=0.01)
    keeper.start()
    until_failed(shard)
    keeper.stop()
    shard.close()


def until_failed(shard: Shard) -> None:
    deadline_s = time.monotonic() + 10
    while shard.failure is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(Unavailable, match="a bug"):
        shard.lookup("acme", [ChunkKey(b"\1" * 32)])


_WRITER = """
import sys
from pathlib import Path
from tests.integration.store.test_disk_tiers import many, put, spec
from kintsugi.store.shard.opening import open_shard
shard = open_shard(spec(Path(sys.argv[1])))
for manifest, frames in many(1000):
    put(shard, manifest, frames)
    print(manifest.key.hex, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = os.pathsep.join(entry for entry in (str(Path.cwd()), *sys.path) if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    acknowledged = [ChunkKey.from_hex(process.stdout.readline().strip()) for _ in range(10)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shard = open_shard(spec(tmp_path))
    try:
        assert shard.verify("acme", acknowledged) == dict.fromkeys(acknowledged, True)
        everything = [entry.manifest.key for entry in shard.table.entries()]
        assert all(shard.verify("acme", everything).values())
    finally:
        shard.close()
