"""The RAM store: the contract, and what is its own."""

from __future__ import annotations

import time

import pytest

from kintsugi.core.errors import InvalidField, ResourceExhausted
from kintsugi.core.layout import HeadRange
from kintsugi.store.client.ram import RamStore, held_bytes
from kintsugi.store.client.registry import open_store, ram_url
from kintsugi.store.protocol.interface import ChunkLost
from tests.contracts.store_contract import StoreContract, make_chunk


class TestRamStore(StoreContract):
    @pytest.fixture
    def store(self) -> RamStore:
        return RamStore(capacity_bytes=8 << 20)


def test_the_least_recently_used_chunk_goes_first() -> None:
    (first, first_frames), (second, second_frames), (third, third_frames) = (
        make_chunk(range(start, start + 40)) for start in (0, 100, 200)
    )
    store = RamStore(capacity_bytes=2 * held_bytes(first))
    store.put(first, first_frames)
    store.put(second, second_frames)
    store.lookup("acme", [first.key])
    store.put(third, third_frames)
    assert store.lookup("acme", [first.key, second.key, third.key]) == [first, None, third]
    assert store.stats().bytes_used == 2 * held_bytes(first)


def test_a_chunk_with_a_lifetime_goes_before_one_without() -> None:
    (first, first_frames), (second, second_frames), (third, third_frames) = (
        make_chunk(range(start, start + 40)) for start in (0, 100, 200)
    )
    store = RamStore(capacity_bytes=2 * held_bytes(first))
    store.put(first, first_frames)
    store.put(second, second_frames, ttl_s=60)
    store.lookup("acme", [second.key])
    store.put(third, third_frames)
    assert store.lookup("acme", [first.key, second.key, third.key]) == [first, None, third]


def test_a_chunk_is_gone_when_its_lifetime_is_over() -> None:
    now_s = 0.0
    manifest, frames = make_chunk(range(40))
    store = RamStore(clock=lambda: now_s)
    store.put(manifest, frames, ttl_s=10)
    now_s = 9.0
    assert store.list("acme") == [manifest]
    now_s = 10.0
    assert store.lookup("acme", [manifest.key]) == [None]
    assert store.lookup("acme", [manifest.key]) == [None]
    assert store.stats().bytes_used == 0


def test_a_chunk_larger_than_the_store_is_refused() -> None:
    manifest, frames = make_chunk(range(40))
    with pytest.raises(ResourceExhausted, match="capacity"):
        RamStore(capacity_bytes=100).put(manifest, frames)


def test_damaged_memory_is_lost_and_quarantined() -> None:
    manifest, frames = make_chunk(range(40))
    store = RamStore()
    store.put(manifest, frames)
    chunk = store._chunks["acme", manifest.key]
    damaged = bytearray(chunk.frames[1])
    damaged[3] ^= 1
    store._chunks["acme", manifest.key] = type(chunk)(
        manifest, (chunk.frames[0], memoryview(damaged), chunk.frames[2])
    )
    items = list(store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=1.0))
    assert items[-1] == ChunkLost(0, 1, "digest mismatch")
    assert store.lookup("acme", [manifest.key]) == [None]


def test_a_url_names_a_store() -> None:
    assert open_store("ram://here") is open_store("ram://here")
    assert open_store("ram://here") is not open_store("ram://there")
    with pytest.raises(InvalidField, match="ram://"):
        open_store("carrier-pigeon://home")


def test_a_throttled_store_is_read_no_faster_than_its_rate() -> None:
    manifest, frames = make_chunk(range(40))
    bytes_per_s = 20 * manifest.chunk_bytes
    store = open_store(ram_url("slow", bytes_per_s))
    assert open_store("ram://slow") is store
    store.put(manifest, frames)
    started = time.perf_counter()
    items = list(store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), deadline_s=1.0))
    assert time.perf_counter() - started >= 1 / 20
    assert [item.layer for item in items] == [0, 1, 2]


@pytest.mark.parametrize(
    "query", ["bytes_per_s=0", "bytes_per_s=", "bytes_per_s=fast", "bytes_per_s=inf", "rate=1"]
)
def test_an_impossible_rate_is_refused(query: str) -> None:
    with pytest.raises(InvalidField, match="bytes_per_s"):
        open_store(f"ram://impossible?{query}")


def test_a_put_never_shortens_a_lifetime_and_a_lasting_one_ends_it() -> None:
    """As over a chunk that an engine discovered."""
    now_s = 0.0
    (manifest, frames), (other, other_frames), (third, third_frames) = (
        make_chunk(range(start, start + 40)) for start in (0, 100, 200)
    )
    store = RamStore(2 * held_bytes(manifest), clock=lambda: now_s)
    assert store.put(manifest, frames, ttl_s=10)
    assert not store.put(manifest, frames, ttl_s=5)
    now_s = 9.0
    assert not store.put(manifest, frames, ttl_s=5)
    now_s = 13.0
    assert store.lookup("acme", [manifest.key]) == [manifest]
    assert not store.put(manifest, frames)
    now_s = 1e9
    store.put(other, other_frames, ttl_s=60)
    store.put(third, third_frames)
    assert store.lookup("acme", [manifest.key, other.key, third.key]) == [manifest, None, third]
