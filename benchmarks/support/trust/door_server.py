"""A gateway on gRPC and HTTP, over a stub for an engine, a shard, and a shard directory. Tokens open them.
Prints their addresses and runs until it is killed.

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
from kintsugi.store.client.directory import ShardAddress, ShardMap
from kintsugi.store.protocol.access import TokenFile
from kintsugi.store.shard.server import ServerOptions, ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.fakes.directory_server import serving_directory
from tests.fakes.fixed_directory import FixedDirectory
from tests.fakes.openai_backend import ScriptedBackend, answered, gateway_over


async def run(tokens: Path, shard: str, directory: str) -> None:
    gateway = gateway_over(ScriptedBackend(lambda call: answered("fine")), access=TokenFile(tokens))
    grpc_server = GatewayServer(gateway, GatewaySpec(grpc_port=0))
    http_server = HttpServer(HttpFront(gateway).app, "127.0.0.1", 0)
    await grpc_server.start()
    await http_server.start()
    print(grpc_server.address, http_server.address, shard, directory, flush=True)
    await asyncio.Event().wait()


def main(tokens: Path) -> None:
    raise_file_limit()
    with ShardServer(Shard(RamTier(8 << 20)), "127.0.0.1:0", ServerOptions(tokens_file=tokens)) as shard:
        known = FixedDirectory(ShardMap(1, (ShardAddress(shard.shard.shard_id, shard.address),)))
        with serving_directory(known) as directory:
            asyncio.run(run(tokens, shard.address, directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
