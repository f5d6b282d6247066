"""Many engines on one clock: each prefills one prompt at a time, and a router sends prompts to them.

What an engine does and what the router believes are different: engines differ in speed by up to a fifth,
loading overlaps computing, and reports are up to a second old, as `serving.engine_router` gets them.
"""

from __future__ import annotations

import heapq
import json
import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kintsugi.core.spaces import ChunkKey, Span
from kintsugi.engine.load import LoadMeter
from kintsugi.serving.routing import (
    BLOCK_TOKENS,
    EngineView,
    PrefixMemory,
    RouteCosts,
    Wanted,
    rank_engines,
    tokens_by_host,
)
from kintsugi.store.client.directory import ShardAddress, ShardMap

REPORT_S = 1.0
OVERHEAD_S = 0.005
"""Fixed cost of a request, in addition to its tokens."""
TRACE_BLOCK_TOKENS = 512


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
    """The engines, and where chunks lie."""

    engines: int
    hosts: int
    tokens_per_s: float
    """Prefill speed of an average engine."""
    cached_blocks_max: int = 4096
    """Prefix cache of each."""
    hit_share: float = 0.25
    """Time for a token of a stored chunk, as a share of its prefill time."""
    remote_s_per_token: float = 0.0
    local_s_per_token: float = 0.0

    def shards(self) -> ShardMap:
        """One on each host."""
        return ShardMap(1, tuple(ShardAddress(f"shard-{n}", f"host{n}:7400") for n in range(self.hosts)))


class _Engine:
    """Prefills one prompt after the other; keeps the blocks of the last ones."""

    def __init__(self, name: str, host: str, speed: float, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.name = name
        self.host = host
        self.load = LoadMeter(clock)
        self.outstanding = 0
        self.free_at_s = 0.0
        self._tokens_per_s = speed * fleet.tokens_per_s
        self._fleet = fleet
        self._cached: OrderedDict[int, None] = OrderedDict()

    def take(self, now_s: float, arrival: Arrival, by_host: dict[str, int]) -> tuple[float, int]:
        """When the first token is there, and how many tokens the prefix cache held."""
        resident = 0
        for block in arrival.blocks:
            if block not in self._cached:
                break
            resident += BLOCK_TOKENS
        for block in arrival.blocks:
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) > self._fleet.cached_blocks_max:
            self._cached.popitem(last=False)
        hits = min(sum(span.end - span.start for span in arrival.spans), arrival.num_tokens - resident)
        fresh = arrival.num_tokens - resident - hits
        compute_s = (fresh + self._fleet.hit_share * hits) / self._tokens_per_s
        local = by_host.get(self.host, 0) if by_host else hits
        remote = max(0, hits - local)
        load_s = remote * self._fleet.remote_s_per_token + local * self._fleet.local_s_per_token
        self.free_at_s = max(now_s, self.free_at_s) + OVERHEAD_S + max(compute_s, load_s)
        return self.free_at_s, resident


class Choice(ABC):
    """A router."""

    @abstractmethod
    def choose(self, engines: Sequence[_Engine], arrival: Arrival, by_host: dict[str, int]) -> _Engine:
        """Where it goes."""

    def reported(self, engines: Sequence[_Engine]) -> None:
        """Every `REPORT_S`."""
        return


class RoundRobin(Choice):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, engines: Sequence[_Engine], arrival: Arrival, by_host: dict[str, int]) -> _Engine:
        self._next += 1
        return engines[self._next % len(engines)]


