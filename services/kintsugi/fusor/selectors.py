"""Which cached tokens to recompute: plug-ins behind one interface.

A selector says what it needs to know and when, the blend pass finds it out and asks which candidates
stay. Sets only shrink with depth. There are three things to know of a token of a hit chunk:

- where it stands in its chunk: known from the start, for nothing;
- how much the question attends to it (`query_layers`): known before layer 0, for an extra pass of the
  question over the loaded KV of the layers up to the last one named;
- how far its loaded K and V are from fresh ones at a layer (`signal_at`): for that layer's projections of
  every candidate, which must have been computed at all layers below. So a selector that wants it of every
  token at layer c pays for c layers at full width.

`fusor.control.cost` adds it all up from `ratio_at`, `signal_at` and `query_layers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Flag, auto

import torch
from torch import Tensor

from kintsugi.core.plan import Selection
from kintsugi.core.request import SelectorName

GRADUAL_SPREAD = 0.5
"""Gradual filtering keeps (1 + spread)·r at the check layer and falls linearly to (1 - spread)·r at the
last, so that its mean cost is that of the flat selector at the same ratio."""

HYBRID_WIDTH = 1.5
"""Below its check layer, `hybrid` computes this many times the tokens that it will keep: those that the
question attends to most. Their deviation decides then, so no layer is computed at full width."""

HYBRID_HEAD_SHARE = 0.05
"""Share of its quota that `hybrid` spends on chunk heads, whatever the signals say."""


class Signal(Flag):
    """What a selector compares at a layer: squared deviation of loaded from fresh K, V or both."""

    NONE = 0
    K = auto()
    V = auto()


@dataclass(frozen=True)
class Candidates:
    """The hit tokens that are active where a selector filters, `n` of them, and what is known of them."""

    positions: Tensor
    """int64 `[n]`, ascending."""
    offsets: Tensor
    """int64 `[n]`: places in their chunks."""
    num_hit_tokens: int
    """All tokens of hit chunks that are not exact as loaded: what quotas are counted against."""
    attention: Tensor | None = None
    """fp32 `[n]`: see `fusor.question`. None where the selector names no query layers."""
    deviation: Tensor | None = None
    """fp32 `[n]`. None where `signal_at` asks for no signal."""


class Selector(ABC):
    """Chooses among the tokens of hit chunks. Stateless: ranks that see the same numbers agree."""

    query_layers: tuple[int, ...] = ()
    """Layers at which attention from the question counts; empty where it does not."""

    def __init__(self, selection: Selection, num_layers: int) -> None:
        self.selection = selection
        self.ratio = selection.ratio
        self.check_layer = min(selection.check_layer, num_layers - 1)
        self.num_layers = num_layers

    @abstractmethod
    def signal_at(self, layer: int) -> Signal | None:
        """The signal needed to filter at `layer`; None where the set of the layer before is kept."""

    @abstractmethod
    def ratio_at(self, layer: int) -> float:
        """Share of the hit tokens that `layer` computes, at most."""

    @abstractmethod
    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        """What the candidates are ranked by at a layer that filters, `[n]`, of any number type."""

    def keep(self, layer: int, candidates: Candidates) -> Tensor:
        """Ascending indices of the candidates that stay active at `layer`."""
        scores = self.scores(layer, candidates)
        return top(scores, self.count(layer, scores, candidates))

    def count(self, layer: int, scores: Tensor, candidates: Candidates) -> int:
        """How many stay."""
        return quota(self.ratio_at(layer), candidates.num_hit_tokens)


class AdaptiveSelector(Selector):
    """One whose scores are amounts, so that it can tell when they are nearly used up."""

    def count(self, layer: int, scores: Tensor, candidates: Candidates) -> int:
        ceiling = super().count(layer, scores, candidates)
        mass = self.selection.adaptive_mass
        if mass is None:
            return ceiling
        floor = quota(min(self.selection.ratio_min, self.ratio_at(layer)), candidates.num_hit_tokens)
        return min(ceiling, max(floor, count_covering(mass, scores)))


def quota(ratio: float, num_hit_tokens: int) -> int:
    """Tokens that a ratio buys: at least one unless it is zero."""
    return 0 if ratio == 0 else max(1, round(ratio * num_hit_tokens))


def top(scores: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` highest scores; the earlier token wins a tie."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[: min(count, len(order))].sort().values


def count_covering(mass: float, scores: Tensor) -> int:
    """The size of the smallest set that holds a share `mass` of all `scores`, none negative; at least one
    of any. Cost: one sort."""
    if not len(scores):
        return 0
    # In double, so that the share of thousands of small scores is not lost in rounding.
    summed = scores.double().sort(descending=True).values.cumsum(0)
    return min(len(scores), int((summed < mass * summed[-1]).sum()) + 1)


class HkvdSelector(AdaptiveSelector):
    """High KV deviation at one check layer, as the released CacheBlend selects (paper §4.3)."""

    signal = Signal.K | Signal.V

    def signal_at(self, layer: int) -> Signal | None:
        return self.signal if layer == self.check_layer else None

    def ratio_at(self, layer: int) -> float:
        return 1.0 if layer < self.check_layer else self.ratio

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


class HkvdKSelector(HkvdSelector):
    signal = Signal.K


class HkvdVSelector(HkvdSelector):
    signal = Signal.V


class GradualHkvdSelector(HkvdSelector):
    """The paper's gradual filtering: each layer filters the set of the layer before by its own deviation."""

    def signal_at(self, layer: int) -> Signal | None:
        return self.signal if layer >= self.check_layer else None

    def ratio_at(self, layer: int) -> float:
        depth = self.num_layers - 1 - self.check_layer
        if layer < self.check_layer or self.ratio == 0 or depth == 0:
            return super().ratio_at(layer)
        along = (layer - self.check_layer) / depth
        spread = min(GRADUAL_SPREAD, 1 / self.ratio - 1)
        return self.ratio * (1 + spread * (1 - 2 * along))


