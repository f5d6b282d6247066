"""Selectors choose which cached tokens to recompute: plug-ins behind one interface (docs/howto/selector.md).

A selector declares which signals it needs at which layer; the blend pass measures them and asks the selector
which candidates stay. Active sets only shrink with depth. There are three signals about a token of a hit
chunk:

- its offset in its chunk: known from the start, at no cost;
- the question's attention to it (`query_layers`): known before layer 0, at the cost of an extra pass of the
  question over the loaded KV, up to the last of these layers;
- the distance of its loaded K and V from fresh ones at a layer (`signal_at`): costs that layer's projections
  of every candidate, which must have been computed at all earlier layers. So a selector that compares every
  token at layer c pays for c layers at full width.

`fusor.control.cost` computes the total from `ratio_at`, `signal_at` and `query_layers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Flag, auto

import torch
from torch import Tensor

from kintsugi.core.plan import Selection
from kintsugi.core.plugins import SELECTORS, load_plugin
from kintsugi.core.request import SelectorName

GRADUAL_SPREAD = 0.5
"""Gradual filtering keeps (1 + spread)·r at the check layer and falls linearly to (1 - spread)·r at the
last layer, so that its mean cost equals that of the flat selector at the same ratio."""

HYBRID_WIDTH = 1.5
"""Below its check layer, `hybrid` computes this multiple of the number of tokens that it will keep: those
with the highest attention from the question. Their deviation then decides, so no layer is computed at full
width."""

HYBRID_HEAD_SHARE = 0.05
"""Share of its quota that `hybrid` spends on chunk heads, whatever the signals say."""

QUERY_DEPTHS = (0.3, 0.8)
"""The default query layers, as shares of the model's depth: from the first value to, but not including, the
second."""


class Signal(Flag):
    """The signal that a selector needs at a layer: none, or the deviation of loaded K and V from fresh
    ones."""

    NONE = 0
    DEVIATION = auto()


@dataclass(frozen=True)
class Candidates:
    """The `n` active hit tokens at a layer that filters, with the signals about them."""

    positions: Tensor
    """int64 `[n]`, ascending."""
    offsets: Tensor
    """int64 `[n]`: offsets in their chunks."""
    num_hit_tokens: int
    """Number of tokens of hit chunks that are not exact as loaded. Quotas are shares of it."""
    attention: Tensor | None = None
    """fp32 `[n]`: see `fusor.question`. None if the selector names no query layers."""
    deviation: Tensor | None = None
    """fp32 `[n]`. None if `signal_at` requests no deviation."""


class Selector(ABC):
    """Chooses among the tokens of hit chunks. Stateless, so ranks with the same numbers choose the same
    tokens."""

    query_layers: tuple[int, ...] = ()
    """Layers at which the question's attention is measured; empty if it is not used."""

    def __init__(self, selection: Selection, num_layers: int) -> None:
        self.ratio = selection.ratio
        self.check_layer = min(selection.check_layer, num_layers - 1)
        self.num_layers = num_layers

    @abstractmethod
    def signal_at(self, layer: int) -> Signal | None:
        """Return the signal needed to filter at `layer`; None if the previous layer's set is kept."""

    @abstractmethod
    def ratio_at(self, layer: int) -> float:
        """Return the largest share of the hit tokens that `layer` computes."""

    @abstractmethod
    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        """Return scores that rank the candidates at a layer that filters: `[n]`, any numeric dtype."""

    def keep(self, layer: int, candidates: Candidates) -> Tensor:
        """Return the indices of the candidates that stay active at `layer`, ascending."""
        count = quota(self.ratio_at(layer), candidates.num_hit_tokens)
        return top(self.scores(layer, candidates), count)


def quota(ratio: float, num_hit_tokens: int) -> int:
    """Return the number of tokens for a ratio: at least one unless the ratio is zero."""
    return 0 if ratio == 0 else max(1, round(ratio * num_hit_tokens))


