"""Reports what a load measured: percentiles, throughput, goodput and hit rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Sample:
    """One request as the client saw it."""

    at_s: float
    """When it was due, in seconds after the start of the load; its other times count from here."""
    ttft_s: float | None
    """Time to first token; None if no token came."""
    done_s: float
    """Time to the end of the answer."""
    itl_s: tuple[float, ...] = ()
    """Time between each piece of the answer and the one before."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    error: str = ""
    accounting: Mapping[str, Any] | None = None
    """`core.accounting.Accounting.to_mapping`, from endpoints that send it."""
    late_s: float = 0.0
    """Delay of the request against its schedule. A client that cannot keep up measures itself."""

    @property
    def is_ok(self) -> bool:
        return not self.error and self.ttft_s is not None


@dataclass(frozen=True)
class Summary:
    """The measurements of one load. Times are in seconds; None if nothing was measured."""

    rate_per_s: float
    """Arrivals per second."""
    requests: int
    errors: int
    duration_s: float
    """Time from the first arrival to the end of the last answer."""
    ttft_s: dict[str, float]
    """By name: `mean`, `p50`, …"""
    itl_s: dict[str, float]
    requests_per_s: float
    """Answers per second."""
    output_tokens_per_s: float
    goodput_per_s: float | None
    """Answers per second whose first token came in time."""
    in_time_share: float | None
    """Share of all requests whose first token came in time."""
    hit_rate: float | None
    """See `hit_rate`."""
    client_late_p99_s: float
    error_kinds: dict[str, int] = field(default_factory=dict)


def spread(values: Sequence[float]) -> dict[str, float]:
    """`mean` and `PERCENTILES`, interpolated linearly; empty without values."""
    if not values:
        return {}
    percentiles = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{percent}": value for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def summarize_samples(samples: Sequence[Sample], slo_s: float | None = None) -> Summary:
    """Summarise a load. ``slo_s`` is the longest time to first token that counts as in time."""
    good = [sample for sample in samples if sample.is_ok]
    first_s = min((sample.at_s for sample in samples), default=0.0)
    last_s = max((sample.at_s for sample in samples), default=0.0)
    duration_s = max((sample.at_s + sample.done_s for sample in samples), default=0.0) - first_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    in_time = (
        None if slo_s is None else sum(1 for one in good if one.ttft_s is not None and one.ttft_s <= slo_s)
    )
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
        client_late_p99_s=spread([one.late_s for one in samples]).get("p99", 0.0),
        error_kinds=dict(Counter(one.error or "no token" for one in samples if not one.is_ok)),
    )


def hit_rate(accountings: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the chunks' tokens that were loaded from the store or found in the prefix cache.

    An answer without a cached chunk does not tell how long its chunks are: it counts with the mean length of
    the others. None without accountings.
    """
    if not accountings:
        return None
    hits = [int(one.get("tokens_hit", 0)) + int(one.get("tokens_prefix_cached", 0)) for one in accountings]
    totals = [hit + int(one.get("tokens_missed", 0)) for hit, one in zip(hits, accountings, strict=True)]
    counted = sum(1 for total in totals if total)
    return sum(hits) / sum(totals) * counted / len(accountings) if counted else 0.0
