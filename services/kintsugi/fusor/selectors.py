"""Which cached tokens to recompute: plug-ins behind one interface.

A selector says at which layers it filters and which signal it needs there; the blend pass computes the
signal and asks which candidates stay. Sets only shrink with depth. Where a selector needs a deviation
at layer c, layers below c are computed for every token: that is its price (`full_width_layers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Flag, auto

import torch
from torch import Tensor

from kintsugi.core.request import SelectorName

GRADUAL_SPREAD = 0.5
"""Gradual filtering keeps (1 + spread)·r at the check layer and falls linearly to (1 - spread)·r at the
last, so that its mean cost is that of the flat selector at the same ratio."""


class Signal(Flag):
    """What a selector compares at a layer: squared deviation of loaded from fresh K, V or both."""

    NONE = 0
    K = auto()
    V = auto()


class Selector(ABC):
    """Chooses among the tokens of hit chunks. Stateless: ranks that see the same numbers agree."""

    def __init__(self, ratio: float, check_layer: int, num_layers: int) -> None:
        self.ratio = ratio
        self.check_layer = min(check_layer, num_layers - 1)
        self.num_layers = num_layers

    @property
    @abstractmethod
    def full_width_layers(self) -> int:
        """Layers computed for every token before the first choice."""

    @abstractmethod
    def signal_at(self, layer: int) -> Signal | None:
        """The signal needed to filter at `layer`; None where the set of the layer before is kept."""

    @abstractmethod
    def keep(self, layer: int, candidates: Tensor, deviation: Tensor | None, num_hit_tokens: int) -> Tensor:
        """Ascending indices into `candidates` (positions `[n]`) that stay active at `layer`.

        `deviation` is fp32 `[n]`, None where `signal_at` asked for no signal; the quota is counted
        against `num_hit_tokens`, all tokens of hit chunks.
        """


def quota(ratio: float, num_hit_tokens: int) -> int:
    """Tokens that a ratio buys: at least one unless it is zero."""
    return 0 if ratio == 0 else max(1, round(ratio * num_hit_tokens))


def top(scores: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` highest scores; the earlier token wins a tie."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[: min(count, len(order))].sort().values


class HkvdSelector(Selector):
    """High KV deviation at one check layer, as the released CacheBlend selects (paper §4.3)."""

    signal = Signal.K | Signal.V

    @property
    def full_width_layers(self) -> int:
        return self.check_layer

    def signal_at(self, layer: int) -> Signal | None:
        return self.signal if layer == self.check_layer else None

    def keep(self, layer: int, candidates: Tensor, deviation: Tensor | None, num_hit_tokens: int) -> Tensor:
        assert deviation is not None
        return top(deviation, quota(self.ratio_at(layer), num_hit_tokens))

    def ratio_at(self, layer: int) -> float:
        return self.ratio


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
        if self.ratio == 0 or depth == 0:
            return self.ratio
        along = (layer - self.check_layer) / depth
        spread = min(GRADUAL_SPREAD, 1 / self.ratio - 1)
        return self.ratio * (1 + spread * (1 - 2 * along))


class RandomSelector(Selector):
    """Control: a set that depends on positions alone, chosen before the first layer."""

    full_width_layers = 0

    def signal_at(self, layer: int) -> Signal | None:
        return Signal.NONE if layer == 0 else None

    def keep(self, layer: int, candidates: Tensor, deviation: Tensor | None, num_hit_tokens: int) -> Tensor:
        # A multiplicative hash of the position: the same on every rank and in every run.
        scores = (candidates * 2654435761 + 97) % (1 << 32)
        return top(scores.float(), quota(self.ratio, num_hit_tokens))


_REGISTRY: dict[SelectorName, Callable[[float, int, int], Selector]] = {
    SelectorName.HKVD: HkvdSelector,
    SelectorName.HKVD_K: HkvdKSelector,
    SelectorName.HKVD_V: HkvdVSelector,
    SelectorName.HKVD_GRADUAL: GradualHkvdSelector,
    SelectorName.RANDOM: RandomSelector,
}


def make_selector(name: SelectorName, ratio: float, check_layer: int, num_layers: int) -> Selector:
    """A selector for one request on a model of `num_layers`."""
    return _REGISTRY[name](ratio, check_layer, num_layers)
