"""Chunks that are read often are copied to further shards, which share their reads."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import ChunkManifest
from kintsugi.core.namespaces import GIB, NamespaceLimits, NamespaceRules
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client import sharing
from kintsugi.store.client.directory import FileDirectory
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.shard.entry import ChunkEntry, charge_of
from kintsugi.store.shard.eviction.room import HOT_SHARE_MAX
from kintsugi.store.shard.heat import HEAT_S, READS_PER_S_MAX
from kintsugi.store.shard.opening import ShardSpec, SsdSpec, open_shard
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import PutOptions
from tests.contracts.store_contract import Chunk, make_chunk, read_all
from tests.integration.store.test_replication import Fleet, copy_of
from tests.waiting import wait_until

MIB = 1 << 20
FIRST = ("from kintsugi.cli.commands.store import app; app()", "serve")


@pytest.fixture(autouse=True)
def clients_draw_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a few hundred lookups of one client reach every shard."""
    monkeypatch.setattr(sharing, "ASKED_AGAIN", 0.5)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(stack)
        fleet.replicas = 1
        yield fleet


def start(fleet: Fleet, shards: int) -> tuple[ShardedStore, ChunkManifest, list[bytes]]:
    """Start shards, and put one chunk into the first of its owners."""
    store = fleet.show(*(fleet.start() for _ in range(shards)))
    manifest, frames = make_chunk(range(40))
    assert store.put(manifest, frames)
    return store, manifest, frames


def first_owner(fleet: Fleet, key: ChunkKey) -> ShardServer:
    owner = fleet.directory.shards.owners(key)[0]
    return next(server for server in fleet.servers if server.shard.shard_id == owner.shard_id)


def read_often(fleet: Fleet, key: ChunkKey, times: float = 8.0) -> None:
    """Look a chunk up at its first owner at `times` the rate from which on its reads are shared, for two
    periods, and let every shard take a turn after each."""
    for _ in range(2):
        for _ in range(int(times * READS_PER_S_MAX * HEAT_S)):
            first_owner(fleet, key).shard.lookup("acme", [key])
        fleet.now_s += HEAT_S
        for replicator in fleet.replicators:
            replicator.turn()


def sources(store: ShardedStore, key: ChunkKey, lookups: int = 400) -> Counter[str]:
    """How many lookups each shard answers."""
    found = (store.find("acme", [key])[0] for _ in range(lookups))
    return Counter("" if one is None else one.source.shard for one in found)


def check_read(store: ShardedStore, manifest: ChunkManifest, frames: list[bytes], times: int = 30) -> None:
    for _ in range(times):
        assert store.lookup("acme", [manifest.key]) == [manifest]
        assert [data for _, _, data in read_all(store, [manifest.key])] == frames


def entry_in(server: ShardServer, key: ChunkKey) -> ChunkEntry | None:
    return server.shard.table.get(("acme", key))


def test_shards_share_the_reads_of_a_hot_chunk_until_it_cools(fleet: Fleet) -> None:
    store, manifest, frames = start(fleet, 4)
    key = manifest.key
    assert len(sources(store, key, 50)) == 1
    read_often(fleet, key)
    assert len(fleet.holders(key)) == 4
    shared = sources(store, key)
    assert len(shared) == 4
    assert min(shared.values()) > 20, shared
    check_read(store, manifest, frames)
    for _ in range(2):
        fleet.now_s += HEAT_S
        for replicator in fleet.replicators:
            replicator.turn()
    with closing(ShardedStore(fleet.directory)) as new:
        assert sources(new, key) == {first_owner(fleet, key).address: 400}, "nobody is told of other shards"


def test_reads_are_not_shared_for_a_chunk_that_is_read_seldom(fleet: Fleet) -> None:
    store, manifest, _ = start(fleet, 3)
    read_often(fleet, manifest.key, 0.9)
    assert len(fleet.holders(manifest.key)) == 1
    assert len(sources(store, manifest.key, 50)) == 1


def test_replicas_share_reads_without_copies(fleet: Fleet) -> None:
    fleet.replicas = 2
    store, manifest, _ = start(fleet, 2)
    read_often(fleet, manifest.key)
    assert sum(replicator.sent_chunks for replicator in fleet.replicators) == 0
    assert len(sources(store, manifest.key)) == 2


def test_a_hot_copy_that_is_gone_costs_no_hit(fleet: Fleet) -> None:
    store, manifest, frames = start(fleet, 4)
    read_often(fleet, manifest.key)
    sources(store, manifest.key, 50)
    first = first_owner(fleet, manifest.key)
    for server in fleet.servers:
        if server is not first:
            server.shard.clear("acme")
    assert sources(store, manifest.key) == {first.address: 400}
    check_read(store, manifest, frames)
    assert store.prefetch("acme", [manifest.key]) in (0, 1), "it is no answer"


