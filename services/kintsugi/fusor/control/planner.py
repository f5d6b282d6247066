"""Planners decide how a prompt is blended, or that it is not. Pure: only the connector calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection, apply_options
from kintsugi.core.request import BlendOptions
from kintsugi.fusor.control.estimates import Measured
from kintsugi.fusor.control.forecast import EngineShape


@dataclass(frozen=True)
class PlanRequest:
    """One prompt as a planner sees it."""

    num_tokens: int
    num_computed: int
    """Tokens that the engine's own prefix cache holds."""
    hits: tuple[ChunkHit, ...]
    """Chunks that the store holds and the prefix cache does not cover entirely, with their bytes and where
    these lie."""
    options: BlendOptions = field(default_factory=BlendOptions)
    """What the request chooses; None leaves it to the planner."""
    exact_end: int = 0
    """As in `BlendPlan`."""
    engine: EngineShape | None = None
    """None: nothing can be predicted."""
    measured: Measured = field(default_factory=Measured)
    ahead_s: float = 0.0
    """Computing of passes that go first; a full prefill shares the engine with them, too."""
    is_alone: bool = False
    """Whether no other request could use what this one computes beyond its minimum."""
    is_trial: bool = False
    """Blend although computing that is predicted to be slower, to measure it again."""


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


@dataclass(frozen=True)
class FixedRatioPlanner:
    """Load every hit, recompute a fixed share: for those who measure what they ask for."""

    selection: Selection
    """Where a request says nothing else. Layers are the engine's to set: a request cannot name any."""

    def with_selection(self, selection: Selection) -> FixedRatioPlanner:
        return replace(self, selection=selection)

    def plan(self, request: PlanRequest) -> BlendPlan:
        if not request.hits:
            raise NotBlendable("no_chunk_cached", "the store holds none of the prompt's chunks")
        return BlendPlan(request.hits, apply_options(self.selection, request.options), request.exact_end)


def hits_beyond(hits: Sequence[ChunkHit], num_computed: int) -> tuple[ChunkHit, ...]:
    """The hits of which at least one token is not in the engine's own prefix cache."""
    return tuple(hit for hit in hits if hit.end > num_computed)
