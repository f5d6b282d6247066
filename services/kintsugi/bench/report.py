"""What a load measured: percentiles, throughput, goodput, hit rates. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Sample:
    """One request as the client saw it."""

    at_s: float
    """When it was due, after the load began; everything counts from here."""
    ttft_s: float | None
    """None: no token came."""
    done_s: float
    """From when it was due to its end."""
    itl_s: tuple[float, ...] = ()
    """Between each piece of the answer and the one before."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str = ""
    accounting: Mapping[str, Any] | None = None
    """Of endpoints that say it: see `core.accounting`."""
    late_s: float = 0.0
    """How much later than due it was sent: a client that cannot keep up measures itself."""

    @property
    def is_ok(self) -> bool:
        return not self.error and self.ttft_s is not None


@dataclass(frozen=True)
class Summary:
    """Of one load. Times in seconds; None where nothing was measured."""

    rate_per_s: float
    """Requests that came per second."""
    requests: int
    errors: int
    duration_s: float
    """From the first arrival to the last answer's end."""
    ttft_s: dict[str, float]
    """`mean`, `p50`, …"""
    itl_s: dict[str, float]
    requests_per_s: float
    """Answered."""
    output_tokens_per_s: float
    goodput_per_s: float | None
    """Answered with the first token in time."""
    in_time_share: float | None
    """Of all requests."""
    hit_rate: float | None
    """Tokens of chunks that were loaded, or in the prefix cache, ÷ tokens of all prompts' chunks."""
    client_late_p99_s: float
    error_kinds: dict[str, int] = field(default_factory=dict)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the two nearest; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """`mean` and percentiles; empty of nothing."""
    if not values:
        return {}
    named = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": sum(values) / len(values), **named}


def summarize_samples(samples: Sequence[Sample], slo_s: float | None = None) -> Summary:
    """``slo_s`` is what a first token may take."""
    good = [sample for sample in samples if sample.is_ok]
    first_s = min((sample.at_s for sample in samples), default=0.0)
    last_s = max((sample.at_s for sample in samples), default=0.0)
    duration_s = max((sample.at_s + sample.done_s for sample in samples), default=0.0) - first_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    in_time = (
        None if slo_s is None else sum(1 for one in good if one.ttft_s is not None and one.ttft_s <= slo_s)
    )
    kinds: dict[str, int] = {}
    for sample in samples:
        if not sample.is_ok:
            kind = sample.error or "no token"
            kinds[kind] = kinds.get(kind, 0) + 1
    return Summary(
        rate_per_s=(len(samples) - 1) / (last_s - first_s) if last_s > first_s else 0.0,
        requests=len(samples),
        errors=len(samples) - len(good),
        duration_s=duration_s,
        ttft_s=spread([one.ttft_s for one in good if one.ttft_s is not None]),
        itl_s=spread([gap for one in good for gap in one.itl_s]),
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=sum(one.completion_tokens for one in good) * per_s,
        goodput_per_s=None if in_time is None else in_time * per_s,
        in_time_share=None if in_time is None or not samples else in_time / len(samples),
        hit_rate=hit_rate([one.accounting for one in good if one.accounting is not None]),
        client_late_p99_s=percentile([one.late_s for one in samples], 99) if samples else 0.0,
        error_kinds=kinds,
    )


def hit_rate(accountings: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens that were loaded or in the prefix cache, as a share of these and of those that were missed.

    An answer of which nothing was cached does not say how long its chunks are: it counts as long as the
    others' mean. None where no answer says anything.
    """
    if not accountings:
        return None
    hits = [int(one.get("tokens_hit", 0)) + int(one.get("tokens_prefix_cached", 0)) for one in accountings]
    totals = [hit + int(one.get("tokens_missed", 0)) for hit, one in zip(hits, accountings, strict=True)]
    counted = sum(1 for total in totals if total)
    return sum(hits) / sum(totals) * counted / len(accountings) if counted else 0.0
