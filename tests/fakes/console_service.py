"""A gateway's HTTP front with the console over a stub engine that explains its blends, on a port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kintsugi.core.accounting import Accounting, LayerTiming, Outcome
from kintsugi.core.exchange import EngineDelta, EngineRequest
from kintsugi.core.request import Op
from kintsugi.gateway.fronts.http import HttpFront
from kintsugi.gateway.fronts.openai_server import HttpServer
from kintsugi.gateway.gateway import Gateway
from kintsugi.models.bundled import BUNDLED_NAME, bundled_checkpoint
from kintsugi.precompute.chunking import Chunker
from kintsugi.store.client.ram import RamStore
from tests.fakes.stub_backend import StubBackend, StubDelays

Result = TypeVar("Result")

LAYERS = 8
RATIO = 0.15
FULL_S = 0.12
BLEND_S = 0.03


class ExplainingBackend(StubBackend):
    """Full prefills take longer than blends; a blend says which tokens each layer computed."""

    def __init__(self, delays: StubDelays | None, store: RamStore) -> None:
        super().__init__(delays, store=store)
        self._info = replace(
            self._info,
            model=BUNDLED_NAME,
            blending="on",
            selector="query",
            ratio=RATIO,
            ratios_min={"query": 0.1, "hkvd": 0.2},
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        is_timed = request.scored_token is None
        await asyncio.sleep(is_timed * (FULL_S if request.params.op is Op.OFF else BLEND_S))
        async for delta in super().generate(request):
            yield delta

    async def _accounting(self, request: EngineRequest) -> Accounting:
        found = await super()._accounting(request)
        if found.outcome is not Outcome.BLENDED or not request.params.explain:
            return found
        length, spans = len(request.prompt_token_ids), request.params.spans or ()
        in_chunks = {position for span in spans for position in range(span.start, span.end)}
        around = [position for position in range(length) if position not in in_chunks]
        again = [position for position in sorted(in_chunks) if position * 37 % 100 < 100 * RATIO]
        deep = sorted([*around, *again])
        positions = {0: list(range(length)), **dict.fromkeys(range(1, LAYERS), deep)}
        return replace(
            found,
            reason=None,
            selector="query",
            ratio=RATIO,
            tokens_question=len(around),
            tokens_recomputed=len(again),
            token_layers_computed=float(sum(map(len, positions.values()))),
            token_layers_total=length * LAYERS,
            bytes_loaded=length * 1024,
            transport="ram",
            recomputed_positions=positions,
            timeline=[LayerTiming(3.0 * n, 3.0 * n + 2, 3.5 * n + 2, 3.5 * n + 5) for n in range(LAYERS)],
        )


@dataclass
class ConsoleService:
    """A console that is served on a loop of its own."""

    loop: asyncio.AbstractEventLoop
    gateway: Gateway
    backend: ExplainingBackend
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}/console"

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """In the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


@contextmanager
def console_service(
    delays: StubDelays | None = None, port: int = 0, **gateway: Any
) -> Iterator[ConsoleService]:
    """``gateway``: more arguments of `Gateway`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[ConsoleService, HttpServer]:
        store, chunker = RamStore(), Chunker.of_model(bundled_checkpoint())
        backend = ExplainingBackend(delays, store)
        opened = Gateway(backend, store, chunker.token_ids, detokenize=chunker.text_of, **gateway)
        server = HttpServer(HttpFront(opened).app, "127.0.0.1", port)
        await server.start()
        return ConsoleService(loop, opened, backend, server.address), server

    async def stop(service: ConsoleService, server: HttpServer) -> None:
        await server.stop(0.0)
        await service.gateway.close()

    try:
        service, server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        try:
            yield service
        finally:
            service.run(stop(service, server))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
