"""One server for all real clients: a shard, an engine of the bundled model, and the HTTP front end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import pytest

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.documents import next_date
from kintsugi.core.exchange import EngineInfo, OpenAICall, OpenAIHead
from kintsugi.core.plan import Selection
from kintsugi.core.report import Binding
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint
from kintsugi.engine.asynchronous import AsyncEngine, AsyncSpec, EngineParts, launch
from kintsugi.engine.config import OpenAIOptions
from kintsugi.gateway.fronts.grpc_server import GatewayServer
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_answer import Piece
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.gateway import Gateway, PutState
from kintsugi.gateway.texts.segments import Segment
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.models.hub import find_aliases
from kintsugi.precompute.chunking import Chunker, ChunkingConfig
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.access import ANYONE
from kintsugi.store.shard.server import ShardServer
from kintsugi.store.shard.shard import Shard
from kintsugi.store.shard.tiers.ram_tier import RamTier
from tests.fakes.reports import passing_report
from tests.integration.engine.conftest import PATIENT, EngineSlot

T = TypeVar("T")
CHUNKING = ChunkingConfig(tokens_max=120)
CALL_S = 120.0
SERVED = Selection(0.3, "hybrid", 2)
HUB_NAME = "kintsugi-tests/bundled"
"""As if the configuration had named the model so."""


class NotingEngine(AsyncEngine):
    """Also keeps what each answer said that it cost: frameworks do not show it."""

    def __init__(self, spec: AsyncSpec, parts: EngineParts) -> None:
        super().__init__(spec, parts)
        self.accountings: list[Mapping[str, Any]] = []

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        async with aclosing(super().openai(call)) as pieces:
            async for piece in pieces:
                found = None if isinstance(piece, OpenAIHead) else Piece(piece).accounting
                if found is not None:
                    self.accountings.append(found)
                yield piece


@dataclass
class Served:
    """What tests talk to."""

    address: str
    grpc_address: str
    store_url: str
    model: str
    chunker: Chunker
    info: EngineInfo
    engine: NotingEngine
    gateway: Gateway
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """As OpenAI's clients want it."""
        return f"http://{self.address}/v1"

    def space(self, namespace: str) -> ChunkSpace:
        fingerprint = ModelFingerprint(bytes.fromhex(self.info.fingerprint))
        return ChunkSpace(fingerprint, namespace, self.info.prefix_token_ids, self.info.portable)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(CALL_S)

    def store(self, namespace: str, texts: Sequence[str]) -> int:
        """Put chunks and wait until they are stored. Their tokens."""
        segments = [Segment(text=text) for text in texts]
        puts = self.run(self.gateway.put_chunks(ANYONE, namespace, segments, wait=True))
        assert all(put.state in (PutState.STORED, PutState.PRESENT) for put in puts), puts
        return sum(put.num_tokens for put in puts)

    def headers(self, namespace: str) -> dict[str, str]:
        return {"X-Kintsugi-Namespace": namespace}

    def post(self, path: str, body: dict[str, Any], namespace: str = "default") -> httpx.Response:
        return httpx.post(
            f"http://{self.address}{path}", json=body, headers=self.headers(namespace), timeout=CALL_S
        )


def check_nothing_runs(served: Served) -> None:
    """Whatever was asked of the engine ends within ten seconds."""
    deadline_s = time.monotonic() + 10
    while served.engine.stats().running and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert served.engine.stats().running == 0
    assert not served.engine.client.output_processor.has_unfinished_requests()


class DyingEngine:
    """Dies before the first token of the first request, and behind the first text of the third."""

    def __init__(self, served: Served) -> None:
        self._generate = served.engine.client.generate
        self.tried = 0

    async def generate(self, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        self.tried += 1
        if self.tried == 1:
            raise EngineDeadError
        async for output in self._generate(*args, **more):
            yield output
            if self.tried == 3 and output.outputs[0].text:  # a token without text begins no answer
                raise EngineDeadError


@pytest.fixture(scope="package")
def served(engine_slot: EngineSlot) -> Iterator[Served]:
    engine_slot.close()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(CALL_S)

    with ShardServer(Shard(RamTier(128 << 20)), "127.0.0.1:0") as shard:
        engine = run(_engine(f"grpc://{shard.address}"))
        gateway = run(_gateway(engine, f"grpc://{shard.address}"))
        server = HttpServer(HttpFront(gateway).app, "127.0.0.1", 0)
        run(server.start())
        chunker = Chunker.of_model(bundled_checkpoint(), CHUNKING)
        grpc = GatewayServer(gateway, GatewaySpec(grpc_port=0))
        run(grpc.start())
        yield Served(
            server.address,
            grpc.address,
            f"grpc://{shard.address}",
            BUNDLED_NAME,
            chunker,
            run(engine.info()),
            engine,
            gateway,
            loop,
        )
        run(grpc.stop())
        run(server.stop())
        run(gateway.close())
        sockets, handler = engine.client.engine_core.resources.ctx, engine.client.output_handler
        run(engine.close())
        assert sockets.closed
        assert handler.cancelled()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _gateway(engine: AsyncEngine, store: str) -> Gateway:
    return await Gateway.open(GatewaySpec(), engine, store, bundled_checkpoint())


def publish_report(store_url: str, binding: Binding) -> None:
    """Where engines look: evidence by which prompts of any length pass, in place of what is there."""
    store = open_store(store_url)
    try:
        held = store.get_report(binding.model, binding.report_name)
        created = next_date(datetime.now(UTC), held)
        report = passing_report(binding, [SERVED], created=created)
        store.put_report(binding.model, binding.report_name, report.to_bytes())
    finally:
        store.close()


async def _engine(store: str) -> NotingEngine:
    spec = AsyncSpec(
        str(bundled_checkpoint()),
        BUNDLED_NAME,
        store,
        # The controller would rather prefill in full: this model takes no time for what these tests hit.
        extra_config={"loading_controller": False, "report_poll_ms": 100, **PATIENT},
        vllm_args={"kv_cache_memory_bytes": 256 << 20},
        openai=OpenAIOptions(tool_call_parser="hermes"),
        aliases=find_aliases(BUNDLED_NAME, HUB_NAME, bundled_checkpoint()),
    )
    engine = NotingEngine(spec, await launch(spec, lambda binding: publish_report(store, binding)))
    await engine.warm_up()
    return engine
