"""Processes that a round kills. They print each acknowledgement on a line until they die."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

from benchmarks.support.trust.fleet import NAMESPACE
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store

ENGINE = {"max_model_len": 1024, "block_size": 32, "kv_cache_memory_bytes": 64 << 20, "dtype": "bfloat16"}
CHUNK_TOKENS = 24


def gateway(folder: str, store_url: str) -> None:
    """Serve a gateway whose engine is a stub that stores made-up chunks; print its address."""
    from kintsugi.core.deploy import GatewaySpec
    from kintsugi.gateway.fronts.grpc_server import GatewayServer
    from kintsugi.gateway.gateway import Gateway
    from kintsugi.gateway.texts.known_chunks import KnownChunks
    from tests.fakes.stub_backend import StubBackend

    async def serve() -> None:
        store: Any = open_store(store_url)
        backend = StubBackend(store=cast(RamStore, store))
        known = KnownChunks(Path(folder))
        served = Gateway(backend, store, lambda text: list(text.encode()), known=known)
        server = GatewayServer(served, GatewaySpec(grpc_port=0))
        await server.start()
        print(server.address, flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


def engine(store_url: str, seed: int) -> None:
    """Save random chunks with a real engine; print the key of each that is stored."""
    from kintsugi.core.spaces import ChunkKey
    from kintsugi.engine.local import LocalEngine
    from tests.fakes.random_models.factory import make_checkpoint_once

    chance = random.Random(seed)
    config = {"store": store_url, "save_only": True, "quality": "off"}
    with LocalEngine.start(make_checkpoint_once("tiny-llama"), extra_config=config, **ENGINE) as local:
        space = local.space(NAMESPACE)
        while True:
            chunks = [[chance.randrange(3, 200) for _ in range(CHUNK_TOKENS)] for _ in range(4)]
            saved = local.save(space.prefix_token_ids, chunks, NAMESPACE)
            for chunk, one in zip(chunks, saved, strict=True):
                if one.is_saved:
                    print(ChunkKey.of(space, chunk).hex, flush=True)
