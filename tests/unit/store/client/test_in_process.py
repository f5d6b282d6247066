"""A store of this process behind the asynchronous face, and how it is opened."""

from __future__ import annotations

import asyncio

import pytest

from kintsugi.core.errors import InvalidField, UnknownField
from kintsugi.store.client.blocking import BlockingStore
from kintsugi.store.client.grpc_store import AsyncGrpcStore
from kintsugi.store.client.in_process import InProcessStore
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_async_store, open_store
from kintsugi.store.protocol.interface import ChunkStore
from tests.contracts.store_contract import StoreContract, make_chunk


class TestInProcessStore(StoreContract):
    @pytest.fixture
    def store(self) -> ChunkStore:
        return BlockingStore(InProcessStore(RamStore(capacity_bytes=8 << 20)))


def test_what_memory_cannot_do_is_refused() -> None:
    async def ask() -> None:
        store = InProcessStore(RamStore())
        with pytest.raises(InvalidField, match="use a shard"):
            await store.pin("acme", [], 1.0)
        with pytest.raises(InvalidField, match="use a shard"):
            await store.unpin("lease")

    asyncio.run(ask())


def test_both_faces_of_a_url_are_one_store() -> None:
    async def ask() -> None:
        manifest, frames = make_chunk(range(8))
        open_store("ram://both-faces").put(manifest, frames)
        store = open_async_store("ram://both-faces")
        assert await store.lookup("acme", [manifest.key]) == [manifest]
        assert await store.prefetch("acme", [manifest.key]) == 1
        await store.close()
        assert open_store("ram://both-faces").lookup("acme", [manifest.key]) == [manifest]

    asyncio.run(ask())


def test_a_shard_is_opened_for_the_running_loop() -> None:
    async def ask() -> None:
        store = open_async_store("grpc://127.0.0.1:7400?same_host=false")
        assert isinstance(store, AsyncGrpcStore)
        assert store.address == "127.0.0.1:7400"
        await store.close()

    asyncio.run(ask())


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
def test_a_url_that_is_none_is_refused(url: str, error: type[InvalidField]) -> None:
    with pytest.raises(error):
        open_async_store(url)
