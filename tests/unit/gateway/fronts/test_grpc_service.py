"""The order in which a streamed answer goes out, and what waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from kintsugi.core.exchange import Usage
from kintsugi.gateway.fronts.grpc_service import SERVICE, KintsugiService, event_to_wire
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import Finished
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.client.ram import RamStore
from tests.fakes.stub_backend import StubBackend


def request(**sampling: Any) -> bytes:
    return pb.GenerateRequest(
        namespace="tenant",
        segments=[pb.Segment(text="a chunk")],
        question=pb.Content(text="why?"),
        sampling=pb.Sampling(max_tokens=3, **sampling),
    ).SerializeToString()


class Aborted(Exception):
    """What gRPC raises from `abort`."""


class StubContext:
    """gRPC's side of one call, which notes what is sent, and may hold up or fail what comes first."""

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]] = (), data: bytes = request()) -> None:
        self._data = data
        self.sent: list[Any] = []
        self.status: grpc.StatusCode | None = None
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.failure: Exception | None = None
        self._metadata = tuple(metadata)

    async def read(self) -> bytes:
        return self._data

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        await asyncio.sleep(0)
        self.sent.append(dict(metadata)["x-request-id"])

    async def write(self, message: pb.GenerateResponse) -> None:
        await self.may_write.wait()
        if self.failure is not None:
            raise self.failure
        self.sent.append(message.WhichOneof("event"))

    def set_trailing_metadata(self, metadata: Any) -> None:
        return None

    async def abort(self, status: grpc.StatusCode, detail: str) -> None:
        self.status = status
        raise Aborted(detail)


@dataclass(frozen=True)
class _Details:
    """A call's details, as gRPC passes them when it asks for a handler."""

    method: str
    invocation_metadata: tuple[()] = ()


async def _generated(backend: StubBackend, context: StubContext) -> None:
    """One call of `Generate`, as gRPC makes it."""
    gateway = Gateway(backend, RamStore(), lambda text: [ord(letter) for letter in text])
    handler = KintsugiService(gateway).generic_handler().service(_Details(f"/{SERVICE}/Generate"))
    try:
        await handler.stream_stream(None, context)
    finally:
        await gateway.close()


def test_what_was_resolved_comes_first_and_behind_the_requests_id() -> None:
    context = StubContext([("x-request-id", "mine"), ("x-request-id-bin", b"\0")])
    asyncio.run(_generated(StubBackend(), context))
    assert context.sent == ["mine", "resolved", "delta", "delta", "delta", "finished"]


def test_an_engine_is_asked_before_the_client_was_told_what_was_resolved() -> None:
    async def ask() -> list[Any]:
        backend, context = StubBackend(), StubContext()
        context.may_write.clear()
        call = asyncio.create_task(_generated(backend, context))
        async with asyncio.timeout(10):
            while not backend.seen.requests:
                await asyncio.sleep(0)
        before = [*context.sent]
        context.may_write.set()
        await call
        return [len(before), *context.sent[1:]]

    told, *events = asyncio.run(ask())
    assert told <= 1, "at most the request's id"
    assert events == ["resolved", "delta", "delta", "delta", "finished"]


def test_an_engine_that_refuses_is_heard_behind_what_was_resolved() -> None:
    context = StubContext(data=request(extra_json='{"heat": 1}'))
    with pytest.raises(Aborted, match=r"sampling\.heat"):
        asyncio.run(_generated(StubBackend(), context))
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert context.sent[1:] == ["resolved"]


def test_a_message_that_cannot_be_sent_ends_the_work() -> None:
    backend, context = StubBackend(), StubContext()
    context.failure = RuntimeError("the client is gone")
    with pytest.raises(Aborted):
        asyncio.run(_generated(backend, context))
    assert context.status is grpc.StatusCode.INTERNAL
    assert (backend.seen.running, backend.seen.ended_early) == (0, 1)


def test_an_answers_accounting_keeps_its_types() -> None:
    accounting = {
        "outcome": "blended",
        "tokens_hit": 3,
        "ratio": 0.5,
        "flag": True,
        "recomputed_positions": {0: [1, 2]},
        "timeline": [{"load_start_ms": 0.0}],
    }
    wire = event_to_wire(Finished("length", accounting, Usage(3, 1, 0), 1.0))
    assert MessageToDict(wire.finished.accounting) == {**accounting, "recomputed_positions": {"0": [1, 2]}}
    assert wire.finished.plan.tokens_hit == 3