def test_a_shard_that_died_with_a_hot_copy_costs_no_hit(fleet: Fleet) -> None:
    store, manifest, frames = start(fleet, 3)
    read_often(fleet, manifest.key)
    sources(store, manifest.key, 50)
    first, shards = first_owner(fleet, manifest.key), fleet.directory.shards
    addresses = (one.address if one.address == first.address else "127.0.0.1:1" for one in shards.shards)
    dead = tuple(replace(one, address=to) for one, to in zip(shards.shards, addresses, strict=True))
    fleet.directory.shards = replace(shards, shards=dead)
    check_read(store, manifest, frames, 10)


@pytest.mark.parametrize("whole_namespace", [True, False])
def test_an_erasure_leaves_no_hot_copy(fleet: Fleet, whole_namespace: bool) -> None:
    store, manifest, frames = start(fleet, 4)
    read_often(fleet, manifest.key)
    assert len(fleet.holders(manifest.key)) == 4
    keys = None if whole_namespace else [manifest.key]
    assert sum(place.items for place in store.erase("acme", keys, 0.0)) == 4
    assert fleet.holders(manifest.key) == set()
    assert store.lookup("acme", [manifest.key]) == [None]
    read_often(fleet, manifest.key)
    fleet.settle()
    assert fleet.holders(manifest.key) == set()
    asked_at_s = time.time() - 60.0
    for server in fleet.servers:
        assert not copy_of(replace(manifest, asked_at_s=asked_at_s), frames, server.shard, is_hot=True)


def test_an_owner_gets_more_than_a_hot_copy(fleet: Fleet) -> None:
    """A hot copy is in RAM alone, so it does not count as one of the replicas."""
    _, manifest, _ = start(fleet, 3)
    read_often(fleet, manifest.key)
    copies = [entry_in(server, manifest.key) for server in fleet.servers]
    assert sorted(copy is not None and copy.is_hot for copy in copies) == [False, True, True]
    fleet.replicas = 2
    fleet.show(*fleet.servers)
    fleet.settle()
    copies = [entry_in(server, manifest.key) for server in fleet.servers]
    assert sorted(copy is not None and copy.is_hot for copy in copies) == [False, False, True]


def chunks_of(count: int, first: int = 0) -> list[Chunk]:
    return [make_chunk(range(start, start + 40)) for start in range(first, first + 100 * count, 100)]


def fill(shard: Shard, chunks: list[Chunk]) -> None:
    for manifest, frames in chunks:
        begun = shard.begin_put(manifest, PutOptions(recompute_ms=1e-6), 5.0)
        assert begun is not None
        for layer, frame in enumerate(frames):
            begun.write(layer, memoryview(frame))
        shard.commit(begun)


@contextmanager
def opened(spec: ShardSpec) -> Iterator[Shard]:
    shard = open_shard(spec)
    try:
        yield shard
    finally:
        shard.close()


def test_hot_copies_take_a_bounded_share_of_a_full_shard_and_the_coldest_leaves() -> None:
    with opened(ShardSpec(8 * MIB)) as shard:
        fill(shard, chunks_of(250))
        assert shard.ram.evictions > 0, "it is full"
        before = len(shard)
        hot = chunks_of(30, 100_000)
        room = int(HOT_SHARE_MAX * shard.ram.capacity_bytes) // charge_of(hot[0][0])
        for manifest, frames in hot:
            assert copy_of(manifest, frames, shard, is_hot=True)
            assert shard.ram.hot_bytes <= HOT_SHARE_MAX * shard.ram.capacity_bytes
            shard.lookup("acme", [hot[0][0].key])
        held = [entry for entry in shard.table.entries() if entry.is_hot]
        assert len(held) == room > 5
        assert hot[0][0].key in {entry.manifest.key for entry in held}, "it was read"
        assert len(shard) >= before - room - 1
        assert shard.table.returns_per_s() == 0.0
        assert [shard.lookup("acme", [manifest.key])[0] for manifest, _ in hot].count(None) == 30 - room
        assert shard.table.returns_per_s() == 0.0, "their owners have them: RAM is not too small"
        shard.table.check()


