"""Predicts the cost of a configuration before anything is computed.

The unit is a token-layer: one token through one decoder layer. The cost of a configuration is its
token-layers ÷ those of a full prefill of the same tokens; speed and quality are only quoted together with it.
The prediction uses what the selector declares, so a new selector needs no change here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kintsugi.core.plan import Selection
from kintsugi.fusor.selectors import make_selector, quota


@dataclass(frozen=True)
class PassWorkload:
    """The tokens of one prompt that a pass loads or computes, and the model they pass through."""

    hit_tokens: int
    """Loaded tokens."""
    other_tokens: int
    """Tokens that are always computed: the question, missed chunks, and tokens between and before chunks."""
    num_layers: int
    projection_share: float
    """See `fusor.stack.DecoderStack.projection_share`."""
    exact_tokens: int = 0
    """Loaded tokens before `BlendPlan.exact_end`."""
    left_out_tokens: int = 0
    """Tokens among `other_tokens` that the question's pass leaves out (`fusor.gaps`)."""
    attending: tuple[int, ...] | None = None
    """See `fusor.stack.DecoderStack`; None: all layers."""


@dataclass(frozen=True)
class LayerWork:
    """Maximum work of a pass at one layer."""

    layer: int
    hit_tokens: int
    """Tokens of hit chunks that pass through the layer."""
    other_tokens: int
    projected_tokens: float
    """Token-layers spent on projections alone: at a layer that filters by deviation, and at the last query
    layer."""
    asks: bool = False
    """Whether it is a layer of the question's pass."""

    @property
    def token_layers(self) -> float:
        return self.hit_tokens + self.other_tokens + self.projected_tokens


@dataclass(frozen=True)
class PassWork:
    """The layers of a blend in the order in which they are computed."""

    question: tuple[LayerWork, ...]
    """The question's own pass through the first layers; empty if the selector does not use it."""
    blend: tuple[LayerWork, ...]

    @property
    def token_layers(self) -> float:
        return sum(stage.token_layers for stage in (*self.question, *self.blend))


def pass_work(selection: Selection, work: PassWorkload) -> PassWork:
    """Return the exact work of each layer of a blend."""
    hit, other, layers = work.hit_tokens, work.other_tokens, work.num_layers
    if selection.ratio not in (0, 1):
        hit -= work.exact_tokens
    if selection.ratio in (0, 1) or not hit:
        chosen = hit if selection.ratio == 1 else 0
        return PassWork((), tuple(LayerWork(layer, chosen, other, 0.0) for layer in range(layers)))
    selector = make_selector(selection, layers, work.attending)
    blend: list[LayerWork] = []
    before = hit
    for layer in range(layers):
        signal = selector.signal_at(layer)
        projected = work.projection_share * (other + before) if signal else 0.0
        if signal is not None:
            before = min(before, quota(selector.ratio_at(layer), hit))
        blend.append(LayerWork(layer, before, other, projected))
    if not selector.query_layers:
        return PassWork((), tuple(blend))
    # Including the prompt's last token, which the blend itself does not compute.
    asking, last = other - work.left_out_tokens + 1, selector.query_layers[-1]
    question = [LayerWork(layer, 0, asking, 0.0, asks=True) for layer in range(last)]
    question.append(LayerWork(last, 0, 0, work.projection_share * asking, asks=True))
    return PassWork(tuple(question), tuple(blend))


def configuration_cost(selection: Selection, work: PassWorkload) -> float:
    """Share of a full prefill's token-layers that a blend computes; above 1 if it computes more."""
    return pass_work(selection, work).token_layers / (work.num_layers * (work.hit_tokens + work.other_tokens))
