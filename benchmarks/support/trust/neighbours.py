"""How much a flood by one tenant delays another that keeps within its share.

Four namespaces have a quarter of the engines each. One offers nine tenths of its quarter, alone and then
while another offers ten times its own. The engine is a stub that answers a fixed number of requests at once,
first come, first served, so that all fairness is the gateway's; its times to first token differ from request
to request, as those of prompts do (with equal ones all its places would come free at once, and a request that
has to wait would wait for all of them). Without the gateway's queue the same load is measured beside it, and
not judged.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from benchmarks.support.figures import Figure
from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.exchange import EngineDelta, EngineRequest
from kintsugi.core.spaces import TokenIds
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import GenerateCall, Resolved
from kintsugi.gateway.texts.segments import Segment
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.access import ANYONE
from tests.fakes.stub_backend import StubBackend, StubDelays

PLACES = 8
SERVICE_S = 0.1
"""Mean time to first token."""
SPREAD = 0.5
"""Times are uniform within this part of the mean around it."""
SHARE = 0.25
CALM_LOAD = 0.9
"""Part of its share that the calm tenant offers."""
FLOOD = 10.0
"""What the other tenant offers, relative to its share."""
PROMPT_TOKENS = 512
QUEUED = 200
"""Requests of a namespace that may wait."""
BAR = 1.5


class BusyEngine(StubBackend):
    """Answers `PLACES` requests at a time, the others in the order in which they came."""

    def __init__(self) -> None:
        super().__init__(StubDelays())
        self._slots = asyncio.Semaphore(PLACES)
        self._generator = random.Random(0)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        async with self._slots, aclosing(super().generate(request)) as deltas:
            await asyncio.sleep(SERVICE_S * self._generator.uniform(1 - SPREAD, 1 + SPREAD))
            async for delta in deltas:
                yield delta


@dataclass
class Tenant:
    """Sends requests at exponential intervals, whatever becomes of them."""

    name: str
    per_s: float
    ttfts_s: list[float] = field(default_factory=list)
    refused: int = 0

    async def run(self, gateway: Gateway, seconds: float, seed: int) -> None:
        generator, tasks = random.Random(f"{self.name} {seed}"), []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            tasks.append(asyncio.create_task(self._ask(gateway, generator.randrange(1 << 20))))
            await asyncio.sleep(generator.expovariate(self.per_s))
        await asyncio.gather(*tasks)

    async def _ask(self, gateway: Gateway, number: int) -> None:
        tokens = TokenIds.of([number, *range(1, PROMPT_TOKENS)])
        question = Segment(token_ids=TokenIds.of([1, 2, 3]))
        call = GenerateCall(self.name, (Segment(token_ids=tokens),), question, {"max_tokens": 1})
        began_s = time.perf_counter()
        try:
            async with aclosing(gateway.generate(ANYONE, call)) as events:
                async for event in events:
                    if not isinstance(event, Resolved):
                        self.ttfts_s.append(time.perf_counter() - began_s)
                        return
        except ResourceExhausted:
            self.refused += 1

    @property
    def p95_s(self) -> float:
        return statistics.quantiles(self.ttfts_s, n=20)[-1]


async def _measure(seconds: float, seed: int, places: int | None, flood: bool) -> tuple[Tenant, Tenant]:
    gateway = Gateway(BusyEngine(), RamStore(), lambda text: [ord(one) for one in text], engine_places=places)
    quarter_per_s = SHARE * PLACES / SERVICE_S
    calm, loud = Tenant("calm", CALM_LOAD * quarter_per_s), Tenant("loud", FLOOD * quarter_per_s)
    try:
        runs = [calm.run(gateway, seconds, seed)] + ([loud.run(gateway, seconds, seed)] if flood else [])
        await asyncio.gather(*runs)
    finally:
        await gateway.close()
    return calm, loud


def measure(*, quick: bool, seed: int) -> list[Figure]:
    """The section's figures."""
    seconds = 6.0 if quick else 60.0
    alone, _ = asyncio.run(_measure(seconds, seed, PLACES, flood=False))
    beside, loud = asyncio.run(_measure(seconds, seed, PLACES, flood=True))
    unfair, _ = asyncio.run(_measure(min(seconds, 10.0), seed, None, flood=True))
    detail = (
        f"p95 {alone.p95_s * 1e3:.0f} ms alone of {len(alone.ttfts_s)} requests, {beside.p95_s * 1e3:.0f} ms "
        f"beside; {beside.refused} of the tenant's refused, {loud.refused} of the flood's"
    )
    return [
        Figure.at_most("neighbour_ttft_ratio", beside.p95_s / alone.p95_s, BAR, detail=detail),
        Figure.at_most("neighbour_refused", float(beside.refused), 0, "requests"),
        Figure("neighbour_ttft_ratio_without_queue", unfair.p95_s / alone.p95_s, "×"),
    ]
