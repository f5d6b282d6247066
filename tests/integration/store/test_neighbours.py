"""What one tenant's calls to a shard may delay of another's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.shard import shard as shard_module
from kintsugi.store.shard.eviction.room import NoRoomYet
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.service import ERASERS
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import ChunkPut, PutOptions, RamTier
from tests.contracts.store_contract import make_chunk

CALLS = 4 * ERASERS


@pytest.fixture
def server() -> Iterator[ShardServer]:
    with ShardServer(Shard(RamTier(64 << 20)), "127.0.0.1:0", ServerOptions(share_arena=False)) as server:
        yield server


@pytest.fixture
def stores(server: ShardServer) -> Iterator[tuple[GrpcStore, GrpcStore]]:
    """The clients of a loud tenant and of a quiet one."""
    with ExitStack() as stack:
        loud, quiet = (GrpcStore(server.address, GrpcOptions(same_host=False)) for _ in range(2))
        stack.callback(loud.close)
        stack.callback(quiet.close)
        yield loud, quiet


def test_erasures_that_wait_for_slow_readers_delay_no_other(
    server: ShardServer, stores: tuple[GrpcStore, GrpcStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "ERASE_GRACE_S", 60.0)
    loud, quiet = stores
    small, frames = make_chunk(range(40))
    quiet.put(small, frames)
    large, large_frames = make_chunk(range(20_000))  # more than a connection buffers
    loud.put(replace(large, namespace="loud"), large_frames)
    stream = loud.stream("loud", [large.key], range(3), HeadRange(0, 4), deadline_s=60.0)
    next(stream)
    with ThreadPoolExecutor(CALLS) as threads:
        waiting = [threads.submit(loud.erase, "loud", [large.key], time.time()) for _ in range(CALLS)]
        while len(server.shard.erasures) == 0:
            time.sleep(0.01)
        began_s = time.monotonic()
        quiet.erase(small.namespace, [small.key], time.time())
        assert time.monotonic() - began_s < 10.0
        assert not any(one.done() for one in waiting), "the reader still holds the chunk"
        stream.close()  # type: ignore[attr-defined]
        for one in waiting:
            one.result(30.0)
    assert quiet.lookup(small.namespace, [small.key]) == [None]


def test_puts_that_wait_for_room_delay_no_other(
    server: ShardServer, stores: tuple[GrpcStore, GrpcStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    loud, quiet = stores
    small, frames = make_chunk(range(40))
    refused: list[str] = []
    begin_put = server.shard.begin_put

    def begin(manifest: ChunkManifest, options: PutOptions | None = None) -> ChunkPut | None:
        refused.append(manifest.namespace)
        if manifest.namespace == "loud" or refused.count(manifest.namespace) == 1:
            raise NoRoomYet("no room yet")
        return begin_put(manifest, options)

    monkeypatch.setattr(server.shard, "begin_put", begin)
    monkeypatch.setattr("kintsugi.store.shard.service.PUT_WAIT_S_MAX", 5.0)
    with ThreadPoolExecutor(CALLS) as threads:
        waiting = [threads.submit(loud.put, replace(small, namespace="loud"), frames) for _ in range(CALLS)]
        while refused.count("loud") < CALLS:
            time.sleep(0.01)
        assert quiet.put(small, frames)
        assert not any(one.done() for one in waiting)
        for one in waiting:
            assert isinstance(one.exception(30.0), NoRoomYet.__mro__[1])
