"""Shards of this version and of the one before format 3, behind one client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import pytest

from kintsugi.core.errors import VersionMismatch
from kintsugi.core.layout import FORMATS, PLAIN_FORMAT, PRIOR_LAYER, ChunkManifest
from kintsugi.core.spaces import ChunkKey
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.directory import FixedDirectory, ShardAddress, ShardMap
from kintsugi.store.client.formats import FORMATS_AGE_S_MAX, FormatNotStored, StoredFormats
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.sharded import ShardedStore
from kintsugi.store.protocol.breaker import FAILURES_MAX
from kintsugi.store.protocol.chunk_events import EventPage
from kintsugi.store.shard.put import PutOptions
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.service import ChunkStoreService
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.contracts.store_contract import SPACE, make_chunk, make_encrypted_chunk, make_mixed_chunk, read_all


class EarlierService(ChunkStoreService):
    """A shard of the version before: it announces no formats, refuses what is newer, and retains nothing."""

    def _put_header(self, message: bytes) -> tuple[ChunkManifest, PutOptions]:
        manifest, options = super()._put_header(message)
        if manifest.format != PLAIN_FORMAT:
            raise VersionMismatch(f"manifest.format_version: {manifest.format} is not {PLAIN_FORMAT}")
        return manifest, options

    async def retain(self, request: pb.RetainRequest, context: Any) -> None:  # type: ignore[override]
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def list_events(self, request: pb.ListEventsRequest, context: Any) -> None:  # type: ignore[override]
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        response = await super().stats(request, context)
        del response.formats[:]
        return response


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, shard_id: str) -> ShardServer:
    return stack.enter_context(ShardServer(Shard(RamTier(8 << 20), shard_id=shard_id), "127.0.0.1:0"))


@pytest.fixture
def earlier(stack: ExitStack) -> ShardServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kintsugi.store.shard.server.ChunkStoreService", EarlierService)
        return serve(stack, "earlier")


def client(stack: ExitStack, *servers: ShardServer) -> ShardedStore:
    """A store of the servers, each of which owns every chunk."""
    shards = tuple(ShardAddress(server.shard.shard_id, server.address) for server in servers)
    return stack.enter_context(closing(ShardedStore(FixedDirectory(ShardMap(1, shards, len(shards))))))


def make_prior_chunk() -> tuple[ChunkManifest, list[bytes]]:
    """A uniform chunk with a prior frame."""
    plain, frames = make_chunk(range(40))
    frames = [bytes(range(40)), *frames]
    of = (SPACE, plain.key, plain.anchor, plain.num_tokens, plain.layout, plain.codec)
    return ChunkManifest.of(*of, frames, ("deviation",)), frames


def test_a_shard_of_before_tells_no_events(stack: ExitStack, earlier: ShardServer) -> None:
    new = serve(stack, "new")
    store, before = client(stack, earlier, new), client(stack, earlier)
    cursor, mute = (one.events("acme", "", 10).cursor for one in (store, before))
    manifest, frames = make_chunk(range(40))
    store.put(manifest, frames)
    page = store.events("acme", cursor, 10)
    assert [(event.key, event.shard) for event in page.events] == [(manifest.key, new.address)]
    assert not page.lost
    assert before.events("acme", mute, 10) == EventPage([], mute, False)


def test_plain_chunks_are_put_to_either_without_a_question(
    stack: ExitStack, earlier: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = client(stack, earlier, serve(stack, "later"))
    monkeypatch.setattr(GrpcStore, "_stats", lambda self: pytest.fail("asked for its formats"))
    manifest, frames = make_chunk(range(40))
    assert store.put(manifest, frames)
    assert read_all(store, [manifest.key]) == [(0, layer, frames[layer]) for layer in range(3)]
    assert len(earlier.shard) == 1


def test_an_earlier_shard_gets_a_chunk_without_its_priors(stack: ExitStack, earlier: ShardServer) -> None:
    later = serve(stack, "later")
    store = client(stack, earlier, later)
    manifest, frames = make_prior_chunk()
    assert store.put(manifest, frames)
    bare = make_chunk(range(40))[0]
    for server, held in ((earlier, bare), (later, manifest)):
        (entry,) = server.shard.lookup("acme", [manifest.key])
        assert entry is not None
        assert entry.manifest == held
    assert read_all(client(stack, earlier), [manifest.key], layers=range(PRIOR_LAYER, 3)) == [
        (0, layer, frames[1 + layer]) for layer in range(3)
    ]


@pytest.mark.parametrize("make", [make_mixed_chunk, make_encrypted_chunk])
def test_an_earlier_shard_that_cannot_hold_a_chunk_serves_what_it_has(
    stack: ExitStack, earlier: ShardServer, make: Any
) -> None:
    store = client(stack, earlier)
    plain, frames = make_chunk(range(900, 950))
    store.put(plain, frames)
    for start in range(FAILURES_MAX + 1):  # more than what opens its breaker
        with pytest.raises(FormatNotStored, match="stores no chunks of format 3; upgrade the shard"):
            store.put(*make(range(start, start + 40)))
    assert store.lookup("acme", [plain.key]) == [plain]
    assert len(earlier.shard) == 1


def test_a_replica_of_this_version_is_enough(stack: ExitStack, earlier: ShardServer) -> None:
    store = client(stack, earlier, serve(stack, "later"))
    manifest, frames = make_mixed_chunk(range(40))
    assert store.put(manifest, frames)
    expected = [(0, layer, frame) for layer, frame in zip(manifest.layers, frames, strict=True)]
    assert read_all(store, [manifest.key], layers=manifest.layers) == expected


def test_a_shard_is_asked_once_and_again_after_a_while() -> None:
    answers, now_s, asked = [pb.StatsResponse(format_version=2)], [0.0], []

    def ask() -> pb.StatsResponse:
        asked.append(now_s[0])
        return answers[-1]

    formats = StoredFormats(ask, lambda: now_s[0])
    assert [formats.holds(2), formats.holds(3), formats.holds(3)] == [True, False, False]
    assert asked == [0.0]
    answers.append(pb.StatsResponse(format_version=2, formats=FORMATS))
    now_s[0] = FORMATS_AGE_S_MAX
    assert [formats.holds(3), formats.holds(3)] == [True, True]
    assert asked == [0.0, FORMATS_AGE_S_MAX]


def test_an_earlier_shard_says_what_is_there_and_keeps_it_as_it_was(
    stack: ExitStack, earlier: ShardServer
) -> None:
    store = client(stack, earlier)
    manifest, frames = make_chunk(range(8))
    store.put(manifest, frames, ttl_s=60.0)
    for _ in range(FAILURES_MAX + 1):
        assert store.retain("acme", [manifest.key, ChunkKey(bytes(32))]) == [True, False]
    (entry,) = earlier.shard.lookup("acme", [manifest.key])
    assert entry is not None
    assert entry.expires_at_s < math.inf