def top(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores, ascending. The earlier token wins a tie."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[: min(count, len(order))].sort().values


class HkvdSelector(Selector):
    """Highest KV deviation at one check layer, as in the released CacheBlend (paper §4.3)."""

    def signal_at(self, layer: int) -> Signal | None:
        return Signal.DEVIATION if layer == self.check_layer else None

    def ratio_at(self, layer: int) -> float:
        return 1.0 if layer < self.check_layer else self.ratio

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


class GradualHkvdSelector(HkvdSelector):
    """The paper's gradual filtering: each layer filters the previous layer's set by its deviation there."""

    def signal_at(self, layer: int) -> Signal | None:
        return Signal.DEVIATION if layer >= self.check_layer else None

    def ratio_at(self, layer: int) -> float:
        depth = self.num_layers - 1 - self.check_layer
        if layer < self.check_layer or self.ratio == 0 or depth == 0:
            return super().ratio_at(layer)
        along = (layer - self.check_layer) / depth
        spread = min(GRADUAL_SPREAD, 1 / self.ratio - 1)
        return self.ratio * (1 + spread * (1 - 2 * along))


class UpfrontSelector(Selector):
    """Chooses before the first layer, by signals that need no layer."""

    def signal_at(self, layer: int) -> Signal | None:
        return Signal.NONE if layer == 0 else None

    def ratio_at(self, layer: int) -> float:
        return self.ratio


class ChunkHeadSelector(UpfrontSelector):
    """The first tokens of each chunk, as many as the quota allows (EPIC's LegoLink)."""

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        return -candidates.offsets


class RandomSelector(UpfrontSelector):
    """A control: a pseudo-random set that depends on positions alone."""

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        return splitmix64(candidates.positions)


class QuerySelector(UpfrontSelector):
    """The tokens with the highest attention from the question."""

    def __init__(self, selection: Selection, num_layers: int) -> None:
        super().__init__(selection, num_layers)
        self.query_layers = query_layers_of(selection, num_layers)

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        assert candidates.attention is not None
        return candidates.attention


class HybridSelector(QuerySelector):
    """Chunk heads, then the tokens with the highest attention from the question × deviation at the check
    layer."""

    def signal_at(self, layer: int) -> Signal | None:
        if layer == self.check_layer:
            return Signal.DEVIATION
        return Signal.NONE if layer == 0 else None

    def ratio_at(self, layer: int) -> float:
        return min(1.0, HYBRID_WIDTH * self.ratio) if layer < self.check_layer else self.ratio

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        assert candidates.attention is not None
        if candidates.deviation is None:
            return candidates.attention
        return candidates.attention * candidates.deviation

    def keep(self, layer: int, candidates: Candidates) -> Tensor:
        scores = self.scores(layer, candidates)
        count = quota(self.ratio_at(layer), candidates.num_hit_tokens)
        # Chunk heads come first; both filtering layers choose the same ones, because they use the same ratio.
        heads = top(
            -candidates.offsets,
            min(count, round(HYBRID_HEAD_SHARE * quota(self.ratio, candidates.num_hit_tokens))),
        )
        # On a GPU, writing a number by an index (`scores[heads] = ...`) would make the host wait.
        return top(scores.index_fill(0, heads, float("inf")), count)


def query_layers_of(
    selection: Selection, num_layers: int, attending: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the selection's query layers, limited to the model's depth; by default those within
    `QUERY_DEPTHS`. Recurrent layers are left out, because they have no attention: only layers of
    `attending` (None: all) remain. If none remains, the attending layer nearest to the first query layer is
    used.

    On the measured models, layers before and after these rank tokens worse (docs/adr/0006). The blend starts
    when the KV of the last query layer has been loaded.
    """
    first, end = (round(depth * num_layers) for depth in QUERY_DEPTHS)
    wanted = selection.query_layers or range(first, max(end, first + 1))
    layers = sorted({min(layer, num_layers - 1) for layer in wanted})
    if attending is None:
        return tuple(layers)
    listening = tuple(layer for layer in layers if layer in attending)
    return listening or (min(attending, key=lambda layer: abs(layer - layers[0])),)


_MIX_1, _MIX_2, _STEP = (
    constant - (1 << 64) for constant in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)
)
"""The constants of splitmix64, as int64."""


def splitmix64(positions: Tensor) -> Tensor:
    """Hash int64 `positions` to int64 with splitmix64: deterministic, and without any pattern of the
    positions."""

    def logical_shift_right(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    value = positions * _STEP
    value = (value ^ logical_shift_right(value, 30)) * _MIX_1
    value = (value ^ logical_shift_right(value, 27)) * _MIX_2
    return value ^ logical_shift_right(value, 31)


_OWN: dict[str, type[Selector]] = {
    SelectorName.HKVD: HkvdSelector,
    SelectorName.HKVD_GRADUAL: GradualHkvdSelector,
    SelectorName.CHUNK_HEAD: ChunkHeadSelector,
    SelectorName.QUERY: QuerySelector,
    SelectorName.HYBRID: HybridSelector,
    SelectorName.RANDOM: RandomSelector,
}


def depends_on_question(selection: Selection) -> bool:
    """Return whether the choice of tokens depends on the question."""
    return bool(make_selector(selection, num_layers=1).query_layers)


def make_selector(
    selection: Selection, num_layers: int, attending: tuple[int, ...] | None = None
) -> Selector:
    """Create the selector for one request on a model with `num_layers` layers, of which `attending` have
    attention (None: all). Raises `InvalidField` for another distribution's selector that cannot be loaded."""
    own = _OWN.get(selection.selector)
    kind = own or load_plugin(SELECTORS, selection.selector, "selector", Selector)
    selector = kind(selection, num_layers)
    if selector.query_layers:
        wanted = replace(selection, query_layers=selector.query_layers)
        selector.query_layers = query_layers_of(wanted, num_layers, attending)
    return selector
