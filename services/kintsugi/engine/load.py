"""How busy an engine is: the requests that wait for a first token, and their likely wait. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

MEMORY_TOKENS = 20_000.0
"""Prompt tokens after which an old rate counts half as much."""
MEMORY_S = 30.0


@dataclass(frozen=True)
class LoadStats:
    """The load at one moment, as plain numbers for routing and autoscaling."""

    running: int
    """Requests that have not ended, waiting ones included."""
    waiting: int
    """Requests without a first token yet."""
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    tokens_per_s: float
    """Prompt tokens answered per second of waiting; 0: not measured yet."""
    busy_share: float = 0.0
    """Share of the last `MEMORY_S` in which some request waited for its first token."""


class LoadMeter:
    """Counts requests of one engine. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, int] = {}
        self._running: set[str] = set()
        self._counted_s = clock()
        self._busy_s = 0.0
        self._tokens = 0.0
        self._busy_share = 0.0

    def record_start(self, request_id: str, num_tokens: int) -> None:
        self._count_time()
        self._waiting[request_id] = num_tokens
        self._running.add(request_id)

    def record_first_token(self, request_id: str) -> None:
        """Idempotent."""
        self._count_time()
        num_tokens = self._waiting.pop(request_id, 0)
        keep = math.exp2(-num_tokens / MEMORY_TOKENS)
        self._busy_s *= keep
        self._tokens = (self._tokens + num_tokens) * keep

    def record_end(self, request_id: str) -> None:
        """The request has ended, for whatever reason. Idempotent."""
        self._count_time()
        self._waiting.pop(request_id, None)
        self._running.discard(request_id)

    def _count_time(self) -> None:
        """Count time only while a request waits: an idle engine has no rate."""
        now_s = self._clock()
        elapsed_s = now_s - self._counted_s
        keep = math.exp(-elapsed_s / MEMORY_S)
        self._busy_share = self._busy_share * keep + (1 - keep) * bool(self._waiting)
        if self._waiting:
            self._busy_s += elapsed_s
        self._counted_s = now_s

    def stats(self) -> LoadStats:
        self._count_time()
        rate = self._tokens / self._busy_s if self._busy_s > 0 else 0.0
        waiting_tokens = sum(self._waiting.values())
        return LoadStats(len(self._running), len(self._waiting), waiting_tokens, rate, self._busy_share)
