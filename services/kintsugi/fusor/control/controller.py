"""The loading controller decides what to load, how much to recompute, or not to blend at all. Pure.

From the paper (§5, "loading controller"): the ratio at which recomputing takes as long as loading, but at
least the ratio that quality requires. (`store.shard.eviction.room` makes the paper's other choice, the
storage tier.) In addition, a chunk is recomputed if that is faster than loading it, and the prompt is
prefilled in full if nothing beats that: on a fast accelerator behind a slow network, loading loses.

Priors are optimistic: without any measurement a prompt is blended, which makes the engine measure, and a
source that was never read counts as instant. `engine.scheduler.stats` keeps the estimates up to date after
refusals: now and then it reads a refused prompt's chunk on the side, or blends although computing was
predicted slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Self

from kintsugi.core.accounting import NO_CHUNK
from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import BlendPlan, ChunkHit, ChunkSource, Selection, apply_options
from kintsugi.core.request import BlendOptions
from kintsugi.fusor.control.estimates import Measured
from kintsugi.fusor.control.forecast import (
    BlendForecast,
    EngineShape,
    ForecastRegion,
    blend_forecast,
    full_prefill_s,
)

RATIO_MAX = 0.5
"""Highest ratio that the controller chooses for a request without one."""
RATIO_STEP = 0.05
"""Raised ratios are multiples of this, so a prompt has few different blends rather than one per
measurement."""
FREE_SHARE = 0.02
"""A ratio counts as free if it delays the first token by at most this share. It cannot be exactly free,
because no load hides the computing of the last layer."""
WORTHWHILE_SHARE = 0.1
"""Recomputing some chunks instead of loading all must bring the first token forward by at least this share,
compared with loading all and with a full prefill: forecasts err."""
CANDIDATES_MAX = 16
"""Maximum number of subsets of chunks that are compared, unless there are more sets of sources. The scheduler
waits for the comparison."""
CUTS_MAX = 8
"""Maximum number of subsets that are compared for one set of sources."""
SOURCES_MAX = 3
"""With up to this many sources, every set of them is tried; with more, only all, all but one, and each
alone."""


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
    """The request's options. The planner chooses each option that the request leaves None."""
    exact_end: int = 0
    """KV loaded for tokens before this position is exact (`BlendPlan.exact_end`)."""
    chunks: tuple[range, ...] = ()
    """As in `BlendPlan`."""
    measured: Measured = field(default_factory=Measured)
    ahead_s: float = 0.0
    """Seconds of computing left in passes ahead of this one. They delay a full prefill as well as a blend."""
    is_alone: bool = False
    """Whether the engine is otherwise idle, so that recomputing more than the minimum delays no other
    request."""
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
            raise NotBlendable(NO_CHUNK, "the store holds none of the prompt's chunks")
        selection = apply_options(self.selection, request.options)
        return BlendPlan(request.hits, selection, request.exact_end, request.chunks)


@dataclass(frozen=True)
class LoadingController(Planner):
    """The planner of a serving engine. The ratio of its default selection is the lowest that the gate
    allows."""

    def plan(self, request: PlanRequest) -> BlendPlan:
        """Return the plan with the earliest first token. Raises `NotBlendable` if a full prefill's is
        earlier: `loading_is_slower`, or `blending_is_slower` if even an instant store would not help."""
        fixed = super().plan(request)
        full_s = predict_full_s(request)
        forecast = _forecast(fixed.selection, fixed.hits, request)
        if forecast is None or full_s is None:
            return fixed
        plan, forecast = _try_fewer_loads(fixed, forecast, full_s, request)
        if forecast.ttft_s > full_s and not (request.is_trial and _transfers_within(full_s, plan, request)):
            raise _make_refusal(plan, forecast, full_s, request)
        if request.options.ratio is None and request.is_alone:
            plan, forecast = _raise_ratio(plan, forecast, full_s, request)
        return replace(plan, predicted_ttft_s=forecast.ttft_s)


def predict_full_s(request: PlanRequest) -> float | None:
    """Seconds to the first token of a full prefill; None if nothing is known about it."""
    full_s = full_prefill_s(request.engine, request.measured, _region(request))
    return None if full_s is None else request.ahead_s + full_s