def test_a_hot_copy_may_not_exceed_its_share_or_its_namespaces_limit() -> None:
    (manifest, frames), (other, other_frames) = chunks_of(2)
    with opened(ShardSpec(MIB // 2)) as shard:
        assert charge_of(manifest) > HOT_SHARE_MAX * shard.ram.capacity_bytes
        assert not copy_of(manifest, frames, shard, is_hot=True)
    with opened(ShardSpec(8 * MIB)) as shard:
        limit = NamespaceLimits(ram_gib=1.5 * charge_of(manifest) / GIB)
        shard.set_rules(NamespaceRules(limits={"acme": limit}))
        assert copy_of(manifest, frames, shard, is_hot=True)
        assert not copy_of(other, other_frames, shard, is_hot=True)
        assert shard.table.get(("acme", manifest.key)), "its own chunks do not leave for it"


def test_hot_copies_that_arrive_together_do_not_exceed_their_share() -> None:
    with opened(ShardSpec(8 * MIB)) as shard:
        begun = []
        for manifest, frames in chunks_of(30):
            put = shard.begin_put(manifest, PutOptions(is_copy=True, is_hot=True))
            assert put is not None
            for layer, frame in enumerate(frames):
                put.write(layer, memoryview(frame))
            begun.append(put)
        for put in begun:
            shard.commit(put)
            assert shard.ram.hot_bytes <= HOT_SHARE_MAX * shard.ram.capacity_bytes


def test_a_hot_copy_stays_in_ram_and_a_put_replaces_it(tmp_path: Path) -> None:
    spec = ShardSpec(8 * MIB, tmp_path, (SsdSpec(tmp_path / "disk", 64 * MIB),))
    (hot, hot_frames), (put, put_frames) = chunks_of(2)
    with opened(spec) as shard:
        for manifest, frames in ((hot, hot_frames), (put, put_frames)):
            assert copy_of(manifest, frames, shard, is_hot=True)
        assert not copy_of(hot, hot_frames, shard, is_hot=True), "it is there"
        fill(shard, [(put, put_frames)])
        assert not copy_of(put, put_frames, shard, is_hot=True), "it replaces nothing"
        assert shard.drain(10.0) == 0
        entries = {entry.manifest.key: entry for entry in shard.table.entries()}
        assert (entries[hot.key].is_hot, entries[hot.key].disk) == (True, None)
        assert not entries[put.key].is_hot
        assert entries[put.key].disk is not None
    with opened(spec) as shard:
        assert [entry.manifest.key for entry in shard.table.entries()] == [put.key]


def test_a_hot_copy_leaves_a_full_shard_without_being_written(tmp_path: Path) -> None:
    spec = ShardSpec(MIB, tmp_path, (SsdSpec(tmp_path / "disk", 64 * MIB),))
    (hot, hot_frames), *others = chunks_of(60)
    with opened(spec) as shard:
        assert copy_of(hot, hot_frames, shard, is_hot=True)
        fill(shard, others)
        assert shard.table.get(("acme", hot.key)) is None
        assert shard.ram.hot_bytes == 0
        shard.table.check()


def test_only_a_copy_is_hot() -> None:
    with pytest.raises(InvalidField, match="set is_copy"):
        PutOptions(is_hot=True)


@contextmanager
def served(folder: Path, peers: Path) -> Iterator[dict[str, str]]:
    """A shard in a process of its own, as `kintsugi store serve` runs it."""
    command = [sys.executable, "-c", *FIRST, "--ram", "16MiB", "--listen", "127.0.0.1:0", "--json"]
    command += ["--data-dir", str(folder), "--peers", f"shardfile://{peers}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        document = ""
        while not document.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, "it has ended"
            document += line
        yield json.loads(document)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_shards_that_store_serve_runs_share_reads_and_erase_them(tmp_path: Path) -> None:
    peers = tmp_path / "shards.json"
    peers.write_text(json.dumps({"version": 0, "shards": []}))
    with ExitStack() as stack:
        started = [stack.enter_context(served(tmp_path / f"{number}", peers)) for number in range(3)]
        shards = [{"shard_id": one["shard_id"], "address": one["address"]} for one in started]
        written = tmp_path / "written.json"
        written.write_text(json.dumps({"version": 1, "replicas": 1, "shards": shards}))
        written.replace(peers)
        store = stack.enter_context(closing(ShardedStore(FileDirectory(peers))))
        alone = [stack.enter_context(closing(GrpcStore(one["address"]))) for one in started]
        manifest, frames = make_chunk(range(40))
        assert store.put(manifest, frames)

        def is_shared() -> bool:
            """Heat it until every shard answers some of the lookups."""
            return len(sources(store, manifest.key, 300)) == 3

        wait_until(is_shared, "its reads were not shared", within_s=100.0, pause_s=0.0)
        check_read(store, manifest, frames, 5)
        assert sum(place.items for place in store.erase("acme", [manifest.key], 0.0)) == 3
        assert [one.find("acme", [manifest.key]) for one in alone] == [[None]] * 3
        assert store.lookup("acme", [manifest.key]) == [None]
        assert [one.counters().chunks for one in alone] == [0] * 3
