"""What a configuration costs, before anything is computed.

The unit is a token-layer: one token through one decoder layer. The cost of a configuration is its
token-layers ÷ those of a full prefill of the same tokens; every figure of speed or quality stands beside
it. Predicted from the selector's own declarations, so a new selector needs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kintsugi.core.plan import Selection
from kintsugi.fusor.selectors import make_selector, quota


@dataclass(frozen=True)
class Workload:
    """The tokens of one prompt that a pass loads or computes, and the model they pass through."""

    hit_tokens: int
    """All that are loaded."""
    other_tokens: int
    """Always computed: the question, missed chunks, what lies between and before chunks."""
    num_layers: int
    projection_share: float
    """See `fusor.stack.DecoderStack.projection_share`."""
    exact_tokens: int = 0
    """Of those loaded, what is before `BlendPlan.exact_end`."""


def token_layers(selection: Selection, work: Workload) -> float:
    """Token-layers of a blend: exact where the ratio is not adaptive, else at most."""
    hit, other, layers = work.hit_tokens, work.other_tokens, work.num_layers
    if selection.ratio in (0, 1):
        return float(layers * (other + selection.ratio * hit))
    hit -= work.exact_tokens
    if not hit:
        return float(layers * other)
    selector = make_selector(selection, layers)
    total, before = 0.0, hit
    for layer in range(layers):
        signal = selector.signal_at(layer)
        if signal:
            total += work.projection_share * (other + before)
        if signal is not None:
            before = min(before, quota(selector.ratio_at(layer), hit))
        total += other + before
    if selector.query_layers:
        # With the prompt's last token, which is not among those that a pass computes.
        total += (other + 1) * (selector.query_layers[-1] + work.projection_share)
    return total


def configuration_cost(selection: Selection, work: Workload) -> float:
    """Share of a full prefill's token-layers that a blend computes; above 1 where it computes more."""
    return token_layers(selection, work) / (work.num_layers * (work.hit_tokens + work.other_tokens))
