"""A shard that hangs in streams or puts is left alone for a moment, though its lookups are answered."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import pytest

from kintsugi.core.errors import DeadlineExceeded, KintsugiError, NotFound, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.sharded import ShardedStore, _Shard
from kintsugi.store.protocol import wire
from kintsugi.store.protocol.breaker import FAILURES_MAX, OPEN_S, CircuitBreaker
from tests.contracts.store_contract import make_chunk
from tests.fakes.fixed_directory import FixedDirectory

MANIFEST, FRAMES = make_chunk(range(8))
HEADS = HeadRange(0, MANIFEST.layout.num_kv_heads)


class Calls:
    """What a `GrpcStore` calls: transfers end with `error`, or work."""

    def __init__(self) -> None:
        self.error: KintsugiError | None = None
        self.transfers = 0
        self.lookups = 0

    def put(self, messages: Iterator[bytes], timeout_s: float) -> pb.PutChunkKVResponse:
        self._transfer()
        return pb.PutChunkKVResponse(inserted=True)

    def stream(
        self, name: str, request: Any, wait_s: float, response: Any = None
    ) -> Generator[Any, None, None]:
        self._transfer()
        for layer, frame in enumerate(FRAMES):
            header = pb.FrameHeader(chunk=0, layer=layer, size_bytes=len(frame))
            yield bytes(
                wire.with_payload(pb.StreamLayersResponse(frames=[header]).SerializeToString(), [frame])
            )

    def unary(self, name: str, request: Any, response: Any, timeout_s: float) -> Any:
        self.lookups += 1
        return pb.LookupResponse(found=[pb.Found() for _ in request.keys])

    def _transfer(self) -> None:
        self.transfers += 1
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Nothing to close."""


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(calls: Calls, clock: Clock) -> GrpcStore:
    store = GrpcStore("127.0.0.1:1", GrpcOptions(same_host=False))
    store._calls.close()
    store._calls = calls  # type: ignore[assignment]
    store._manifests.remember(MANIFEST)
    store._reads, store._writes = CircuitBreaker(clock), CircuitBreaker(clock)
    return store


def read(store: GrpcStore) -> None:
    list(store.stream("acme", [MANIFEST.key], range(len(FRAMES)), HEADS, deadline_s=1.0))


def read_as_engines_do(store: GrpcStore) -> None:
    """Take every layer, then close the stream without asking whether there is more."""
    with closing(store.stream("acme", [MANIFEST.key], range(len(FRAMES)), HEADS, deadline_s=1.0)) as items:
        for _ in FRAMES:
            next(items)


def put(store: GrpcStore) -> None:
    store.put(MANIFEST, FRAMES)


@pytest.mark.parametrize("transfer", [read, read_as_engines_do, put])
def test_after_some_failures_it_is_asked_once_a_while(
    store: GrpcStore, calls: Calls, clock: Clock, transfer: Any
) -> None:
    calls.error = DeadlineExceeded("hangs")
    for _ in range(FAILURES_MAX):
        with pytest.raises(DeadlineExceeded):
            transfer(store)
    for _ in range(2):
        with pytest.raises(Unavailable, match="is not called for a moment"):
            transfer(store)
    assert calls.transfers == FAILURES_MAX
    clock.now_s += OPEN_S
    with pytest.raises(DeadlineExceeded):
        transfer(store)
    with pytest.raises(Unavailable, match="is not called for a moment"):
        transfer(store)
    calls.error = None
    clock.now_s += OPEN_S
    transfer(store)
    transfer(store)


def test_reads_and_puts_fail_apart(store: GrpcStore, calls: Calls) -> None:
    calls.error = DeadlineExceeded("hangs")
    for _ in range(FAILURES_MAX):
        with pytest.raises(DeadlineExceeded):
            put(store)
    calls.error = None
    read(store)
    with pytest.raises(Unavailable, match="is not called for a moment"):
        put(store)


def test_an_answer_is_no_failure(store: GrpcStore, calls: Calls) -> None:
    calls.error = NotFound("no such chunk")
    for _ in range(FAILURES_MAX + 1):
        with pytest.raises(NotFound):
            read(store)


@pytest.mark.parametrize("transfer", [read, read_as_engines_do, put])
def test_only_failures_in_a_row_count(store: GrpcStore, calls: Calls, transfer: Any) -> None:
    for _ in range(2):
        calls.error = DeadlineExceeded("hangs")
        for _ in range(FAILURES_MAX - 1):
            with pytest.raises(DeadlineExceeded):
                transfer(store)
        calls.error = None
        transfer(store)


@pytest.fixture
def sharded(store: GrpcStore, clock: Clock) -> Iterator[ShardedStore]:
    """The store as the only shard of a map."""
    address = ShardAddress("shard-0", store.address)
    sharded = ShardedStore(FixedDirectory(ShardMap(1, (address,), 1)))
    sharded._shard(address).store.close()
    sharded._shards[address] = _Shard(store, CircuitBreaker(clock))
    yield sharded
    sharded.close()


def look_up(sharded: ShardedStore) -> None:
    sharded.lookup("acme", [MANIFEST.key])


def test_puts_that_are_not_sent_leave_lookups_alone(sharded: ShardedStore, calls: Calls) -> None:
    calls.error = DeadlineExceeded("hangs")
    for _ in range(2 * FAILURES_MAX):
        with pytest.raises(Unavailable):
            sharded.put(MANIFEST, FRAMES)
        if calls.transfers < FAILURES_MAX:
            look_up(sharded)
    assert calls.transfers == FAILURES_MAX
    answered = calls.lookups
    look_up(sharded)
    assert calls.lookups == answered + 1


def test_a_put_that_is_not_sent_is_no_probe(sharded: ShardedStore, calls: Calls, clock: Clock) -> None:
    (shard,) = sharded._shards.values()
    for _ in range(FAILURES_MAX):
        shard.breaker.record_failure()
    clock.now_s += OPEN_S
    for _ in range(FAILURES_MAX):
        shard.store._writes.record_failure()
    with pytest.raises(Unavailable):
        sharded.put(MANIFEST, FRAMES)
    look_up(sharded)
    assert (calls.transfers, calls.lookups) == (0, 1)
    assert shard.breaker.is_closed


def test_a_probe_may_be_closed_early(sharded: ShardedStore, clock: Clock) -> None:
    (shard,) = sharded._shards.values()
    for _ in range(FAILURES_MAX):
        shard.breaker.record_failure()
    clock.now_s += OPEN_S
    with closing(sharded.stream("acme", [MANIFEST.key], range(len(FRAMES)), HEADS, deadline_s=1.0)) as items:
        for _ in FRAMES:
            next(items)
    assert shard.breaker.is_closed
