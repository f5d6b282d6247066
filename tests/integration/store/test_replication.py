"""Shards that send each other what they lack, over real gRPC. Turns are taken by the test."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kintsugi.core.errors import Unavailable
from kintsugi.core.layout import SALT_BYTES, ChunkManifest, HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store import replication as replicator_module
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol.interface import Erasure
from kintsugi.store.replication import Replicator
from kintsugi.store.shard.erasure import Scope
from kintsugi.store.shard.opening import ShardSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.service import ChunkStoreService
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions, RamTier
from tests.contracts.store_contract import (
    EVERY_FRAME,
    MIXED,
    make_chunk,
    make_encrypted_chunk,
    make_mixed_chunk,
    read_all,
)
from tests.fakes.fixed_directory import FixedDirectory

CHUNKS = 12


class Fleet:
    """Shards with a replicator each, which see the same map."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.servers: list[ShardServer] = []
        self.replicators: list[Replicator] = []
        self.directory = FixedDirectory(ShardMap(0))
        self.replicas = 2
        self.now_s = 0.0

    def start(self, ram_mib: int = 8) -> ShardServer:
        """Start a shard that no map names yet."""
        ram, name = RamTier(ram_mib << 20), f"shard-{len(self.servers)}"
        shard = Shard(ram, shard_id=name, clock=lambda: self.now_s)
        server = self._stack.enter_context(ShardServer(shard, "127.0.0.1:0"))
        replicator = Replicator(shard, self.directory, bytes_per_s=1 << 30, clock=lambda: self.now_s)
        self.servers.append(server)
        self.replicators.append(replicator)
        return server

    def show(self, *servers: ShardServer) -> ShardedStore:
        """Make these the map's shards; a client of them."""
        addresses = tuple(ShardAddress(server.shard.shard_id, server.address) for server in servers)
        self.directory.shards = ShardMap(self.directory.shards.version + 1, addresses, self.replicas)
        store = ShardedStore(self.directory)
        self._stack.callback(store.close)
        return store

    def settle(self) -> None:
        """Let every shard look through its chunks, twice: a chunk may take two steps."""
        for _ in range(2):
            for replicator in self.replicators:
                replicator.turn()
            self.now_s += replicator_module.ROUND_S + replicator_module.SETTLE_S
            for replicator in self.replicators:
                replicator.turn()

    def holders(self, key: ChunkKey) -> set[str]:
        return {server.shard.shard_id for server in self.servers if server.shard.table.get(("acme", key))}


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


def fill(store: ShardedStore) -> dict[ChunkKey, list[bytes]]:
    chunks = [make_chunk(range(start, start + 40)) for start in range(0, 100 * CHUNKS, 100)]
    for manifest, frames in chunks:
        assert store.put(manifest, frames)
    return {manifest.key: frames for manifest, frames in chunks}


def check_placed(fleet: Fleet, chunks: dict[ChunkKey, list[bytes]]) -> None:
    """Every owner has its chunks, and serves the right bytes."""
    for key, frames in chunks.items():
        for owner in fleet.directory.shards.owners(key):
            store = GrpcStore(owner.address)
            assert [data for _, _, data in read_all(store, [key])] == frames
            store.close()


