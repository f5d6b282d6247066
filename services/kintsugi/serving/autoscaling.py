"""How many engines and shards there should be. Pure decisions: Serve calls the two policies and applies the
configuration's delays and bounds to their answers.

Serve sends this module to its controller by value, so it imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BUSY_SHARE_MAX = 0.7
"""Share of time in which an engine may prefill. Above it, queues grow with every burst."""
FILL_SHARE_MIN = 0.8
"""Share of its capacity that a full shard uses. One that evicts below it has chunks that expire."""
SHRINK_SHARE_MAX = 0.5
"""Share of the remaining capacity that may be used after a shard is removed, or it would soon be back."""
RETURNS_PER_S = 0.05
"""Lookups per shard for recently evicted chunks that are worth another shard."""


@dataclass(frozen=True)
class EngineLoad:
    """The load of all engines together."""

    engines: int
    waiting_tokens: float
    """Tokens of prompts that have no first token yet."""
    tokens_per_s: float
    """Prompt tokens that one engine gets done; 0: unknown."""
    busy_engines: float
    """Sum of the shares of time in which each prefilled."""


def engines_wanted(load: EngineLoad, queueing_ms_max: float) -> int:
    """So many that a request is predicted to wait no longer than ``queueing_ms_max``, and that each is busy
    no more than `BUSY_SHARE_MAX`. Grows with either; at least one."""
    wanted = load.busy_engines / BUSY_SHARE_MAX
    if load.tokens_per_s > 0:
        wanted = max(wanted, 1e3 * load.waiting_tokens / load.tokens_per_s / queueing_ms_max)
    # A burst is no reason to multiply: what is added must have time to help.
    most = 2 * max(1, load.engines)
    return max(1, math.ceil(min(wanted, most) - 1e-9))


@dataclass(frozen=True)
class ShardLoad:
    """The load of all shards together."""

    shards: int
    used_bytes: float
    capacity_bytes: float
    returns_per_s: float
    """Lookups for chunks that had been evicted a short time before."""


def shards_wanted(load: ShardLoad) -> int:
    """One more where full shards evict what is soon wanted again; one less where the rest would hold all."""
    if load.shards < 1 or load.capacity_bytes <= 0:
        return max(1, load.shards)
    full = load.used_bytes >= FILL_SHARE_MIN * load.capacity_bytes
    if full and load.returns_per_s >= RETURNS_PER_S * load.shards:
        return load.shards + 1
    left_bytes = load.capacity_bytes * (load.shards - 1) / load.shards
    if load.shards > 1 and load.returns_per_s == 0 and load.used_bytes <= SHRINK_SHARE_MAX * left_bytes:
        return load.shards - 1
    return load.shards


Metrics = Mapping[str, Mapping[Any, float]]


def _values(metrics: Metrics | None, name: str) -> list[float]:
    """What replicas reported; none where none has yet."""
    return [float(value) for value in (metrics or {}).get(name, {}).values()]


def engine_load(metrics: Metrics | None, engines: int) -> EngineLoad:
    """From what `Engine.record_autoscaling_stats` reported."""
    rates = [rate for rate in _values(metrics, "tokens_per_s") if rate > 0]
    return EngineLoad(
        engines,
        sum(_values(metrics, "waiting_tokens")),
        sum(rates) / len(rates) if rates else 0.0,
        sum(_values(metrics, "busy_share")),
    )


def shard_load(metrics: Metrics | None, shards: int) -> ShardLoad:
    """From what `StoreShard.record_autoscaling_stats` reported."""
    return ShardLoad(
        shards,
        sum(_values(metrics, "used_bytes")),
        sum(_values(metrics, "capacity_bytes")),
        sum(_values(metrics, "returns_per_s")),
    )


class EnginePolicy:
    """For Serve's `AutoscalingConfig`."""

    def __init__(self, queueing_ms_max: float) -> None:
        self._queueing_ms_max = queueing_ms_max

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Engines wanted, and no state. Without reports the number stays."""
        metrics = context.aggregated_metrics
        if not _values(metrics, "busy_share"):
            return context.target_num_replicas, {}
        load = engine_load(metrics, context.current_num_replicas)
        return engines_wanted(load, self._queueing_ms_max), {}


class ShardPolicy:
    """For Serve's `AutoscalingConfig`."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics
        if not _values(metrics, "capacity_bytes"):
            return context.target_num_replicas, {}
        return shards_wanted(shard_load(metrics, context.current_num_replicas)), {}
