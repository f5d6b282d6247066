"""A gateway on gRPC and HTTP that two tokens open, over a stub for an engine. Prints its addresses and runs
until it is killed.

Usage: python -m benchmarks.support.trust.door_server TOKENS_FILE
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kintsugi.core.deploy import GatewaySpec
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.serving.gateway_replica import raise_file_limit
from kintsugi.store.protocol.access import TokenFile
from tests.fakes.openai_backend import ScriptedBackend, answered, gateway_over


async def run(tokens: Path) -> None:
    raise_file_limit()
    gateway = gateway_over(ScriptedBackend(lambda call: answered("fine")), access=TokenFile(tokens))
    grpc_server = GatewayServer(gateway, GatewaySpec(grpc_port=0))
    http_server = HttpServer(HttpFront(gateway).app, "127.0.0.1", 0)
    await grpc_server.start()
    await http_server.start()
    print(grpc_server.address, http_server.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))