def test_a_chunk_is_copied_with_its_side_frames(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    manifest, frames = make_mixed_chunk(range(40))
    assert fleet.show(first).put(manifest, frames)
    fleet.show(first, second)
    fleet.settle()
    assert fleet.holders(manifest.key) == {"shard-0", "shard-1"}
    heads = HeadRange(0, MIXED.num_kv_heads)
    store = GrpcStore(second.address)
    assert [data for _, _, data in read_all(store, [manifest.key], heads, EVERY_FRAME)] == frames
    store.close()


def test_a_chunk_that_was_replaced_during_a_round_is_copied_as_it_is_now(fleet: Fleet) -> None:
    """Nobody but its readers would notice tags that do not belong to the bytes of an encrypted chunk."""
    first, second = fleet.start(), fleet.start()
    before, frames = make_encrypted_chunk(range(40))
    now = dataclasses.replace(before, salt=bytes(SALT_BYTES), digests=bytes(len(before.digests)))
    store = fleet.show(first)
    store.put(before, frames)
    (entry,) = first.shard.table.entries()
    store.delete("acme", [before.key])
    store.put(now, frames)
    shards = fleet.show(first, second).shard_map()
    (receiver,) = [shard for shard in shards.shards if shard.shard_id == second.shard.shard_id]
    fleet.replicators[0]._send(entry, receiver)
    (copied,) = second.shard.table.entries()
    assert copied.manifest == now


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_shard_that_joins_is_sent_its_chunks(fleet: Fleet, replicas: int) -> None:
    fleet.replicas = replicas
    first, second, third = (fleet.start() for _ in range(3))
    chunks = fill(fleet.show(first, second))
    fleet.settle()
    assert sum(replicator.sent_chunks for replicator in fleet.replicators) == 0, "all was in place"
    fleet.show(first, second, third)
    fleet.settle()
    check_placed(fleet, chunks)
    assert len(third.shard) == third.shard.table.counters.copied > 0


def test_the_chunks_of_a_dead_shard_are_copied_to_those_who_take_over(fleet: Fleet) -> None:
    first, dead, third = (fleet.start() for _ in range(3))
    chunks = fill(fleet.show(first, dead, third))
    del fleet.replicators[1]
    fleet.show(first, third)
    fleet.settle()
    check_placed(fleet, chunks)


def test_a_shard_that_is_soon_back_costs_no_copies(fleet: Fleet) -> None:
    first, second, third = (fleet.start() for _ in range(3))
    fill(fleet.show(first, second, third))
    for replicator in fleet.replicators:
        replicator.turn()
    for shards in ((first, third), (first, second, third)):
        fleet.show(*shards)
        fleet.now_s += replicator_module.SETTLE_S - 1
        for replicator in fleet.replicators:
            replicator.turn()
    assert sum(replicator.sent_chunks for replicator in fleet.replicators) == 0


def test_a_damaged_copy_is_replaced_from_a_replica(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    chunks = fill(fleet.show(first, second))
    damaged = list(chunks)[:3]
    for key in damaged:
        entry = first.shard.table.get(("acme", key))
        assert entry is not None
        assert entry.ram is not None
        first.shard.ram.arena.view(entry.ram.offsets[1], 1)[0] ^= 1
    assert list(first.shard.verify("acme", damaged).values()) == [False] * 3
    assert len(first.shard) == CHUNKS - 3
    fleet.settle()
    check_placed(fleet, chunks)


def test_a_damaged_copy_is_not_spread(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    fleet.replicas = 1
    chunks = fill(fleet.show(first))
    key = next(iter(chunks))
    entry = first.shard.table.get(("acme", key))
    assert entry is not None
    assert entry.ram is not None
    first.shard.ram.arena.view(entry.ram.offsets[1], 1)[0] ^= 1
    fleet.replicas = 2
    fleet.show(first, second)
    fleet.settle()
    assert fleet.holders(key) == set(), "whoever sends it learns that it is damaged"
    check_placed(fleet, {other: frames for other, frames in chunks.items() if other != key})


def copy_of(
    manifest: ChunkManifest,
    frames: list[bytes],
    shard: Shard,
    then: object = None,
    seen: int = 0,
    is_hot: bool = False,
) -> bool:
    """Put a copy into a shard as its service does; whether it is present afterwards."""
    begun = shard.begin_put(manifest, PutOptions(is_copy=True, erasures_seen=seen, is_hot=is_hot))
    if begun is None:
        return False
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    if callable(then):
        then()
    return shard.commit(begun).inserted


def test_a_copy_brings_nothing_back_that_was_deleted() -> None:
    now_s = 0.0
    shard = Shard(RamTier(8 << 20), clock=lambda: now_s)
    chunks = [make_chunk(range(start, start + 40)) for start in range(0, 400, 100)]
    deleted, cleared, late, other = chunks
    shard.delete("acme", [deleted[0].key])
    assert not copy_of(*deleted, shard)
    assert not copy_of(*late, shard, then=lambda: shard.delete("acme", [late[0].key]))
    assert copy_of(*other, shard)
    shard.clear("acme")
    assert len(shard) == 0
    assert not copy_of(*cleared, shard)
    begun = shard.begin_put(deleted[0])
    assert begun is not None, "who computed it may put it again at once"
    shard.table.abort(begun)
    now_s += 601.0
    assert copy_of(*deleted, shard)
    shard.close()


def test_a_copy_brings_nothing_back_that_was_erased_before_a_restart(tmp_path: Path) -> None:
    spec = ShardSpec(8 << 20, tmp_path)
    (erased, frames), (other, other_frames) = make_chunk(range(40)), make_chunk(range(100, 140))
    shard = open_shard(spec)
    shard.erase(Scope.of("acme", [erased.key]), 5.0)
    shard.close()
    shard = open_shard(spec)
    assert not copy_of(replace(erased, asked_at_s=5.0), frames, shard)
    assert copy_of(replace(other, asked_at_s=5.0), other_frames, shard)
    assert copy_of(replace(erased, asked_at_s=5.1), frames, shard)
    shard.erase(Scope("acme"), 6.0)
    assert len(shard) == 0
    shard.close()
    shard = open_shard(spec)
    assert not copy_of(replace(other, asked_at_s=6.0), other_frames, shard)
    assert copy_of(replace(other, asked_at_s=6.1), other_frames, shard), "it was saved again"
    shard.close()


def test_a_copy_of_a_shard_that_missed_merged_erasures_is_not_taken() -> None:
    manifest, frames = make_chunk(range(40))
    shard = Shard(RamTier(8 << 20))
    shard.erasures.merge("acme", 5.0)
    assert not copy_of(replace(manifest, asked_at_s=5.0), frames, shard)
    assert copy_of(replace(manifest, asked_at_s=5.0), frames, shard, seen=shard.erasures.newest)
    shard.close()


def test_a_shard_sends_what_was_put_after_an_erasure(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    fleet.replicas = 1
    chunks = fill(fleet.show(first))
    key = next(iter(chunks))
    held = first.shard.table.get(("acme", key))
    assert held is not None
    second.shard.erasures.record([Erasure("acme", key, held.manifest.asked_at_s)])
    fleet.replicas = 2
    fleet.show(first, second)
    fleet.settle()
    assert second.shard.table.get(("acme", key)) is None
    assert len(second.shard) == len(chunks) - 1
    first.shard.delete("acme", [key])
    with GrpcStoreOf(first) as store:
        store.put(replace(held.manifest, asked_at_s=0.0), chunks[key])
    fleet.settle()
    check_placed(fleet, chunks)


def test_nothing_is_evicted_for_a_copy(fleet: Fleet) -> None:
    large, small = fleet.start(), fleet.start(ram_mib=1)
    fleet.replicas = 1
    for start in range(0, 4000, 100):
        manifest, frames = make_chunk(range(start, start + 40))
        with GrpcStoreOf(large) as store:
            store.put(manifest, frames)
    fleet.replicas = 2
    fleet.show(large, small)
    fleet.settle()
    assert 0 < len(small.shard) < len(large.shard)
    assert small.shard.ram.evictions == 0


class GrpcStoreOf:
    """A client of one server, for a `with` block."""

    def __init__(self, server: ShardServer) -> None:
        self._store = GrpcStore(server.address)

    def __enter__(self) -> GrpcStore:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def test_a_copy_expires_when_the_chunk_does(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    manifest, frames = make_chunk(range(40))
    begun = first.shard.begin_put(manifest, PutOptions(ttl_s=1000.0, recompute_ms=7.0))
    assert begun is not None
    for layer, frame in enumerate(frames):
        begun.write(layer, memoryview(frame))
    first.shard.commit(begun)
    fleet.show(first, second)
    fleet.settle()
    copy = second.shard.table.get(("acme", manifest.key))
    assert copy is not None
    assert 900.0 < copy.expires_at_s - time.time() <= 1000.0
    assert copy.recompute_ms == 7.0


def test_every_replica_is_retained_and_one_that_missed_it_gets_a_copy(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    fleet.replicas = 2
    store = fleet.show(first, second)
    (manifest, frames), (missed, missed_frames) = (make_chunk(range(start, start + 40)) for start in (0, 100))
    store.put(manifest, frames, ttl_s=1000.0)
    assert store.retain("acme", [manifest.key]) == [True]
    for server in (first, second):
        entry = server.shard.table.get(("acme", manifest.key))
        assert entry is not None
        assert entry.expires_at_s == math.inf
    with GrpcStoreOf(first) as alone:  # in the other, its time was over before
        alone.put(missed, missed_frames, ttl_s=1000.0)
        assert alone.retain("acme", [missed.key], 9000.0) == [True]
    fleet.settle()
    copy = second.shard.table.get(("acme", missed.key))
    assert copy is not None
    assert 8900.0 < copy.expires_at_s - time.time() <= 9000.0


def test_a_peek_counts_no_use(fleet: Fleet) -> None:
    server = fleet.start()
    chunks = fill(fleet.show(server))
    absent = ChunkKey(bytes(32))
    with GrpcStoreOf(server) as store:
        peeked = store.peek("acme", [*chunks, absent])
    assert list(peeked.held) == [True] * CHUNKS + [False]
    assert peeked.room_bytes == server.shard.ram.allocator.free_bytes
    assert server.shard.table.counters.hits == server.shard.table.counters.misses == 0


def test_a_replicator_runs_and_stops_with_its_shard(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    fleet.replicas = 1
    chunks = fill(fleet.show(first))
    fleet.replicas = 2
    fleet.show(first, second)
    replicator = Replicator(first.shard, fleet.directory, turn_s=0.01, settle_s=0.0)
    replicator.start()
    deadline_s = time.monotonic() + 10.0
    while len(second.shard) < len(chunks):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    replicator.stop()
    assert first.shard.failure is None


def test_a_bug_in_the_replicator_is_fatal_and_visible(fleet: Fleet) -> None:
    def bug() -> ShardMap:
        raise ZeroDivisionError("a bug")

    server = fleet.start()
    fleet.directory.current = bug  # type: ignore[method-assign]
    replicator = Replicator(server.shard, fleet.directory, turn_s=0.01)
    replicator.start()
    deadline_s = time.monotonic() + 10.0
    while server.shard.failure is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(Unavailable, match="a bug"):
        server.shard.lookup("acme", [ChunkKey(bytes(32))])


def test_a_fleet_of_two_versions_serves_and_copies_nothing_to_the_older(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version before knows neither peeks nor copies: it takes a peek for a lookup."""
    old, new = fleet.start(), fleet.start()
    build = ChunkStoreService._build_lookup_response

    def build_as_before(service: ChunkStoreService, request: pb.LookupRequest) -> pb.LookupResponse:
        if service.shard is old.shard:
            request.ClearField("peek")
        return build(service, request)

    monkeypatch.setattr(ChunkStoreService, "_build_lookup_response", build_as_before)
    fleet.replicas = 1
    for server in (new, old):
        fill(fleet.show(server))
    old.shard.clear("acme")
    lost = make_chunk(range(40))[0].key
    new.shard.delete("acme", [lost])
    fleet.replicas = 2
    store = fleet.show(old, new)
    fleet.settle()
    assert (len(old.shard), len(new.shard)) == (0, CHUNKS - 1)
    chunks = fill(store)
    fleet.settle()
    check_placed(fleet, chunks)
