"""The clients' cores on an event loop: the same contract, and many requests in one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

import pytest

from kintsugi.core.errors import DeadlineExceeded, InvalidField, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.core.spaces import ChunkKey
from kintsugi.store.client import blocking
from kintsugi.store.client.blocking import BlockingStore
from kintsugi.store.client.calls import AsyncCalls, run_to_completion
from kintsugi.store.client.directory import FixedDirectory, ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import AsyncGrpcStore, GrpcOptions
from kintsugi.store.client.sharded import AsyncShardedStore
from kintsugi.store.protocol.interface import AsyncChunkStore, LayerFrame
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import StoreContract, make_chunk

T = TypeVar("T")
EVERYTHING = (range(3), HeadRange(0, 4), 5.0)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60.0)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def take() -> tuple[T] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        async def close() -> None:
            await items.aclose()

        try:
            while (item := self.run(take())) is not None:
                yield item[0]
        finally:
            self.run(close())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def in_this_thread(ours: Callable[[Any], Any], others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`ours` for the caller's thread: an engine that outlives a test asks its own store all the time."""
    mine = threading.current_thread()
    return lambda awaited: (ours if threading.current_thread() is mine else others)(awaited)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def servers(stack: ExitStack) -> list[ShardServer]:
    return [
        stack.enter_context(ShardServer(Shard(RamTier(8 << 20), shard_id=f"shard-{i}"), "127.0.0.1:0"))
        for i in range(2)
    ]


def directory(servers: list[ShardServer]) -> FixedDirectory:
    shards = tuple(ShardAddress(server.shard.shard_id, server.address) for server in servers)
    return FixedDirectory(ShardMap(1, shards))


@pytest.fixture(params=["grpc", "shared-memory", "sharded"])
def store(
    request: pytest.FixtureRequest, servers: list[ShardServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[BlockingStore]:
    """The blocking face, driven by an event loop instead of to the end at once."""
    loop = Loop()
    for name, drive in (("run_to_completion", loop.run), ("iterate", loop.iterate)):
        monkeypatch.setattr(blocking, name, in_this_thread(drive, getattr(blocking, name)))

    async def opened() -> AsyncChunkStore:
        if request.param == "sharded":
            return AsyncShardedStore(directory(servers))
        return AsyncGrpcStore(servers[0].address, GrpcOptions(same_host=request.param != "grpc"))

    store = BlockingStore(loop.run(opened()))
    yield store
    store.close()
    loop.close()


class TestAsyncStores(StoreContract):
    pass


def test_many_requests_share_one_thread(servers: list[ShardServer]) -> None:
    chunks = [make_chunk(range(start, start + 40)) for start in range(0, 5000, 100)]

    async def read(store: AsyncChunkStore, index: int) -> bool:
        manifest, frames = chunks[index]
        async with aclosing(store.stream("acme", [manifest.key], *EVERYTHING)) as items:
            return [bytes(item.data) async for item in items if isinstance(item, LayerFrame)] == frames

    async def run() -> None:
        store = AsyncShardedStore(directory(servers), GrpcOptions(same_host=False))
        threads = threading.active_count()
        assert all(await asyncio.gather(*(store.put(*chunk) for chunk in chunks)))
        assert all(await asyncio.gather(*(read(store, index) for index in range(len(chunks)))))
        assert threading.active_count() - threads < len(chunks) // 2  # the shards run here, too
        pinned = await store.pin("acme", [chunks[0][0].key], 10.0)
        assert (pinned.chunks, await store.unpin(pinned.lease_id)) == (1, 1)
        await store.close()

    asyncio.run(run())


def test_an_error_crosses_the_wire_as_itself(servers: list[ShardServer]) -> None:
    async def run() -> None:
        store = AsyncGrpcStore(servers[0].address)
        with pytest.raises(InvalidField, match="namespace"):
            await store.lookup("", [ChunkKey(bytes(32))])
        await store.close()
        with pytest.raises(Unavailable):
            await store.lookup("acme", [ChunkKey(bytes(32))])
        nobody = AsyncGrpcStore("127.0.0.1:1", GrpcOptions(call_timeout_s=2.0))
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await nobody.lookup("acme", [ChunkKey(bytes(32))])
        await nobody.close()

    asyncio.run(run())


def test_a_layer_that_does_not_come_is_a_deadline(servers: list[ShardServer]) -> None:
    manifest, frames = make_chunk(range(40))
    residence = servers[0].shard.begin_put(manifest)
    assert residence is not None
    for layer, frame in enumerate(frames):
        residence.write(layer, memoryview(frame))
    servers[0].shard.commit(residence)
    residence.residence.unloaded.add(1)

    async def run() -> None:
        calls = AsyncCalls(servers[0].address, None)
        store = AsyncGrpcStore(servers[0].address, GrpcOptions(same_host=False), calls)
        async with aclosing(store.stream("acme", [manifest.key], range(3), HeadRange(0, 4), 0.3)) as items:
            assert bytes((await anext(items)).data) == frames[0]  # type: ignore[union-attr]
            with pytest.raises(DeadlineExceeded):
                await anext(items)
        await store.close()

    asyncio.run(run())


def test_a_core_that_suspends_is_not_driven_blindly() -> None:
    async def suspends() -> None:
        await asyncio.sleep(0)

    coroutine = suspends()
    with pytest.raises(AssertionError, match="suspended"):
        run_to_completion(coroutine)
    coroutine.close()
