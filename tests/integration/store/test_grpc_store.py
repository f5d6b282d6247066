"""A shard over real gRPC on loopback."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kintsugi.core.errors import DeadlineExceeded, InvalidField, ResourceExhausted, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.interface import ChunkLost, ChunkStore, LayerFrame
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import StoreContract, make_chunk, read_all


@pytest.fixture
def server() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0") as server:
        yield server


@pytest.fixture
def store(server: ShardServer) -> Iterator[GrpcStore]:
    store = GrpcStore(server.address, GrpcOptions(same_host=False))
    yield store
    store.close()


class TestGrpcStore(StoreContract):
    pass


def test_a_full_shard_evicts_the_least_recently_used(store: ChunkStore) -> None:
    chunks = [make_chunk(range(start, start + 4000)) for start in range(0, 50000, 5000)]
    for manifest, frames in chunks:
        assert store.put(manifest, frames)
    found = store.lookup("acme", [manifest.key for manifest, _ in chunks])
    assert found[-1] is not None
    assert found[0] is None
    assert store.stats().bytes_used <= 8 << 20


def test_a_chunk_larger_than_the_shard_is_refused_with_the_limit(store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(20000))
    with pytest.raises(ResourceExhausted, match="capacity"):
        store.put(manifest, frames)


def test_damage_in_the_arena_is_lost_and_quarantined(server: ShardServer, store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    (held,) = server.shard.open("acme", [manifest.key], range(3), HeadRange(0, 4)).chunks
    assert held is not None
    server.shard.ram.frame(held.residence, 1, 5, 6)[0] ^= 1
    items = list(store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=5.0))
    assert [type(item) for item in items] == [LayerFrame, ChunkLost]
    assert store.lookup("acme", [manifest.key]) == [None]
    assert server.shard.table.counters.quarantined == 1


def test_a_namespace_is_mandatory(store: ChunkStore) -> None:
    manifest, _ = make_chunk(range(40))
    with pytest.raises(InvalidField, match="namespace"):
        store.lookup("", [manifest.key])


def test_a_range_that_the_chunk_lacks_is_refused(store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    with pytest.raises(InvalidField, match="layers"):
        read_all(store, [manifest.key], layers=range(9))
    with pytest.raises(InvalidField, match="heads"):
        read_all(store, [manifest.key], heads=HeadRange(2, 9))


def test_a_stream_closed_early_lets_go(server: ShardServer, store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(4000))
    store.put(manifest, frames)
    stream = store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=5.0)
    next(stream)
    stream.close()
    assert store.delete("acme", [manifest.key]) == 1
    (lost,) = store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), 5.0)
    assert isinstance(lost, ChunkLost)
    assert lost.reason == "absent"


def test_a_shard_that_is_not_there_is_unavailable() -> None:
    store = GrpcStore("127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        store.stats()
    store.close()


def test_a_closed_client_says_so(server: ShardServer) -> None:
    store = GrpcStore(server.address)
    store.close()
    store.close()
    with pytest.raises(Unavailable, match="closed"):
        store.stats()


def test_a_layer_that_does_not_come_is_a_deadline(server: ShardServer, store: ChunkStore) -> None:
    manifest, frames = make_chunk(range(40))
    residence = server.shard.begin_put(manifest)
    assert residence is not None
    for layer, frame in enumerate(frames):
        residence.write(layer, memoryview(frame))
    server.shard.commit(residence)
    residence.residence.unloaded.add(1)
    items = store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=0.3)
    first = next(items)
    assert isinstance(first, LayerFrame)
    assert bytes(first.data) == frames[0]
    with pytest.raises(DeadlineExceeded):
        next(items)


@pytest.mark.parametrize("url", ["grpc://localhost", "grpc://:7400", "grpc://host:port"])
def test_a_url_must_name_a_port(url: str) -> None:
    with pytest.raises(InvalidField, match="host:port"):
        open_store(url)


@pytest.mark.parametrize(
    ("query", "match"),
    [
        ("akc=durable", "did you mean 'ack'"),
        ("ack=never", "ack"),
        ("tls_ca=ca.pem", "belong together"),
        ("ttl_s=soon", "ttl_s"),
    ],
)
def test_a_wrong_option_in_a_url_is_named(query: str, match: str) -> None:
    with pytest.raises(InvalidField, match=match):
        open_store(f"grpc://127.0.0.1:1?{query}")


def test_options_in_a_url_are_taken(server: ShardServer) -> None:
    store = open_store(f"grpc://{server.address}?same_host=off&ttl_s=60")
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    (entry,) = server.shard.lookup("acme", [manifest.key])
    assert entry is not None
    assert entry.expires_at_s < math.inf
    assert read_all(store, [manifest.key])[0] == (0, 0, frames[0])
    assert store.stats().transport == "grpc"
    store.close()


@pytest.mark.parametrize("slow", ["page", "lookup"])
def test_large_answers_keep_nobody_waiting(
    server: ShardServer, store: GrpcStore, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    began, release = threading.Event(), threading.Event()
    method = getattr(server.shard, slow)

    def dawdle(namespace: str, *arguments: Any) -> object:
        if slow == "page" or len(arguments[0]) > 1:
            began.set()
            assert release.wait(30.0)
        return method(namespace, *arguments)

    monkeypatch.setattr(server.shard, slow, dawdle)
    many = pb.LookupRequest(namespace="acme", keys=[bytes(32)] * (wire.LOOKUP_KEYS_BATCH + 1))
    calls: dict[str, Callable[[], object]] = {
        "page": lambda: store.list("acme"),
        "lookup": lambda: store.call("Lookup", many, pb.LookupResponse),
    }
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(calls[slow])
        try:
            assert began.wait(10.0)
            assert store.lookup("acme", [ChunkKey(bytes(32))]) == [None]
            assert not large.done()
        finally:
            release.set()
        large.result(10.0)
