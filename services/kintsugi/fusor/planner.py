"""Planners decide how a prompt is blended, or that it is not. Pure: only the connector calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName


@dataclass(frozen=True)
class PlanRequest:
    """One prompt as a planner sees it."""

    num_tokens: int
    num_computed: int
    """Tokens that the engine's own prefix cache holds."""
    hits: tuple[ChunkHit, ...]
    """Chunks that the store holds and the prefix cache does not cover entirely."""
    missed_tokens: int
    bytes_to_load: int
    ratio: float | None
    """What the request demands; None leaves it to the planner."""
    selector: SelectorName | None


class Planner(Protocol):
    """Turns a request into a plan; raises `NotBlendable` where a full prefill is the better answer."""

    def plan(self, request: PlanRequest) -> BlendPlan: ...

    @property
    def selection(self) -> Selection:
        """What a request that names nothing is blended with."""
        ...

    def with_selection(self, selection: Selection) -> Planner:
        """The same planner with another default: what a calibration report says."""
        ...

    def configuration(
        self, ratio: float | None, selector: SelectorName | None
    ) -> tuple[float, SelectorName, int]:
        """Ratio, selector and check layer that a request with these constraints is blended with.

        Known before the store has answered, so that the engine can name the KV it will produce.
        """
        ...


@dataclass(frozen=True)
class FixedRatioPlanner:
    """Load every hit, recompute a fixed share."""

    ratio: float = 0.15
    selector: SelectorName = SelectorName.HKVD
    check_layer: int = 1

    @property
    def selection(self) -> Selection:
        return Selection(self.ratio, self.selector, self.check_layer)

    def with_selection(self, selection: Selection) -> FixedRatioPlanner:
        return FixedRatioPlanner(selection.ratio, selection.selector, selection.check_layer)

    def configuration(
        self, ratio: float | None, selector: SelectorName | None
    ) -> tuple[float, SelectorName, int]:
        return self.ratio if ratio is None else ratio, selector or self.selector, self.check_layer

    def plan(self, request: PlanRequest) -> BlendPlan:
        if not request.hits:
            raise NotBlendable("no_chunk_cached", "the store holds none of the prompt's chunks")
        ratio, selector, check_layer = self.configuration(request.ratio, request.selector)
        return BlendPlan(request.hits, ratio, selector, check_layer)


def hits_beyond(hits: Sequence[ChunkHit], num_computed: int) -> tuple[ChunkHit, ...]:
    """The hits of which at least one token is not in the engine's own prefix cache."""
    return tuple(hit for hit in hits if hit.end > num_computed)
