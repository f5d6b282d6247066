"""What a gateway on gRPC lets a caller, and somebody without a token, hold open."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kintsugi.gateway.gateway import GatewayLimits
from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.store.protocol import grpc_server
from kintsugi.store.protocol.access import TokenFile
from tests.integration.serving.gateways import Setup, running, token_file

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
TOKENIZE = "/kintsugi.rpc.v1.Kintsugi/Tokenize"
PLACES, HELD = 8, 6
"""Of eight places, one caller gets six."""
DEADLINE_S = 20.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HALF_A_HEADER = bytes([0, 0x40, 0, 1, 0, 0, 0, 0, 1]) + b"\x40\x7f\x81\x7d" + b"x" * 1000


class Caller:
    """Calls with one token, or without."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def open(self, method: str) -> Any:
        """A call that has sent no message yet."""
        return self._channel.stream_stream(method)(metadata=self._metadata)

    async def watch(self) -> Any:
        """An open watch, or the status that it was refused with."""
        request = HealthCheckRequest().SerializeToString()
        call = self._channel.unary_stream(WATCH)(request, metadata=self._metadata)
        try:
            assert await call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError:
            return await call.code()
        return call

    async def tokenize(self) -> grpc.StatusCode:
        request = pb.TokenizeRequest(namespace="modest", texts=["a"]).SerializeToString()
        call = self._channel.unary_unary(TOKENIZE)(request, metadata=self._metadata)
        return await call.code()


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Runs a test with a greedy caller, a modest one and a stranger, each on a connection of its own."""
    path, tokens = token_file(tmp_path, ("greedy", ("greedy",)), ("modest", ("modest",)))
    limits = GatewayLimits(concurrent_max=PLACES, watches_max=PLACES)

    def run(body: Callable[..., Awaitable[None]]) -> None:
        async def bounded(address: str) -> None:
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with (
                asyncio.timeout(DEADLINE_S),
                grpc.aio.insecure_channel(address, options=options) as greedy,
                grpc.aio.insecure_channel(address, options=options) as modest,
                grpc.aio.insecure_channel(address, options=options) as stranger,
            ):
                await body(
                    Caller(greedy, tokens["greedy"]),
                    Caller(modest, tokens["modest"]),
                    Caller(stranger, None),
                )

        with running(Setup(gateway={"access": TokenFile(path), "limits": limits})) as gateway:
            asyncio.run(bounded(gateway.address))

    return run


async def refused(calls: list[Any], count: int) -> list[grpc.StatusCode]:
    """Waits until so many calls have ended."""
    codes: list[grpc.StatusCode] = []
    for ended in asyncio.as_completed([asyncio.ensure_future(call.code()) for call in calls]):
        codes.append(await ended)
        if len(codes) == count:
            return codes
    return codes


def test_calls_whose_message_does_not_come_take_few_places(serve: Any) -> None:
    async def body(greedy: Caller, modest: Caller, stranger: Caller) -> None:
        calls = [greedy.open(TOKENIZE) for _ in range(PLACES)]
        codes = await refused(calls, PLACES - HELD)
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert await modest.tokenize() is grpc.StatusCode.OK
        assert sum(call.done() for call in calls) == PLACES - HELD
        for call in calls:
            call.cancel()
        while await greedy.tokenize() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # they end one after the other
            await asyncio.sleep(0)

    serve(body)


def test_watches_take_no_place_of_requests_and_not_all_of_watches(serve: Any) -> None:
    async def body(greedy: Caller, modest: Caller, stranger: Caller) -> None:
        watches = [await greedy.watch() for _ in range(PLACES)]
        assert watches[HELD:] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * (PLACES - HELD)
        assert await modest.tokenize() is grpc.StatusCode.OK
        assert not isinstance(await modest.watch(), grpc.StatusCode)
        assert await greedy.tokenize() is grpc.StatusCode.PERMISSION_DENIED, "another tenant's namespace"
        assert not any(watch.done() for watch in watches[:HELD])

    serve(body)


def test_reflection_streams_count_as_watches(serve: Any) -> None:
    async def body(greedy: Caller, modest: Caller, stranger: Caller) -> None:
        codes = await refused([greedy.open(REFLECT) for _ in range(PLACES)], PLACES - HELD)
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert not isinstance(await modest.watch(), grpc.StatusCode)

    serve(body)


def test_a_stranger_has_no_place(serve: Any) -> None:
    async def body(greedy: Caller, modest: Caller, stranger: Caller) -> None:
        for method in (TOKENIZE, WATCH, REFLECT):
            calls = [stranger.open(method) for _ in range(4 * PLACES)]
            assert set(await refused(calls, len(calls))) == {grpc.StatusCode.UNAUTHENTICATED}
        probe = stranger.open(CHECK)
        assert HealthCheckResponse.FromString(await probe.read()).status == HealthCheckResponse.SERVING
        assert await modest.tokenize() is grpc.StatusCode.OK

    serve(body)


def test_a_request_without_a_message_is_refused(serve: Any) -> None:
    async def body(greedy: Caller, modest: Caller, stranger: Caller) -> None:
        for method in (TOKENIZE, WATCH, CHECK):
            call = modest.open(method)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "send one message" in await call.details()
            call = modest.open(method)
            await call.write(b"\xff\xff not protobuf")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    serve(body)


def test_a_message_that_does_not_come_is_not_waited_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MESSAGE_READ_S", 0.05)

    async def body(greedy: Caller, modest: Caller, stranger: Caller) -> None:
        for method in (TOKENIZE, WATCH):
            call = modest.open(method)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "send it faster" in await call.details()
        assert await modest.tokenize() is grpc.StatusCode.OK

    serve(body)


@pytest.mark.parametrize(
    "sent", [b"", PREFACE, PREFACE + HALF_A_HEADER], ids=["nothing", "no_call", "half_a_header"]
)
def test_a_connection_without_a_call_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(grpc_server, "IDLE_S", 0.2)
    with running() as gateway:
        host, port = gateway.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall(sent)
            try:
                while connection.recv(1 << 16):
                    pass
            except ConnectionResetError:
                pass
