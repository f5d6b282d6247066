"""A simulated fleet of engines on one clock, and the routers that send requests to it.

The time of a request comes from the hardware (`Hardware`): floating-point operations per layer, bytes per
token and bandwidths. Nothing of it comes from `kintsugi.serving.routing`, whose forecast is what the
simulation judges. Engines differ in speed by up to a fifth, and their reports are up to a second old.
"""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kintsugi.core.spaces import ChunkKey, Span
from kintsugi.engine.watching import LoadMeter, LoadStats
from kintsugi.serving.engine_router import Sent
from kintsugi.serving.routing import (
    BLOCK_TOKENS,
    EngineView,
    PrefixMemory,
    Wanted,
    rank_engines,
    tokens_by_host,
)
from kintsugi.store.client.directory import ShardAddress, ShardMap

Clock = Callable[[], float]
REPORT_S = 1.0
CHUNK_TOKENS = 512
CHUNKS = 6
QUESTION_TOKENS = 64


@dataclass(frozen=True)
class Hardware:
    """What an engine runs on, and its model: 8 billion parameters in bfloat16 on one H100.

    A pass goes through the layers one by one. A layer computes every fresh token and some of the loaded
    ones, and starts when its KV has arrived; the next layer's KV loads meanwhile.
    """

    layers: int = 32
    hidden: int = 4096
    parameters: float = 8e9
    flops_per_s: float = 0.4 * 990e12
    """40 % of an H100's peak in bfloat16."""
    step_tokens: int = 8192
    """Tokens per engine step; a longer prompt takes several."""
    step_s: float = 0.005
    """Time of a step besides its computing."""
    recompute_ratio: float = 0.15
    """Share of loaded tokens that layers behind the first compute again; the first computes all of them."""
    kv_bytes_per_token: float = 65_536.0
    """8 KV heads of 128, keys and values, in 8 bit."""
    same_host_bytes_per_s: float = 12.1e9
    """Measured: `same_host_read_gb_per_s` in benchmarks/results/store.json."""
    network_bytes_per_s: float = 3.1e9
    """A link of 25 Gb/s."""

    def first_token_s(self, fresh: int, resident: int = 0, same_host: int = 0, remote: int = 0) -> float:
        """Time of a prefill of so many tokens: to compute, in the prefix cache, to load from either place."""
        loaded = same_host + remote
        visible = (2 * resident + fresh + loaded) / 2
        token_flops = (2 * self.parameters + 4 * self.layers * self.hidden * visible) / self.layers
        bytes_per_layer = self.kv_bytes_per_token / self.layers
        load_s = max(
            same_host * bytes_per_layer / self.same_host_bytes_per_s,
            remote * bytes_per_layer / self.network_bytes_per_s,
        )
        first_s = (fresh + loaded) * token_flops / self.flops_per_s
        later_s = (fresh + self.recompute_ratio * loaded) * token_flops / self.flops_per_s
        ended_s = load_s + first_s
        for layer in range(1, self.layers):
            ended_s = max(ended_s, (layer + 1) * load_s) + later_s
        return math.ceil((fresh + loaded) / self.step_tokens) * self.step_s + ended_s


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_s: float
    num_tokens: int
    blocks: tuple[int, ...] = ()
    """Digests of its prompt's beginnings, `BLOCK_TOKENS` apart."""
    spans: tuple[Span, ...] = ()
    """Its chunks, all of them stored."""


@dataclass(frozen=True)
class Fleet:
    """The engines, and the hosts that engines and shards share."""

    engines: int
    hosts: int
    hardware: Hardware = Hardware()
    cached_blocks_max: int = 4096
    """Size of each engine's prefix cache."""

    def shards(self) -> ShardMap:
        """One on each host."""
        return ShardMap(1, tuple(ShardAddress(f"shard-{n}", f"host{n}:7400") for n in range(self.hosts)))


