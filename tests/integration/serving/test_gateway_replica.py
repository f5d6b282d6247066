"""A gateway on its ports, over a stub for an engine: where it listens, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kintsugi.checkpoints.bundled import BUNDLED_CHECKPOINT
from kintsugi.client.sdk import Client
from kintsugi.core.deploy import GatewaySpec
from kintsugi.serving.gateway_replica import OpenGateway
from kintsugi.serving.stub import StubBackend

NAMESPACE = "acme"
STORE_URL = "ram://gateway-replica"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@asynccontextmanager
async def opened(host: str) -> AsyncIterator[OpenGateway]:
    spec = GatewaySpec(host=host, grpc_port=0, http_port=0, fill_on_miss="off")
    gateway = await OpenGateway.open(spec, StubBackend(), STORE_URL, str(BUNDLED_CHECKPOINT))
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
