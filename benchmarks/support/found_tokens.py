"""Divides a request's chunk tokens by what happened to them: found, missed, recomputed and so on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kintsugi.core.accounting import Outcome, label_of_reason
from kintsugi.core.spaces import Span

LOADED = "loaded"
CACHED = "in the prefix cache"
RECOMPUTED = "recomputed beside loaded chunks, forecast to be sooner"
PREFILLED = "prefilled with the whole prompt, forecast to be sooner"
MISSED = "missed"
UNACCOUNTED = "unaccounted for"

FOUND = (LOADED, CACHED, RECOMPUTED, PREFILLED)
"""Parts that count as found: the store or the engine had the tokens."""
REFUSALS = ("loading_is_slower", "blending_is_slower")
"""Reasons for which the loading controller prefills a prompt although its chunks are stored."""


def divide(spans: Sequence[Span], accounting: Mapping[str, Any]) -> Counter[str]:
    """The chunk tokens of one request, by part. ``accounting``: its response's."""
    asked = sum(span.num_tokens for span in spans)
    missed = accounting.get("tokens_missed", 0)
    outcome, label = accounting["outcome"], label_of_reason(accounting.get("reason"))
    if outcome == Outcome.PREFIX_HIT:
        return Counter({CACHED: asked - missed, MISSED: missed})
    if outcome == Outcome.DECLINED and label in REFUSALS:
        return Counter({PREFILLED: asked - missed, MISSED: missed})
    if outcome != Outcome.BLENDED:
        return Counter({f"{outcome}, {label}": asked})
    loaded = accounting["tokens_hit"]
    rest = asked - loaded - missed
    end = accounting.get("tokens_prefix_cached", 0)
    cached = min(rest, sum(max(0, min(span.end, end) - span.start) for span in spans))
    why = RECOMPUTED if accounting.get("chunks_recomputed") else UNACCOUNTED
    return Counter({LOADED: loaded, CACHED: cached, MISSED: missed, why: rest - cached})


def share_found(parts: Mapping[str, int]) -> float:
    """The share of all tokens in `parts` that were found."""
    return sum(parts.get(name, 0) for name in FOUND) / sum(parts.values())


def describe(parts: Mapping[str, int]) -> str:
    """Every part that has tokens, largest first."""
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{count / total:.4f} {name}" for name, count in ordered if count)