def _region(request: PlanRequest) -> ForecastRegion:
    return ForecastRegion(request.num_computed, request.num_tokens - 1, request.exact_end, request.chunks)


def _forecast(
    selection: Selection, hits: Sequence[ChunkHit], request: PlanRequest, measured: Measured | None = None
) -> BlendForecast | None:
    return blend_forecast(
        request.engine, measured or request.measured, selection, hits, _region(request), request.ahead_s
    )


def _try_fewer_loads(
    plan: BlendPlan, forecast: BlendForecast, full_s: float, request: PlanRequest
) -> tuple[BlendPlan, BlendForecast]:
    """Return the best of the candidates if it is worthwhile, else `plan`, which loads everything."""
    best = plan, forecast
    for loaded in candidates(plan.hits):
        fewer = _forecast(plan.selection, loaded, request)
        if fewer is not None and fewer.ttft_s < best[1].ttft_s:
            best = replace(plan, hits=loaded), fewer
    otherwise_s = min(forecast.ttft_s, full_s)
    return best if best[1].ttft_s < (1 - WORTHWHILE_SHARE) * otherwise_s else (plan, forecast)


def candidates(hits: tuple[ChunkHit, ...]) -> Iterator[tuple[ChunkHit, ...]]:
    """Yield nonempty sets of chunks to load. They do not depend on measurements, so a source that becomes
    faster can only improve the best of them.

    Within a set of sources, the chunks recomputed are the first ones in the prompt: they attend to the fewest
    tokens.
    """
    sources = list(dict.fromkeys(hit.source for hit in hits))
    sets = _source_sets(sources)
    cuts = max(1, min(CUTS_MAX, CANDIDATES_MAX // len(sets)))
    for chosen in sets:
        mine = tuple(hit for hit in hits if hit.source in chosen)
        step = -(-len(mine) // cuts)
        for cut in range(0, len(mine), step):
            yield mine[cut:]


def _source_sets(sources: Sequence[ChunkSource]) -> list[frozenset[ChunkSource]]:
    count = len(sources)
    sizes = range(count, 0, -1) if count <= SOURCES_MAX else (count, count - 1, 1)
    return [frozenset(chosen) for size in sizes for chosen in combinations(sources, size)]


def _transfers_within(full_s: float, plan: BlendPlan, request: PlanRequest) -> bool:
    """Whether loading alone takes no longer than a full prefill. A trial measures computing and decoding, so
    it need not wait for a store that is known to be slow."""
    decoded = _forecast(plan.selection, plan.hits, request, replace(request.measured, decode_s_per_byte=0.0))
    return decoded is not None and decoded.load_s <= full_s


def _make_refusal(
    plan: BlendPlan, forecast: BlendForecast, full_s: float, request: PlanRequest
) -> NotBlendable:
    instant = _forecast(plan.selection, request.hits, request, replace(request.measured, links={}))
    reason = "loading_is_slower"
    if instant is not None and instant.ttft_s > full_s:
        reason = "blending_is_slower"
    return NotBlendable(
        reason,
        f"predicted time to first token: {forecast.ttft_s * 1e3:.1f} ms for a blend (loading "
        f"{forecast.load_s * 1e3:.1f}, computing {forecast.compute_s * 1e3:.1f}), "
        f"{full_s * 1e3:.1f} ms for a full prefill",
    )


def _raise_ratio(
    plan: BlendPlan, forecast: BlendForecast, full_s: float, request: PlanRequest
) -> tuple[BlendPlan, BlendForecast]:
    """Raise the ratio to the highest one that loading hides: the paper's case of a device that computes
    faster than it loads. Ratios of 0 and 1 are deliberate and stay."""
    if not 0 < plan.selection.ratio < RATIO_MAX:
        return plan, forecast
    free_s = min(full_s, (1 + FREE_SHARE) * forecast.ttft_s)
    for step in range(int(RATIO_MAX / RATIO_STEP + 1e-9), int(plan.selection.ratio / RATIO_STEP + 1e-9), -1):
        selection = replace(plan.selection, ratio=round(step * RATIO_STEP, 2))
        raised = _forecast(selection, plan.hits, request)
        if raised is not None and raised.ttft_s <= free_s:
            return replace(plan, selection=selection), raised
    return plan, forecast


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