class SimulatedEngine:
    """Prefills one prompt after the other, and keeps the blocks of the latest ones."""

    def __init__(
        self, name: str, host: str, slowness: float, fleet: Fleet, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.host = host
        self.load = LoadMeter(clock)
        self.outstanding = 0
        self.free_at_s = 0.0
        self._slowness = slowness
        self._fleet = fleet
        self._cached: OrderedDict[int, None] = OrderedDict()

    def take(self, arrival: Arrival, shards: ShardMap) -> tuple[float, int]:
        """When the first token is there, and how many tokens the prefix cache held."""
        resident = BLOCK_TOKENS * self._cache(arrival.blocks)
        remote = same_host = 0
        for span in arrival.spans:
            if span.start >= resident and span.key is not None:
                is_here = shards.owners(span.key)[0].address.startswith(f"{self.host}:")
                same_host += is_here * span.num_tokens
                remote += (not is_here) * span.num_tokens
        fresh = arrival.num_tokens - resident - same_host - remote
        work_s = self._fleet.hardware.first_token_s(fresh, resident, same_host, remote)
        self.free_at_s = max(arrival.at_s, self.free_at_s) + self._slowness * work_s
        return self.free_at_s, resident

    def _cache(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks were there. All of them are afterwards."""
        found = next((n for n, block in enumerate(blocks) if block not in self._cached), len(blocks))
        for block in blocks:
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) > self._fleet.cached_blocks_max:
            self._cached.popitem(last=False)
        return found


class Router(ABC):
    """Chooses an engine for each request."""

    @abstractmethod
    def choose(self, number: int, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> SimulatedEngine:
        """Where request ``number`` goes."""

    def hear(self, engines: Sequence[SimulatedEngine]) -> None:
        """Engines report, every `REPORT_S`."""
        return

    def end(self, number: int, engine: SimulatedEngine) -> None:
        """A request has its answer."""
        return


class RoundRobin(Router):
    """Every engine in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, number: int, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> SimulatedEngine:
        self._next += 1
        return engines[self._next % len(engines)]


class TwoChoices(Router):
    """Ray Serve's own: the shorter queue of two random ones, as they are at that moment."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, number: int, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> SimulatedEngine:
        return min(self._random.sample(list(engines), min(2, len(engines))), key=lambda e: e.outstanding)


class ForecastRouter(Router):
    """`serving.routing`, with what `serving.engine_router` knows: old reports, and what it sent itself."""

    def __init__(self, shards: ShardMap) -> None:
        self._shards = shards
        self._memory = PrefixMemory()
        self._now_s = 0.0
        self._reports: dict[str, LoadStats] = {}
        self._sent: dict[str, Sent] = {}

    def hear(self, engines: Sequence[SimulatedEngine]) -> None:
        self._reports = {engine.name: engine.load.stats() for engine in engines}

    def end(self, number: int, engine: SimulatedEngine) -> None:
        self._sent[engine.name].remove(str(number))

    def choose(self, number: int, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> SimulatedEngine:
        self._now_s = arrival.at_s
        views = {engine.name: self._view(engine) for engine in engines}
        wanted = Wanted(arrival.num_tokens, arrival.blocks, tokens_by_host(arrival.spans, self._shards))
        name = rank_engines(views, wanted, self._memory)[0]
        self._memory.record_route(arrival.blocks, name)
        self._sent[name].add(str(number), arrival.num_tokens)
        return next(engine for engine in engines if engine.name == name)

    def _view(self, engine: SimulatedEngine) -> EngineView:
        sent = self._sent.setdefault(engine.name, Sent(lambda: self._now_s))
        report = self._reports[engine.name]
        sent.take_report(vars(report))
        return EngineView(sent.waiting_tokens(), report.tokens_per_s, engine.host)


@dataclass
class Waits:
    """How long the requests of one run waited, and what prefix caches held of their prompts."""

    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    resident: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def resident_share(self) -> float:
        return self.resident / self.tokens


def simulate(arrivals: Sequence[Arrival], fleet: Fleet, router: Router, seed: int) -> Waits:
    """Send all requests through one router."""
    now = [0.0]
    slowness = random.Random(seed)
    engines = [
        SimulatedEngine(f"e{n}", f"host{n % fleet.hosts}", slowness.uniform(0.9, 1.1), fleet, lambda: now[0])
        for n in range(fleet.engines)
    ]
    shards, waits = fleet.shards(), Waits()
    running: list[tuple[float, int, SimulatedEngine]] = []
    report_at_s = 0.0
    for number, arrival in enumerate(arrivals):
        while running and running[0][0] <= arrival.at_s:
            now[0], ended, engine = heapq.heappop(running)
            engine.outstanding -= 1
            engine.load.record_first_token(str(ended))
            engine.load.record_end(str(ended))
            router.end(ended, engine)
        now[0] = arrival.at_s
        if arrival.at_s >= report_at_s:
            router.hear(engines)
            report_at_s = arrival.at_s + REPORT_S
        engine = router.choose(number, arrival, engines)
        first_s, resident = engine.take(arrival, shards)
        engine.outstanding += 1
        engine.load.record_start(str(number), arrival.num_tokens)
        heapq.heappush(running, (first_s, number, engine))
        waits.ttft_s.append(first_s - arrival.at_s)
        waits.tokens += arrival.num_tokens
        waits.resident += resident
    return waits


def draw_retrievals(count: int, rate_per_s: float, seed: int, documents: int = 200) -> list[Arrival]:
    """Poisson arrivals of prompts of chunks and a question; chunks by Zipf's law with exponent 0.9."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(documents)]
    keys = [ChunkKey(draw.randbytes(32)) for _ in range(documents)]
    arrivals, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        chosen = draw.choices(range(documents), weights, k=CHUNKS)
        starts = range(0, CHUNKS * CHUNK_TOKENS, CHUNK_TOKENS)
        spans = [Span(s, s + CHUNK_TOKENS, keys[chunk]) for s, chunk in zip(starts, chosen, strict=True)]
        arrivals.append(Arrival(at_s, CHUNKS * CHUNK_TOKENS + QUESTION_TOKENS, spans=tuple(spans)))
    return arrivals
