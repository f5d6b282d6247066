"""A gateway on its ports, over a stub for an engine: where it listens, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kintsugi.core.deploy import (
    DRAIN_S,
    GATEWAY_DEPLOYMENT,
    GatewaySpec,
    GatewaySpecExpert,
    ModelSpec,
    ServiceSpec,
    service_application,
)
from kintsugi.core.errors import InvalidField, KintsugiError
from kintsugi.core.exchange import COMPLETIONS_PATH
from kintsugi.core.settings import non_default_fields
from kintsugi.gateway.fronts.grpc_server import STOP_GRACE_S
from kintsugi.gateway.texts.segments import LONG_CHARS
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.sdk.client import Client
from kintsugi.serving import gateway_replica
from kintsugi.serving.gateway_replica import OpenGateway
from tests.fakes.stub_backend import StubBackend, StubDelays
from tests.integration.serving.gateways import own_logging

NAMESPACE = "acme"
STORE_URL = "ram://gateway-replica"
MODEL = ModelSpec(str(bundled_checkpoint()))
DEADLINE_S = 20.0


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@asynccontextmanager
async def opened(host: str = "127.0.0.1", delays: StubDelays | None = None) -> AsyncIterator[OpenGateway]:
    spec = GatewaySpec(host=host, grpc_port=0, http_port=0, expert=GatewaySpecExpert(fill_on_miss=False))
    gateway = await OpenGateway.open(spec, StubBackend(delays), STORE_URL, str(bundled_checkpoint()))
    try:
        yield gateway
    finally:
        await gateway.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_either_spelling_of_an_ipv6_address_serves_both_protocols(host: str) -> None:
    def tokens_of(address: str) -> int:
        with Client(address, NAMESPACE) as client:
            return len(client.tokenize(["a text"]))

    async def ask() -> None:
        async with opened(host) as gateway, httpx.AsyncClient() as caller:
            assert gateway.grpc.address.startswith("[::1]:")
            assert gateway.http.address.startswith("[::1]:")
            assert await asyncio.to_thread(tokens_of, gateway.grpc.address) == 1
            assert (await caller.get(f"http://{gateway.http.address}/readyz")).status_code == 200

    asyncio.run(ask())


async def answers(gateway: OpenGateway, question: str = "why?") -> list[asyncio.Task[str]]:
    """One under way over each protocol, and what becomes of it."""

    def over_grpc() -> str:
        with Client(gateway.grpc.address, NAMESPACE) as client:
            try:
                return client.generate([], question, max_tokens=1).finish_reason
            except KintsugiError as error:
                return type(error).__name__

    async def over_http() -> str:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as caller:
            url = f"http://{gateway.http.address}{COMPLETIONS_PATH}"
            answer = await caller.post(url, json={"prompt": question})
            return str(answer.json()["choices"][0]["finish_reason"])

    tasks = [asyncio.create_task(asyncio.to_thread(over_grpc)), asyncio.create_task(over_http())]
    while gateway.front.answers.under_way < len(tasks) and not all(task.done() for task in tasks):
        await asyncio.sleep(0.005)
    return tasks


def test_a_text_that_no_model_reads_is_refused_by_its_length() -> None:
    """By the tokenizer's longest token, before 260,000 characters become tokens."""

    def refused(address: str) -> str:
        with Client(address, NAMESPACE) as client, pytest.raises(InvalidField) as caught:
            client.generate([], "x" * (LONG_CHARS + 1))
        return str(caught.value)

    async def ask() -> None:
        async with opened() as gateway:
            assert f"a text has at most {LONG_CHARS} here" in await asyncio.to_thread(
                refused, gateway.grpc.address
            )

    asyncio.run(ask())


def test_answers_under_way_may_end_for_as_long_as_was_said() -> None:
    async def ask() -> None:
        async with asyncio.timeout(DEADLINE_S), opened(delays=StubDelays(first_token_s=0.5)) as gateway:
            under_way = await answers(gateway)
            await gateway.close(DEADLINE_S)
            assert await asyncio.gather(*under_way) == ["length", "length"]

    asyncio.run(ask())


def test_answers_that_take_longer_are_cut() -> None:
    async def ask() -> None:
        async with asyncio.timeout(DEADLINE_S), opened(delays=StubDelays(first_token_s=600.0)) as gateway:
            under_way = await answers(gateway)
            began_s = time.monotonic()
            await gateway.close(0.2)
            assert time.monotonic() - began_s < STOP_GRACE_S / 2
            cut = await asyncio.gather(*under_way, return_exceptions=True)
            assert "length" not in cut

    asyncio.run(ask())


def test_who_watches_the_health_holds_up_no_stop() -> None:
    async def ask() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            opened() as gateway,
            grpc.aio.insecure_channel(gateway.grpc.address) as channel,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            await gateway.close(2 * DEADLINE_S)
            assert await watch.code() is grpc.StatusCode.OK

    asyncio.run(ask())


class Replica(gateway_replica.GatewayReplica):
    """Its `__del__` does nothing: Serve awaits the real one, the garbage collector cannot."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], gateway_replica.GatewayReplica]]:
    """As Serve makes it, with a stub in place of the engines' handle."""
    monkeypatch.setattr(gateway_replica, "RayBackend", lambda *given: StubBackend())
    with own_logging():
        yield lambda: Replica(None, non_default_fields(MODEL), STORE_URL)


def told(fill_on_miss: bool = True) -> dict[str, Any]:
    """What Serve hands to a replica."""
    expert = GatewaySpecExpert(fill_on_miss=fill_on_miss)
    spec = ServiceSpec(MODEL, gateway=GatewaySpec(grpc_port=0, http_port=0, expert=expert))
    deployments = service_application(spec)["deployments"]
    (config,) = (one["user_config"] for one in deployments if one["name"] == GATEWAY_DEPLOYMENT)
    return dict(config)


def test_a_replica_logs_a_line_for_every_request(
    replica: Callable[[], gateway_replica.GatewayReplica], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing else has turned its logger on."""

    async def ask() -> None:
        gateway = replica()
        await gateway.reconfigure(told())
        try:
            assert gateway._opened is not None
            await asyncio.gather(*await answers(gateway._opened, "a secret question"))
        finally:
            await gateway._close()

    asyncio.run(ask())
    written = capfd.readouterr().err
    lines = [json.loads(line) for line in written.splitlines()]
    requests = {line["method"]: line for line in lines if "request_id" in line}
    assert set(requests) == {"Generate", COMPLETIONS_PATH}
    assert [requests[name]["status"] for name in ("Generate", COMPLETIONS_PATH)] == ["OK", 200]
    assert all(line["ms"] > 0 and line["level"] == "INFO" for line in requests.values())
    assert "secret" not in written


def test_a_gateway_that_is_configured_anew_drains(
    replica: Callable[[], gateway_replica.GatewayReplica],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graces: list[float] = []
    close = OpenGateway.close

    async def watched(self: OpenGateway, grace_s: float) -> None:
        graces.append(grace_s)
        await close(self, grace_s)

    monkeypatch.setattr(OpenGateway, "close", watched)

    async def configure() -> None:
        gateway = replica()
        await gateway.reconfigure(told())
        addresses = gateway.addresses()
        await gateway.reconfigure(told())
        assert (gateway.addresses(), graces) == (addresses, []), "the same closes nothing"
        await gateway.reconfigure(told(fill_on_miss=False))
        assert graces == [DRAIN_S]
        await gateway._close()
        assert graces == [DRAIN_S, DRAIN_S]

    asyncio.run(configure())
