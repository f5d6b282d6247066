"""Replay a trace against an eviction policy, beside Belady's optimum. Pure but for reading the trace.

A trace is JSON lines: `{"key": "…", "size": bytes, "cost_ms": …}` per access, or Mooncake's
`{"hash_ids": [...]}` per request, each id a block of one byte.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField
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
    bytes: int
    hit_bytes: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def byte_hit_ratio(self) -> float:
        return self.hit_bytes / self.bytes if self.bytes else 0.0


def replay(accesses: Iterable[TraceAccess], policy: EvictionPolicy[str], capacity_bytes: int) -> Replay:
    """Every miss is stored, evicting what the policy gives up; a chunk larger than the tier passes by."""
    sizes: dict[str, int] = {}
    used = count = hits = total = hit_bytes = 0
    for access in accesses:
        count += 1
        total += access.size_bytes
        if access.key in sizes:
            hits += 1
            hit_bytes += access.size_bytes
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
    return Replay(count, hits, total, hit_bytes)


class Belady(EvictionPolicy[str]):
    """Knows the future: what is used again last leaves first. Optimal where all sizes are equal, a strong
    reference where they are not."""

    def __init__(self, accesses: Sequence[TraceAccess]) -> None:
        self._next: list[float] = [math.inf] * len(accesses)
        upcoming: dict[str, int] = {}
        for index in range(len(accesses) - 1, -1, -1):
            self._next[index] = upcoming.get(accesses[index].key, math.inf)
            upcoming[accesses[index].key] = index
        self._accesses = accesses
        self._position = 0
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def _advance(self, key: str) -> None:
        while self._accesses[self._position].key != key:
            self._position += 1  # accesses that passed by
        self._due[key] = self._next[self._position]
        heapq.heappush(self._heap, (-self._due[key], key))
        self._position += 1

    def admit(self, item: str, size_bytes: int, cost_ms: float) -> None:
        self._advance(item)

    def touch(self, item: str) -> None:
        self._advance(item)

    def remove(self, item: str) -> None:
        self._due.pop(item, None)

    def evict(self, evictable: Any) -> str | None:
        while self._heap:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == -due:
                del self._due[key]
                return key
        return None


def read_trace(path: Path) -> list[TraceAccess]:
    """Raises `InvalidField` naming the file that is empty or cannot be read, or the line that is none."""
    accesses: list[TraceAccess] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidField("trace", f"{path} cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        try:
            accesses += _accesses_of(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise InvalidField(f"{path}:{number}", f"is no access of a trace ({error!r})") from error
    if not accesses:
        raise InvalidField("trace", f"{path} holds no access; write one JSON object per line")
    return accesses


def _accesses_of(row: Any) -> list[TraceAccess]:
    if not isinstance(row, dict):
        raise TypeError("not an object")
    if "hash_ids" in row:
        return [TraceAccess(str(block)) for block in row["hash_ids"]]
    size = int(row.get("size", 1))
    if size <= 0:
        raise ValueError("size must be positive")
    return [TraceAccess(str(row["key"]), size, float(row.get("cost_ms", 0.0)))]


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
