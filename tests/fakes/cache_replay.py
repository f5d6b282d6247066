"""Replays a trace of chunk uses against an eviction policy.

A trace is generated, or read from Mooncake's JSON lines: `{"hash_ids": [...]}` per request, where each id is
a block of one byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kintsugi.store.shard.eviction.policy import EvictionPolicy


@dataclass(frozen=True)
class TraceAccess:
    """One use of a chunk."""

    key: str
    size_bytes: int = 1
    cost_ms: float = 0.0


@dataclass(frozen=True)
class Replay:
    """What a policy made of a trace."""

    accesses: int
    hits: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0


def replay(accesses: Iterable[TraceAccess], policy: EvictionPolicy[str], capacity_bytes: int) -> Replay:
    """Every miss is stored, evicting what the policy gives up; a chunk larger than the tier passes by."""
    sizes: dict[str, int] = {}
    used = count = hits = 0
    for access in accesses:
        count += 1
        if access.key in sizes:
            hits += 1
            policy.touch(access.key)
            continue
        if access.size_bytes > capacity_bytes:
            continue
        while used + access.size_bytes > capacity_bytes:
            victim = policy.evict(lambda _: True)
            assert victim is not None
            used -= sizes.pop(victim)
        sizes[access.key] = access.size_bytes
        used += access.size_bytes
        policy.admit(access.key, access.size_bytes, access.cost_ms)
    return Replay(count, hits)


def read_trace(path: Path) -> list[TraceAccess]:
    """The uses of blocks in a Mooncake trace, in order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [TraceAccess(str(block)) for row in rows for block in row["hash_ids"]]


def rag_trace(documents: int, requests: int, seed: int, skew: float = 0.9) -> list[TraceAccess]:
    """A generated RAG trace: six chunks per request, documents by Zipf, sizes of 128 to 2,048 tokens.

    Cost grows with the square of a chunk's length, as attention's does, on top of the linear part.
    """
    chance = random.Random(seed)
    tokens = [chance.choice((128, 256, 512, 512, 1024, 2048)) for _ in range(documents)]
    weights = [1 / (rank + 1) ** skew for rank in range(documents)]
    order = list(range(documents))
    chance.shuffle(order)
    picks = chance.choices(order, weights, k=6 * requests)
    return [TraceAccess(str(pick), tokens[pick], tokens[pick] * (1 + tokens[pick] / 4096)) for pick in picks]
