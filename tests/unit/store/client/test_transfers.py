"""A shard that hangs in streams or puts is left alone for a moment, though its lookups are answered."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from kintsugi.core.errors import DeadlineExceeded, KintsugiError, NotFound, Unavailable
from kintsugi.core.layout import HeadRange
from kintsugi.rpc.v1 import store_pb2 as pb
from kintsugi.store.client.breaker import FAILURES_MAX, OPEN_S, CircuitBreaker
from kintsugi.store.client.grpc_store import GrpcOptions, GrpcStore
from tests.contracts.store_contract import make_chunk

MANIFEST, FRAMES = make_chunk(range(8))


class Calls:
    """What a `GrpcStore` calls: transfers end with `error`, or work."""

    def __init__(self) -> None:
        self.error: KintsugiError | None = None
        self.transfers = 0

    def put(self, messages: Iterator[bytes], timeout_s: float) -> pb.PutChunkKVResponse:
        self._transfer()
        return pb.PutChunkKVResponse(inserted=True)

    def stream(
        self, name: str, request: Any, wait_s: float, response: Any = None
    ) -> Generator[Any, None, None]:
        self._transfer()
        yield from ()

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
    list(store.stream("acme", [MANIFEST.key], range(1), HeadRange(0, 1), deadline_s=1.0))


def put(store: GrpcStore) -> None:
    store.put(MANIFEST, FRAMES)


@pytest.mark.parametrize("transfer", [read, put])
def test_after_some_failures_it_is_asked_once_a_while(
    store: GrpcStore, calls: Calls, clock: Clock, transfer: Any
) -> None:
    calls.error = DeadlineExceeded("hangs")
    for _ in range(FAILURES_MAX):
        with pytest.raises(DeadlineExceeded):
            transfer(store)
    for _ in range(2):
        with pytest.raises(Unavailable, match="left alone"):
            transfer(store)
    assert calls.transfers == FAILURES_MAX
    clock.now_s += OPEN_S
    with pytest.raises(DeadlineExceeded):
        transfer(store)
    with pytest.raises(Unavailable, match="left alone"):
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
    with pytest.raises(Unavailable, match="left alone"):
        put(store)


def test_an_answer_is_no_failure(store: GrpcStore, calls: Calls) -> None:
    calls.error = NotFound("no such chunk")
    for _ in range(FAILURES_MAX + 1):
        with pytest.raises(NotFound):
            read(store)