class TwoChoices(Choice):
    """Serve's own: the shorter queue of two at random, asked at that moment."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, engines: Sequence[_Engine], arrival: Arrival, by_host: dict[str, int]) -> _Engine:
        return min(self._random.sample(list(engines), min(2, len(engines))), key=lambda e: e.outstanding)


class Ours(Choice):
    """`serving.routing` with reports as old as Serve's."""

    def __init__(self, costs: RouteCosts) -> None:
        self._costs = costs
        self._memory = PrefixMemory()
        self._reports: dict[str, EngineView] = {}
        self._sent: dict[str, int] = {}

    def reported(self, engines: Sequence[_Engine]) -> None:
        for engine in engines:
            stats = engine.load.stats()
            self._reports[engine.name] = EngineView(stats.waiting_tokens, stats.tokens_per_s, engine.host)
        self._sent = {}

    def choose(self, engines: Sequence[_Engine], arrival: Arrival, by_host: dict[str, int]) -> _Engine:
        views = {}
        for engine in engines:
            report = self._reports.get(engine.name, EngineView(host=engine.host))
            waiting = report.waiting_tokens + self._sent.get(engine.name, 0)
            views[engine.name] = EngineView(waiting, report.tokens_per_s, report.host)
        wanted = Wanted(arrival.num_tokens, arrival.blocks, by_host)
        name = rank_engines(views, wanted, self._memory, self._costs)[0]
        self._memory.record_route(arrival.blocks, name)
        self._sent[name] = self._sent.get(name, 0) + arrival.num_tokens
        return next(engine for engine in engines if engine.name == name)


@dataclass
class Outcome:
    """The result of one run."""

    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    resident: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def hit_share(self) -> float:
        return self.resident / self.tokens


def simulate(arrivals: Sequence[Arrival], fleet: Fleet, choice: Choice, seed: int) -> Outcome:
    """All requests through one router."""
    now = [0.0]
    speeds = random.Random(seed)
    engines = [
        _Engine(f"e{n}", f"host{n % fleet.hosts}", speeds.uniform(0.9, 1.1), fleet, lambda: now[0])
        for n in range(fleet.engines)
    ]
    shards, outcome = fleet.shards(), Outcome()
    running: list[tuple[float, int, _Engine]] = []
    report_at_s = 0.0
    for number, arrival in enumerate(arrivals):
        while running and running[0][0] <= arrival.at_s:
            now[0], ended, engine = heapq.heappop(running)
            engine.outstanding -= 1
            engine.load.record_first_token(str(ended))
            engine.load.record_end(str(ended))
        now[0] = arrival.at_s
        if arrival.at_s >= report_at_s:
            choice.reported(engines)
            report_at_s = arrival.at_s + REPORT_S
        by_host = tokens_by_host(arrival.spans, shards)
        engine = choice.choose(engines, arrival, by_host)
        first_s, resident = engine.take(arrival.at_s, arrival, by_host)
        engine.outstanding += 1
        engine.load.record_start(str(number), arrival.num_tokens)
        heapq.heappush(running, (first_s, number, engine))
        outcome.ttft_s.append(first_s - arrival.at_s)
        outcome.tokens += arrival.num_tokens
        outcome.resident += resident
    return outcome


def conversations(path: Path) -> list[Arrival]:
    """A trace of Mooncake's: times, lengths and shared beginnings of a production chat service."""
    arrivals = []
    per_block = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
    for line in path.read_text().splitlines():
        record = json.loads(line)
        blocks = [block * per_block + part for block in record["hash_ids"] for part in range(per_block)]
        whole = record["input_length"] // BLOCK_TOKENS
        arrivals.append(Arrival(record["timestamp"] / 1e3, record["input_length"], tuple(blocks[:whole])))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def retrievals(count: int, rate_per_s: float, seed: int, documents: int = 200) -> list[Arrival]:
    """Poisson arrivals of prompts with six chunks of 512 tokens; documents by Zipf's law, exponent 0.9."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(documents)]
    keys = [ChunkKey(draw.randbytes(32)) for _ in range(documents)]
    recent: deque[Arrival] = deque()
    at_s = 0.0
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        chosen = draw.choices(range(documents), weights, k=6)
        spans = tuple(Span(512 * n, 512 * n + 512, keys[chunk]) for n, chunk in enumerate(chosen))
        recent.append(Arrival(at_s, 6 * 512 + 64, spans=spans))
    return list(recent)
