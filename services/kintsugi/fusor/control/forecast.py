"""Predicts a prompt's time to first token: blended, or prefilled in full. Pure.

A full prefill is a sequence of engine steps. A blend is a pipeline of layers: the loader runs at most
`PREFETCH_LAYERS` ahead, and a layer is computed once it is loaded and the previous one is done,

    TTFT_blend = first layer's load + Σ max(load_{i+1}, compute_i) + last layer's compute + tail.

If loading runs further ahead, a slow layer uses up that lead first. Loading starts immediately, computing
when the passes ahead of this one are done. A source that was never measured counts as instant.

Cost of one blend's forecast: about 1 µs per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kintsugi.core.plan import ChunkHit, ChunkSource, Selection
from kintsugi.fusor.control.cost import LayerWork, PassWorkload, pass_work
from kintsugi.fusor.control.estimates import EXTRAPOLATION_MAX, Link, Measured, Terms, blend_prior
from kintsugi.fusor.gaps import find_left_out
from kintsugi.fusor.loader import PREFETCH_LAYERS

INSTANT = Link(0.0, 0.0)


@dataclass(frozen=True)
class EngineShape:
    """Properties of the engine that a forecast depends on."""

    num_layers: int
    projection_share: float
    """See `fusor.stack.DecoderStack.projection_share`."""
    step_tokens_max: int
    """Maximum number of tokens that one engine step prefills."""
    sees_order_alone: bool = True
    attending: tuple[int, ...] | None = None
    """Both as in `fusor.stack.DecoderStack`; None: all layers attend."""


@dataclass(frozen=True)
class ForecastRegion:
    """Positions `[start, end)`: what the engine's prefix cache lacks, without the last token."""

    start: int
    end: int
    exact_end: int = 0
    chunks: tuple[range, ...] = ()
    """Both as in `BlendPlan`."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class BlendForecast:
    """The prediction for a blend, in seconds."""

    ttft_s: float
    load_s: float
    """Sum over all layers."""
    compute_s: float


def count_attention_pairs(start: int, end: int) -> float:
    """Count (query, key) pairs of causal attention from the tokens `[start, end)` to all tokens up to
    each."""
    return (end * (end + 1) - start * (start + 1)) / 2


def full_prefill_s(engine: EngineShape, measured: Measured, region: ForecastRegion) -> float | None:
    """Seconds to the first token, in steps of at most `step_tokens_max` tokens including the prompt's last
    token. None if neither comparable steps nor passes were measured yet."""
    tokens = min(engine.step_tokens_max, region.num_tokens + 1)
    terms, total = measured.step, 0.0
    if terms is None or tokens > EXTRAPOLATION_MAX * measured.step_tokens_seen:
        # Predict it as a pass that loads nothing, with its tail. Otherwise a cheaper blend could look slower.
        terms, total = _step_of_blends(engine, measured.blend), measured.tail_s
    if terms is None:
        return None
    start = region.start
    while start <= region.end:
        end = min(start + engine.step_tokens_max, region.end + 1)
        total += terms[0] + terms[1] * (end - start) + terms[2] * count_attention_pairs(start, end)
        start = end
    return total


def _step_of_blends(engine: EngineShape, blend: Terms | None) -> Terms | None:
    if blend is None:
        return None
    return blend[0], engine.num_layers * blend[1], engine.num_layers * blend[2]


def terms_of(
    engine: EngineShape,
    selection: Selection,
    hits: Sequence[ChunkHit],
    region: ForecastRegion,
    computed: float | None = None,
) -> Terms:
    """The terms of a pass over `region` that loads `hits`, in the order of `Measured.blend`. `computed`: its
    token-layers, if counted."""
    shape = _Shape(engine, hits, region)
    stages = [shape.terms(stage) for stage in shape.stages(selection)]
    token_layers, runs, scattered, rows = (sum(column) for column in zip(*stages, strict=True))
    return 1.0, token_layers if computed is None else computed, runs, scattered, rows


class _Shape:
    """Numbers of hit tokens and other tokens in a region, and of their attention pairs."""

    def __init__(self, engine: EngineShape, hits: Sequence[ChunkHit], region: ForecastRegion) -> None:
        self._engine = engine
        self.hit_tokens = self.exact_tokens = 0
        self._hit_pairs = 0.0
        for hit in hits:
            first, last = max(hit.start, region.start), min(hit.end, region.end)
            self.hit_tokens += last - first
            self.exact_tokens += max(min(last, region.exact_end) - first, 0)
            self._hit_pairs += count_attention_pairs(first, last)
        self.other_tokens = region.num_tokens - self.hit_tokens
        left_out = []
        if engine.sees_order_alone:
            left_out = find_left_out(hits, region.chunks, region.start, region.exact_end)
        self.left_out_tokens = sum(map(len, left_out))
        self._other_pairs = _count_other_pairs(hits, region, [])
        self._asking_pairs = _count_other_pairs(hits, region, left_out) if left_out else self._other_pairs

    def stages(self, selection: Selection) -> tuple[LayerWork, ...]:
        """The layers of a pass in the order in which they are computed."""
        tokens = PassWorkload(
            self.hit_tokens,
            self.other_tokens,
            self._engine.num_layers,
            self._engine.projection_share,
            self.exact_tokens,
            self.left_out_tokens,
            self._engine.attending,
        )
        work = pass_work(selection, tokens)
        return *work.question, *work.blend

    def terms(self, stage: LayerWork) -> tuple[float, float, float, float]:
        """Token-layers, pairs in runs, pairs of scattered tokens, rows written. Chosen tokens are assumed to
        be spread evenly over the hit tokens; other tokens form runs, and so do all tokens together."""
        share = stage.hit_tokens / self.hit_tokens if self.hit_tokens else 0.0
        runs = self._asking_pairs if stage.asks else self._other_pairs
        runs = runs if stage.other_tokens else 0.0
        scattered = share * self._hit_pairs
        if share == 1.0:
            runs, scattered = runs + scattered, 0.0
        return stage.token_layers, runs, scattered, float(self.hit_tokens)


def _count_other_pairs(hits: Sequence[ChunkHit], region: ForecastRegion, left_out: Sequence[range]) -> float:
    """`count_attention_pairs` of the tokens that were not loaded, without those `left_out`."""
    away = [(hit.start, hit.end, 0) for hit in hits] + [(gap.start, gap.stop, len(gap)) for gap in left_out]
    pairs, gone, reached = 0.0, 0, region.start
    for first, end, leaving in sorted(away):
        pairs += count_attention_pairs(reached - gone, max(first, reached) - gone)
        gone += leaving
        reached = max(end, reached)
    return pairs + count_attention_pairs(reached - gone, region.end - gone)


def blend_forecast(
    engine: EngineShape,
    measured: Measured,
    selection: Selection,
    hits: Sequence[ChunkHit],
    region: ForecastRegion,
    ahead_s: float = 0.0,
) -> BlendForecast | None:
    """Predict a blend that loads `hits` and computes the rest of `region`. `ahead_s`: seconds of computing in
    passes that go first. None if neither passes nor steps have been measured yet."""
    coefficients = measured.blend
    if coefficients is None and measured.step is not None:
        coefficients = blend_prior(measured.step, engine.num_layers)
    if coefficients is None:
        return None
    opening_s, layer_s = _forecast_loading(engine, measured, hits)
    loads = [layer_s] * engine.num_layers
    loads[0] += opening_s
    shape = _Shape(engine, hits, region)
    stages = _cost_stages(shape.stages(selection), shape, coefficients)
    compute_s = coefficients[0] + sum(cost for _, cost in stages)
    end_s = _pipeline(stages, loads, ahead_s + coefficients[0])
    return BlendForecast(end_s + measured.tail_s, sum(loads), compute_s)


def _cost_stages(stages: Sequence[LayerWork], shape: _Shape, coefficients: Terms) -> list[tuple[int, float]]:
    """Return layer and seconds of each stage. Most stages equal the previous one, whose cost is reused."""
    costed: list[tuple[int, float]] = []
    before, cost_s = None, 0.0
    for stage in stages:
        alike = (stage.hit_tokens, stage.other_tokens, stage.projected_tokens, stage.asks)
        if alike != before:
            before, cost_s = alike, _dot(coefficients[1:], shape.terms(stage))
        costed.append((stage.layer, cost_s))
    return costed


def _forecast_loading(
    engine: EngineShape, measured: Measured, hits: Sequence[ChunkHit]
) -> tuple[float, float]:
    """Return the seconds until bytes arrive, and the seconds per layer. A stream reads its sources in
    turn."""
    by_source: dict[ChunkSource, int] = {}
    for hit in hits:
        by_source[hit.source] = by_source.get(hit.source, 0) + hit.num_bytes
    opening_s, total_s = 0.0, 0.0
    for source, num_bytes in by_source.items():
        link = measured.links.get(source, INSTANT)
        opening_s += link.opening_s
        total_s += num_bytes * (link.s_per_byte + measured.decode_s_per_byte)
    return opening_s, total_s / engine.num_layers


def _pipeline(stages: Sequence[tuple[int, float]], loads: Sequence[float], begin_s: float) -> float:
    """Return the time at which the last stage is done. A layer starts loading when the previous one is loaded
    and the layer `PREFETCH_LAYERS` before it has been taken."""
    taken: list[float] = []
    loaded_s, now_s = 0.0, begin_s
    for layer, cost_s in stages:
        if layer == len(taken):  # else the question's pass has taken it
            room_s = taken[layer - PREFETCH_LAYERS] if layer >= PREFETCH_LAYERS else 0.0
            loaded_s = max(loaded_s, room_s) + loads[layer]
            now_s = max(now_s, loaded_s)
            taken.append(now_s)
        now_s += cost_s
    return now_s


def _dot(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(coefficient * term for coefficient, term in zip(coefficients, terms, strict=True))
