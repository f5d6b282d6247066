"""The loading controller: what to load, how much to recompute, or not to blend at all. Pure.

From the paper (§5, "loading controller"): the ratio at which recomputing takes as long as loading, but at
least the one that quality asks for. Its other choice, where to keep what is put, is `core.tiers`. Beyond
it: a chunk is recomputed where that is faster than loading it, and the whole prompt is where nothing beats a
full prefill, because on a fast accelerator behind a slow network loading loses.

Priors: what was never measured is believed to be good. Without any measurement a prompt is blended, and so
the engine learns; a source that nobody has read from is instant. Who executes plans keeps both honest
(`engine.scheduler.timing`): now and then a refused prompt's chunk is read beside, and a refusal for
computing's sake is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import BlendPlan, ChunkHit, ChunkSource, Selection
from kintsugi.fusor.control.estimates import Measured
from kintsugi.fusor.control.forecast import BlendForecast, ForecastRegion, blend_forecast, full_prefill_s
from kintsugi.fusor.control.planner import FixedRatioPlanner, PlanRequest

RATIO_STEP = 0.05
"""Raised ratios are multiples of it: a few different blends of a prompt, not one per measurement."""
FREE_SHARE = 0.02
"""A ratio is free if the first token comes at most this much later: no layer's load hides the last layer."""
WORTHWHILE_SHARE = 0.1
"""Loading some chunks and recomputing others has to bring the first token forward by this share, against
loading all and against a full prefill: forecasts err."""
CANDIDATES_MAX = 16
"""Ways to load fewer chunks that are compared, as far as there are not more sets of sources: the scheduler
waits for it."""
CUTS_MAX = 8
"""Numbers of chunks to recompute that are tried for one set of sources."""
SOURCES_MAX = 3
"""Up to so many sources every set of them is tried; of more, all, all but one, and each alone."""


@dataclass(frozen=True)
class LoadingController:
    """The planner of an engine that serves."""

    selection: Selection
    """Where a request says nothing else; its ratio is the least that the gate allows."""
    ratio_max: float
    """How far a ratio may be raised that nobody asked for."""

    def with_selection(self, selection: Selection) -> LoadingController:
        return replace(self, selection=selection)

    def plan(self, request: PlanRequest) -> BlendPlan:
        """The plan with the earliest first token. Raises `NotBlendable` where a full prefill's is earlier:
        `loading_is_slower`, or `blending_is_slower` where even an instant store would not help."""
        fixed = FixedRatioPlanner(self.selection).plan(request)
        full_s = predict_full_s(request)
        forecast = _forecast(fixed.selection, fixed.hits, request)
        if forecast is None or full_s is None:
            return fixed
        plan, forecast = _with_fewer_loads(fixed, forecast, full_s, request)
        if forecast.ttft_s > full_s and not (request.is_trial and _transfers_within(full_s, plan, request)):
            raise _refusal(plan, forecast, full_s, request)
        if request.options.ratio is None and request.is_alone:
            plan, forecast = _raise_ratio(plan, forecast, min(self.ratio_max, 1.0), full_s, request)
        return replace(plan, predicted_ttft_s=forecast.ttft_s)


def predict_full_s(request: PlanRequest) -> float | None:
    """Seconds to the first token of a full prefill, where anything is known about it."""
    if request.engine is None:
        return None
    full_s = full_prefill_s(request.engine, request.measured, _region(request))
    return None if full_s is None else request.ahead_s + full_s


def _region(request: PlanRequest) -> ForecastRegion:
    return ForecastRegion(request.num_computed, request.num_tokens - 1, request.exact_end)


def _forecast(
    selection: Selection, hits: Sequence[ChunkHit], request: PlanRequest, measured: Measured | None = None
) -> BlendForecast | None:
    if request.engine is None:
        return None
    return blend_forecast(
        request.engine, measured or request.measured, selection, hits, _region(request), request.ahead_s
    )


def _with_fewer_loads(
    plan: BlendPlan, forecast: BlendForecast, full_s: float, request: PlanRequest
) -> tuple[BlendPlan, BlendForecast]:
    """The best of the candidates where it is worthwhile; else `plan`, which loads everything."""
    best = plan, forecast
    for loaded in candidates(plan.hits):
        fewer = _forecast(plan.selection, loaded, request)
        if fewer is not None and fewer.ttft_s < best[1].ttft_s:
            best = replace(plan, hits=loaded), fewer
    otherwise_s = min(forecast.ttft_s, full_s)
    return best if best[1].ttft_s < (1 - WORTHWHILE_SHARE) * otherwise_s else (plan, forecast)


def candidates(hits: tuple[ChunkHit, ...]) -> Iterator[tuple[ChunkHit, ...]]:
    """Sets of chunks to load, never none. They do not depend on what was measured: so a source that becomes
    faster can only make the best of them better.

    Of the chunks of a set of sources, the first in the prompt are recomputed: they attend to least.
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
    """A trial shows what computing and decoding cost: a store that is slow, too, is not waited for."""
    decoded = _forecast(plan.selection, plan.hits, request, replace(request.measured, decode_s_per_byte=0.0))
    return decoded is not None and decoded.load_s <= full_s


def _refusal(plan: BlendPlan, forecast: BlendForecast, full_s: float, request: PlanRequest) -> NotBlendable:
    instant = _forecast(plan.selection, request.hits, request, replace(request.measured, links={}))
    reason = "loading_is_slower"
    if instant is not None and instant.ttft_s > full_s:
        reason = "blending_is_slower"
    return NotBlendable(
        reason,
        f"a blend's first token is predicted after {forecast.ttft_s * 1e3:.1f} ms (loading "
        f"{forecast.load_s * 1e3:.1f}, computing {forecast.compute_s * 1e3:.1f}), a full prefill's after "
        f"{full_s * 1e3:.1f} ms",
    )


def _raise_ratio(
    plan: BlendPlan, forecast: BlendForecast, ratio_max: float, full_s: float, request: PlanRequest
) -> tuple[BlendPlan, BlendForecast]:
    """The highest ratio that loading hides: the paper's case of a device that computes faster than it
    loads. An adaptive ratio knows when to stop by itself, and 0 and 1 are meant."""
    if not 0 < plan.selection.ratio < ratio_max or plan.selection.adaptive_mass is not None:
        return plan, forecast
    free_s = min(full_s, (1 + FREE_SHARE) * forecast.ttft_s)
    for step in range(int(ratio_max / RATIO_STEP + 1e-9), int(plan.selection.ratio / RATIO_STEP + 1e-9), -1):
        selection = replace(plan.selection, ratio=round(step * RATIO_STEP, 2))
        raised = _forecast(selection, plan.hits, request)
        if raised is not None and raised.ttft_s <= free_s:
            return replace(plan, selection=selection), raised
    return plan, forecast
