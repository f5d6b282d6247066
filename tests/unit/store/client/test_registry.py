"""Stores by URL."""

from __future__ import annotations

import pytest

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store, ram_url
from tests.contracts.store_contract import make_chunk


def test_a_store_in_memory_outlives_those_who_close_it() -> None:
    manifest, frames = make_chunk(range(8))
    store = open_store("ram://shared")
    store.put(manifest, frames)
    assert store.prefetch("acme", [manifest.key]) == 1
    store.close()
    assert open_store("ram://shared").lookup("acme", [manifest.key]) == [manifest]


def test_a_store_in_memory_is_throttled_to_any_speed() -> None:
    for number, bytes_per_s in enumerate((2.5e7, 4e8, 1e30)):
        store = open_store(ram_url(f"throttled-{number}", bytes_per_s))
        assert isinstance(store, RamStore)
        assert store.bytes_per_s == bytes_per_s


def test_a_store_in_memory_has_no_pins() -> None:
    store = open_store("ram://unpinned")
    with pytest.raises(InvalidField, match="has no pins; use grpc://"):
        store.pin("acme", [], 1.0)
    with pytest.raises(InvalidField, match="has no pins; use grpc://"):
        store.unpin("lease")


def test_a_shard_is_opened_by_its_address() -> None:
    store = open_store("grpc://127.0.0.1:7400?same_host=false")
    assert isinstance(store, GrpcStore)
    assert store.address == "127.0.0.1:7400"
    store.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:1", InvalidField),
        ("grpc://host", InvalidField),
        ("shards://", InvalidField),
        ("shards://host", InvalidField),
        ("grpc://host:1?akc=ram", UnknownField),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, error: type[InvalidField]) -> None:
    with pytest.raises(error):
        open_store(url)
