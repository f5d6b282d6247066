"""Planners decide whether and how a prompt is blended. Pure; only the scheduler's side calls them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Self

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
    """Chunks that the store holds and that have tokens outside the prefix cache (`hits_beyond`)."""
    engine: EngineShape
    options: BlendOptions = field(default_factory=BlendOptions)
    """The request's options; the planner decides about those that are None."""
    exact_end: int = 0
    """KV loaded for tokens before this position is exact (`BlendPlan.exact_end`)."""
    chunks: tuple[range, ...] = ()
    """As in `BlendPlan`."""
    measured: Measured = field(default_factory=Measured)
    ahead_s: float = 0.0
    """Seconds of computing left in passes that go first. They delay a full prefill as well as a blend."""
    is_alone: bool = False
    """Whether the engine is otherwise idle, so that recomputing more than the minimum delays nobody."""
    is_trial: bool = False
    """Blend even if computing is predicted to be slower, to measure it again."""


@dataclass(frozen=True)
class Planner:
    """Loads every hit and recomputes a fixed share. Used for measurements, which need exactly the requested
    configuration, and as the first step of `LoadingController`."""

    selection: Selection
    """The default for options that a request does not set. Requests cannot set layers; the engine's
    configuration does."""

    def with_selection(self, selection: Selection) -> Self:
        """Return the same planner with another default, such as a calibration report's choice."""
        return replace(self, selection=selection)

    def plan(self, request: PlanRequest) -> BlendPlan:
        """Plan a blend. Raises `NotBlendable` if a full prefill is better."""
        if not request.hits:
            raise NotBlendable("no_chunk_cached", "the store holds none of the prompt's chunks")
        selection = apply_options(self.selection, request.options)
        return BlendPlan(request.hits, selection, request.exact_end, request.chunks)


def hits_beyond(hits: Sequence[ChunkHit], num_computed: int) -> tuple[ChunkHit, ...]:
    """Return the hits with at least one token outside the engine's own prefix cache."""
    return tuple(hit for hit in hits if hit.end > num_computed)


def plan_again(plan: BlendPlan, hits: Sequence[ChunkHit], computed: Set[int]) -> BlendPlan:
    """Return the same blend for a request whose cached prefix has changed since `plan`.

    `hits`: the chunks that can be loaded now. Chunks that start at positions in `computed` were computed and
    are not loaded. Raises `NotBlendable` if nothing is left to load; a full prefill of the rest then gives
    the same result.
    """
    loaded = tuple(hit for hit in hits if hit.start not in computed)
    if not loaded:
        raise NotBlendable("prefix_hit", "the prefix cache holds every chunk that was loaded")
    return replace(plan, hits=loaded)