class _FromTheStart(Selector):
    """Chooses before the first layer, by what needs no layer."""

    def signal_at(self, layer: int) -> Signal | None:
        return Signal.NONE if layer == 0 else None

    def ratio_at(self, layer: int) -> float:
        return self.ratio


class ChunkHeadSelector(_FromTheStart):
    """The first tokens of each chunk, as many of each as the quota allows (EPIC's LegoLink)."""

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        return -candidates.offsets


class RandomSelector(_FromTheStart):
    """Control: a set that depends on positions alone."""

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        return splitmix64(candidates.positions)


class QuerySelector(AdaptiveSelector, _FromTheStart):
    """What the question attends to most."""

    def __init__(self, selection: Selection, num_layers: int) -> None:
        super().__init__(selection, num_layers)
        self.query_layers = query_layers_of(selection, num_layers)

    def scores(self, layer: int, candidates: Candidates) -> Tensor:
        assert candidates.attention is not None
        return candidates.attention


class HybridSelector(QuerySelector):
    """Chunk heads, then what the question attends to, weighed by its deviation at the check layer."""

    def signal_at(self, layer: int) -> Signal | None:
        if layer == self.check_layer:
            return Signal.K | Signal.V
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
        count = self.count(layer, scores, candidates)
        # Heads first; they are the same at both layers that filter, as both count from the same ratio.
        heads = top(-candidates.offsets, min(count, round(HYBRID_HEAD_SHARE * self.quota(candidates))))
        scores = scores.clone()
        scores[heads] = float("inf")
        return top(scores, count)

    def quota(self, candidates: Candidates) -> int:
        return quota(self.ratio, candidates.num_hit_tokens)


def query_layers_of(selection: Selection, num_layers: int) -> tuple[int, ...]:
    """The selection's, within the model; without any, those of its second quarter: the first ones look at
    neighbours, and deeper ones rank no better and hold up the pass until their KV has been loaded."""
    wanted = selection.query_layers or range(num_layers // 4, num_layers // 2 + 1)
    return tuple(sorted({min(layer, num_layers - 1) for layer in wanted}))


_MIX_1, _MIX_2, _STEP = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15


def splitmix64(positions: Tensor) -> Tensor:
    """splitmix64 of int64 `positions`, as int64: the same on every rank and in every run, and no pattern
    of positions survives it."""

    def wrapped(constant: int) -> int:
        return constant - (1 << 64) if constant >> 63 else constant

    def logical_shift_right(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    value = positions * wrapped(_STEP)
    value = (value ^ logical_shift_right(value, 30)) * wrapped(_MIX_1)
    value = (value ^ logical_shift_right(value, 27)) * wrapped(_MIX_2)
    return value ^ logical_shift_right(value, 31)


_REGISTRY: dict[SelectorName, type[Selector]] = {
    SelectorName.HKVD: HkvdSelector,
    SelectorName.HKVD_K: HkvdKSelector,
    SelectorName.HKVD_V: HkvdVSelector,
    SelectorName.HKVD_GRADUAL: GradualHkvdSelector,
    SelectorName.CHUNK_HEAD: ChunkHeadSelector,
    SelectorName.QUERY: QuerySelector,
    SelectorName.HYBRID: HybridSelector,
    SelectorName.RANDOM: RandomSelector,
}


def asks(selection: Selection) -> bool:
    """Whether the choice depends on the question."""
    return bool(make_selector(selection, num_layers=1).query_layers)


def make_selector(selection: Selection, num_layers: int) -> Selector:
    """A selector for one request on a model of `num_layers`."""
    return _REGISTRY[selection.selector](selection, num_layers)
