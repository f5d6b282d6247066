"""Measures how much one tenant delays another that keeps within its share.

**Answers.** Four namespaces have a quarter of the engines each. One offers nine tenths of its quarter, alone
and then while another offers ten times its own. The engine is a stub that answers a fixed number of requests
at once, first come, first served, so that all fairness is the gateway's; its times to first token differ from
request to request, as those of prompts do (with equal ones all its places would come free at once, and a
request that has to wait would wait for all of them). Without the gateway's queue the same load is measured
beside it, and not judged.

**Erasures.** A tenant erases one chunk after the other at a real shard with an SSD tier: alone, and while
`READERS` readers of another tenant hardly read, and that tenant erases what they hold.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.support import http2
from benchmarks.support.figures import Figure
from benchmarks.support.trust.fleet import ShardProcess, kill
from kintsugi.core.errors import ResourceExhausted
from kintsugi.core.exchange import EngineDelta, EngineRequest
from kintsugi.core.spaces import ChunkKey, TokenIds
from kintsugi.gateway.gateway import Gateway
from kintsugi.gateway.prompts import GenerateCall, Resolved
from kintsugi.gateway.texts.segments import Segment
from kintsugi.rpc.v1 import store_pb2
from kintsugi.store.client.grpc_store import GrpcStore
from kintsugi.store.client.options import GrpcOptions
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.access import ANYONE
from tests.contracts.store_contract import make_chunk
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
TOKENS = 40
"""Tokens of an erased chunk."""
QUEUED = 200
"""Requests of a namespace that may wait."""
BAR = 1.5
READERS = 40
ERASURE_BAR = 2.0
SETTLE_S = 0.3
"""Time until the readers' calls and the erasures of their chunks wait."""


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
    """Sends requests at exponential intervals, without waiting for answers."""

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
        return p95_of(self.ttfts_s)


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


class Eraser:
    """One tenant of a shard."""

    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._name = name
        self._store = GrpcStore(address, GrpcOptions(same_host=False))
        self._numbers = itertools.count(1)

    def put(self) -> ChunkKey:
        """Stores a new chunk."""
        start = TOKENS * next(self._numbers)
        manifest, frames = make_chunk(range(start, start + TOKENS))
        self._store.put(replace(manifest, namespace=self._name), frames)
        return manifest.key

    def erase(self, key: ChunkKey) -> float:
        """The seconds that it takes."""
        began_s = time.perf_counter()
        self._store.erase(self._name, [key], time.time())
        return time.perf_counter() - began_s

    def read_slowly(self, key: ChunkKey) -> socket.socket:
        """A reader whose connection takes a hundred bytes."""
        request = store_pb2.StreamLayersRequest(
            namespace=self._name, keys=[key.digest], layer_stop=3, head_stop=4, deadline_ms=600_000
        )
        path = "/kintsugi.rpc.v1.ChunkStore/StreamLayers"
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        call = http2.call(path, request.SerializeToString(), {"kintsugi-protocol": "1"})
        connection.sendall(http2.open_connection(window_bytes=100) + call)
        return connection

    def close(self) -> None:
        self._store.close()


def _measure_erasures(rounds: int, each: int) -> tuple[list[float], list[float]]:
    """The seconds that the quiet tenant's erasures took alone, and beside the loud tenant's readers."""
    alone_s: list[float] = []
    beside_s: list[float] = []
    with ExitStack() as stack:
        shard = ShardProcess(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(lambda: kill(shard.process))
        loud, quiet = (Eraser(shard.address.address, name) for name in ("loud", "quiet"))
        stack.callback(loud.close)
        stack.callback(quiet.close)
        threads = stack.enter_context(ThreadPoolExecutor(READERS))
        quiet.erase(quiet.put())  # the first one wipes all that was ever written
        for _ in range(rounds):
            alone_s += [quiet.erase(quiet.put()) for _ in range(each)]
            keys = [loud.put() for _ in range(READERS)]
            readers = [loud.read_slowly(key) for key in keys]
            time.sleep(SETTLE_S)
            erasures = [threads.submit(loud.erase, key) for key in keys]
            time.sleep(SETTLE_S)
            during: list[float] = []
            while len(during) < each and not any(one.done() for one in erasures):
                during.append(quiet.erase(quiet.put()))
            assert during, "the loud tenant's erasures do not wait for its readers"
            beside_s += during
            for one in erasures:
                one.result()
            for reader in readers:
                reader.close()
    return alone_s, beside_s


def p95_of(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def _erasure_figure(quick: bool) -> Figure:
    alone_s, beside_s = _measure_erasures(2 if quick else 12, 10)
    ratio = p95_of(beside_s) / p95_of(alone_s)
    detail = (
        f"p95 {p95_of(alone_s) * 1e3:.0f} ms alone of {len(alone_s)}, "
        f"{p95_of(beside_s) * 1e3:.0f} ms beside of {len(beside_s)}"
    )
    return Figure.at_most("neighbour_erasure_ratio", ratio, ERASURE_BAR, detail=detail)


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
        _erasure_figure(quick),
    ]
