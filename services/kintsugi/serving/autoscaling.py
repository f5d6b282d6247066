"""Decides how many engines and shards are wanted. Pure: Serve calls the two policies and applies the
configured delays and bounds to their results.

Serve sends this module to its controller by value, so it imports nothing from kintsugi.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QUEUEING_MS_MAX = 500.0
"""Maximum predicted queueing time of a request. Above it, engines are added."""
BUSY_SHARE_MAX = 0.7
"""Maximum share of its time that an engine may spend on prefills. Above this share, every burst causes
queues."""
FILL_SHARE_MIN = 0.8
"""Minimum used share of the capacity at which shards count as full. Below it, chunks were evicted because
they expired, not for lack of space."""
SHRINK_SHARE_MAX = 0.5
"""A shard is removed only if all chunks then use at most this share of the remaining capacity, since it would
otherwise soon be added again."""
RETURNS_PER_S = 0.05
"""Rate of lookups of recently evicted chunks, per second and shard, at which a shard is added."""


@dataclass(frozen=True)
class EngineLoad:
    """The load of all engines together."""

    engines: int
    waiting_tokens: float
    """Prompt tokens of requests that have no first token yet."""
    tokens_per_s: float
    """Prompt tokens that one engine prefills per second; 0: unknown."""
    busy_engines: float
    """Sum over the engines of the share of time that each spends on prefills."""


def engines_wanted(load: EngineLoad, queueing_ms_max: float) -> int:
    """Return the number of engines with which requests are predicted to wait at most ``queueing_ms_max``, and
    each engine is busy for at most `BUSY_SHARE_MAX` of the time. At least 1, at most twice the present
    number."""
    wanted = load.busy_engines / BUSY_SHARE_MAX
    if load.tokens_per_s > 0:
        wanted = max(wanted, 1e3 * load.waiting_tokens / load.tokens_per_s / queueing_ms_max)
    # A burst must not multiply the engines before those added last have started.
    engines_max = 2 * max(1, load.engines)
    return max(1, math.ceil(min(wanted, engines_max) - 1e-9))


@dataclass(frozen=True)
class ShardLoad:
    """The load of all shards together."""

    shards: int
    used_bytes: float
    capacity_bytes: float
    returns_per_s: float
    """Lookups per second for chunks that were evicted shortly before."""


def shards_wanted(load: ShardLoad) -> int:
    """Return the number of shards: one more if full shards evict chunks that are soon looked up again, one
    fewer if the remaining shards have room for all chunks, otherwise the present number."""
    if load.shards < 1 or load.capacity_bytes <= 0:
        return max(1, load.shards)
    is_full = load.used_bytes >= FILL_SHARE_MIN * load.capacity_bytes
    if is_full and load.returns_per_s >= RETURNS_PER_S * load.shards:
        return load.shards + 1
    remaining_bytes = load.capacity_bytes * (load.shards - 1) / load.shards
    if load.shards > 1 and load.returns_per_s == 0 and load.used_bytes <= SHRINK_SHARE_MAX * remaining_bytes:
        return load.shards - 1
    return load.shards


Metrics = Mapping[str, Mapping[Any, float]]


def _values(metrics: Metrics | None, name: str) -> list[float]:
    """Return the values that replicas reported under this name; empty before the first report."""
    return [float(value) for value in (metrics or {}).get(name, {}).values()]


def engine_load(metrics: Metrics | None, engines: int) -> EngineLoad:
    """Return the load, from the results of the replicas' `EngineReplica.record_autoscaling_stats`."""
    rates = [rate for rate in _values(metrics, "tokens_per_s") if rate > 0]
    return EngineLoad(
        engines,
        sum(_values(metrics, "waiting_tokens")),
        sum(rates) / len(rates) if rates else 0.0,
        sum(_values(metrics, "busy_share")),
    )


def shard_load(metrics: Metrics | None, shards: int) -> ShardLoad:
    """Return the load, from the results of the replicas' `StoreShard.record_autoscaling_stats`."""
    return ShardLoad(
        shards,
        sum(_values(metrics, "used_bytes")),
        sum(_values(metrics, "capacity_bytes")),
        sum(_values(metrics, "returns_per_s")),
    )


class EnginePolicy:
    """The engines' policy in Serve's `AutoscalingConfig`."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of engines, and an empty state. The number stays until a replica has reported."""
        metrics = context.aggregated_metrics
        if not _values(metrics, "busy_share"):
            return context.target_num_replicas, {}
        load = engine_load(metrics, context.current_num_replicas)
        return engines_wanted(load, QUEUEING_MS_MAX), {}


class ShardPolicy:
    """The shards' policy in Serve's `AutoscalingConfig`."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of shards, and an empty state. The number stays until a replica has reported."""
        metrics = context.aggregated_metrics
        if not _values(metrics, "capacity_bytes"):
            return context.target_num_replicas, {}
        return shards_wanted(shard_load(metrics, context.current_num_replicas)), {}
