"""What the loading controller promises, over engines, stores and prompts of any kind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kintsugi.core.errors import NotBlendable
from kintsugi.core.plan import BlendPlan, ChunkHit, ChunkSource, Selection, apply_options
from kintsugi.core.request import BlendOptions, SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor.control.controller import (
    FREE_SHARE,
    WORTHWHILE_SHARE,
    LoadingController,
    Planner,
    PlanRequest,
    candidates,
    predict_full_s,
)
from kintsugi.fusor.control.estimates import Estimates, Link, Measured
from kintsugi.fusor.control.forecast import (
    EngineShape,
    ForecastRegion,
    blend_forecast,
    count_attention_pairs,
    full_prefill_s,
    terms_of,
)
from kintsugi.fusor.gaps import find_left_out

BYTES_PER_TOKEN = 128 << 10
"""KV bytes of a token over all layers of a Mistral-7B."""
SOURCES = (ChunkSource("a:1", "ram"), ChunkSource("a:1", "ssd"), ChunkSource("b:1", "ram"))
CONTROLLER = LoadingController(Selection(0.15))
GPU = EngineShape(num_layers=32, projection_share=0.2, step_tokens_max=8192)
"""As fast as an H200: 76 ms for 3,072 tokens."""
GPU_STEP = (1e-3, 2.4e-5, 2e-10)
GPU_BLEND = (1e-3, 2.4e-5 / 32, 2e-10 / 32, 4e-10 / 32, 0.0)
TOLERANCE = 1 + 1e-9
anything = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def hits_of(sizes: list[int], sources: list[ChunkSource], start: int = 1) -> tuple[ChunkHit, ...]:
    hits, at = [], start
    for index, (size, source) in enumerate(zip(sizes, sources, strict=True)):
        key = ChunkKey(index.to_bytes(32, "big"))
        hits.append(ChunkHit(at, at + size, key, size * BYTES_PER_TOKEN, source))
        at += size
    return tuple(hits)


def asked(bytes_per_s: float, chunks: int = 6, size: int = 512, **changes: object) -> PlanRequest:
    """A prompt on a GPU whose chunks lie in one place."""
    hits = hits_of([size] * chunks, [SOURCES[0]] * chunks)
    measured = Measured(
        links={SOURCES[0]: Link(1e-3, 1 / bytes_per_s)},
        step=GPU_STEP,
        step_tokens_seen=8192,
        blend=GPU_BLEND,
        tail_s=2e-3,
    )
    request = PlanRequest(hits[-1].end + 32, 0, hits, engine=GPU, measured=measured)
    return replace(request, **changes)  # type: ignore[arg-type]


def outcome(request: PlanRequest, controller: LoadingController = CONTROLLER) -> BlendPlan | str:
    try:
        return controller.plan(request)
    except NotBlendable as error:
        return error.reason


positive = st.floats(1e-9, 1e-2)
links = st.builds(Link, st.floats(0, 0.1), st.floats(1e-12, 1e-6))


@st.composite
def plan_requests(draw: st.DrawFn) -> PlanRequest:
    layers = draw(st.integers(1, 40))
    engine = EngineShape(layers, draw(st.floats(0.05, 0.5)), draw(st.integers(16, 8192)))
    count = draw(st.integers(1, 8))
    hits = hits_of(
        draw(st.lists(st.integers(1, 600), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from(SOURCES), min_size=count, max_size=count)),
    )
    measured = Measured(
        links=draw(st.dictionaries(st.sampled_from(SOURCES), links)),
        decode_s_per_byte=draw(st.floats(0, 1e-8)),
        step=(draw(positive), draw(positive), draw(st.floats(0, 1e-8))),
        step_tokens_seen=8192,
        blend=draw(st.none() | st.tuples(positive, positive, positive, positive, st.floats(0, 1e-6))),
        tail_s=draw(st.floats(0, 0.1)),
    )
    return PlanRequest(
        num_tokens=hits[-1].end + draw(st.integers(1, 100)),
        num_computed=draw(st.integers(0, hits[0].end - 1)),
        hits=hits,
        options=BlendOptions(
            draw(st.none() | st.floats(0, 1)), draw(st.none() | st.sampled_from(SelectorName))
        ),
        engine=engine,
        measured=measured,
        ahead_s=draw(st.floats(0, 1)),
        is_alone=draw(st.booleans()),
    )


@anything
@given(plan_requests())
def test_never_a_plan_that_is_predicted_slower_than_a_full_prefill(request: PlanRequest) -> None:
    plan = outcome(request)
    full_s = predict_full_s(request)
    assert full_s is not None
    if isinstance(plan, BlendPlan):
        assert plan.predicted_ttft_s is not None
        assert plan.predicted_ttft_s <= full_s * TOLERANCE
        assert plan.hits
        forecast = blend_forecast(
            request.engine or GPU,
            request.measured,
            plan.selection,
            plan.hits,
            ForecastRegion(request.num_computed, request.num_tokens - 1),
            request.ahead_s,
        )
        assert forecast is not None
        assert forecast.ttft_s == plan.predicted_ttft_s
    else:
        assert plan in ("loading_is_slower", "blending_is_slower")


@anything
@given(plan_requests(), st.floats(0, 1), st.floats(0, 1))
def test_more_bandwidth_is_never_worse(request: PlanRequest, faster: float, sooner: float) -> None:
    better = {
        source: Link(link.opening_s * sooner, link.s_per_byte * faster)
        for source, link in request.measured.links.items()
    }
    before = outcome(request)
    after = outcome(replace(request, measured=replace(request.measured, links=better)))
    if isinstance(before, BlendPlan):
        assert isinstance(after, BlendPlan), "a faster store turned a blend into none"
        assert before.predicted_ttft_s is not None
        assert after.predicted_ttft_s is not None
        hysteresis = (1 + FREE_SHARE) / (1 - WORTHWHILE_SHARE)
        assert after.predicted_ttft_s <= before.predicted_ttft_s * hysteresis * TOLERANCE


@anything
@given(plan_requests())
def test_the_ratio_is_what_was_asked_or_at_least_the_gates(request: PlanRequest) -> None:
    plan = outcome(request)
    if not isinstance(plan, BlendPlan):
        return
    if request.options.ratio is not None:
        assert plan.selection.ratio == request.options.ratio
    else:
        assert 0.15 <= plan.selection.ratio <= 0.5
    named = apply_options(CONTROLLER.selection, request.options)
    assert replace(plan.selection, ratio=named.ratio) == named


@anything
@given(plan_requests())
def test_the_same_request_gets_the_same_plan(request: PlanRequest) -> None:
    assert outcome(request) == outcome(replace(request))


@anything
@given(plan_requests())
def test_a_trial_is_always_blended_where_the_store_is_fast(request: PlanRequest) -> None:
    instant = replace(request, is_trial=True, measured=replace(request.measured, links={}))
    assert isinstance(outcome(instant), BlendPlan)


def test_a_trial_does_not_wait_for_a_slow_store() -> None:
    """It is to show what computing costs; a chunk that is read beside shows what loading does."""
    slow = asked(1e6, is_trial=True)
    assert outcome(slow) == "loading_is_slower"
    both = replace(slow, measured=replace(slow.measured, tail_s=1.0))
    assert outcome(both) == "blending_is_slower"
    fast = replace(asked(1e12).measured, tail_s=1.0)
    assert isinstance(outcome(asked(1e12, is_trial=True, measured=fast)), BlendPlan)


@anything
@given(plan_requests())
def test_a_full_ratio_computes_what_a_full_prefill_does(request: PlanRequest) -> None:
    """By the same coefficients, with an instant store: a blend that recomputes all is a full prefill."""
    engine = replace(request.engine or GPU, step_tokens_max=1 << 20)
    region = ForecastRegion(0, request.num_tokens - 1)
    measured = Measured(blend=(0.0, 1e-6, 1e-9, 2e-9, 0.0))
    forecast = blend_forecast(engine, measured, Selection(1.0), request.hits, region)
    full_s = full_prefill_s(engine, measured, region)
    assert forecast is not None
    assert full_s is not None
    last = engine.num_layers * (1e-6 + 1e-9 * count_attention_pairs(region.end, region.end + 1))
    assert forecast.ttft_s + last == pytest.approx(full_s)


@anything
@given(plan_requests())
def test_whatever_is_not_loaded_is_computed(request: PlanRequest) -> None:
    engine = request.engine
    region = ForecastRegion(0, request.num_tokens - 1)
    full = engine.num_layers * region.num_tokens
    assert terms_of(engine, Selection(0.15), (), region)[1] == full
    for loaded in candidates(request.hits):
        assert loaded
        assert set(loaded) <= set(request.hits)
        computed = terms_of(engine, Selection(0.0), loaded, region)[1]
        assert computed == full - engine.num_layers * sum(hit.num_tokens for hit in loaded)


@anything
@given(plan_requests())
def test_the_question_passes_without_the_inside_of_missed_chunks(request: PlanRequest) -> None:
    start = request.num_computed
    chunks = tuple(range(hit.start, hit.end) for hit in request.hits)
    region = ForecastRegion(start, request.num_tokens - 1, chunks=chunks)
    query = Selection(0.5, SelectorName.QUERY, query_layers=(2,))
    engine = replace(request.engine, num_layers=4)
    without = replace(engine, sees_order_alone=False)
    for loaded in candidates(request.hits):
        left_out = {position for gap in find_left_out(loaded, chunks, start, 0) for position in gap}
        covered = {position for hit in loaded for position in range(hit.start, hit.end)}
        others = [p for p in range(start, region.end) if p not in covered]
        places = {p: place for place, p in enumerate(p for p in range(region.end) if p not in left_out)}
        gone = sum(1 + p for p in others) - sum(1 + places[p] for p in others if p not in left_out)
        whole, closed = (terms_of(one, query, loaded, region) for one in (without, engine))
        passes = 2 + engine.projection_share
        assert whole[1] - closed[1] == pytest.approx(len(left_out) * passes, abs=1e-6)
        assert whole[2] - closed[2] == pytest.approx(2 * gone)


def test_without_measurements_a_prompt_is_blended_as_ever() -> None:
    request = replace(asked(1e9), measured=Measured())
    assert outcome(request) == Planner(Selection(0.15)).plan(request)


def test_a_source_that_nobody_has_read_from_is_tried() -> None:
    request = asked(1.0)
    assert outcome(request) == "loading_is_slower"
    unknown = replace(request.measured, links={})
    assert isinstance(outcome(replace(request, measured=unknown)), BlendPlan)


def test_loading_over_a_slow_network_loses_to_a_fast_accelerator() -> None:
    """FACTS §3: 0.4 GB take 129 ms at 25 Gb/s and 32 at 100; the prefill takes 76."""
    assert isinstance(outcome(asked(100e9 / 8)), BlendPlan)
    assert outcome(asked(1e9 / 8)) == "loading_is_slower"


def test_a_chunk_in_a_slow_place_is_recomputed_and_the_others_are_loaded() -> None:
    request = asked(50e9)
    slow = replace(request.hits[2], source=SOURCES[1])
    hits = (*request.hits[:2], slow, *request.hits[3:])
    known = {**request.measured.links, SOURCES[1]: Link(1e-3, 1e-9)}
    plan = outcome(replace(request, hits=hits, measured=replace(request.measured, links=known)))
    assert isinstance(plan, BlendPlan)
    assert plan.hits == (*request.hits[:2], *request.hits[3:])


def test_between_loading_and_computing_a_prompt_takes_some_of_both() -> None:
    """At half the bandwidth at which loading all takes as long as computing all, either alone is slower."""
    request = asked(0.5 * 6 * 512 * BYTES_PER_TOKEN / 0.076)
    plan = outcome(request)
    assert isinstance(plan, BlendPlan)
    assert 0 < len(plan.hits) < 6
    assert plan.predicted_ttft_s is not None
    assert plan.predicted_ttft_s < 0.95 * (predict_full_s(request) or 0.0)


def test_the_ratio_rises_until_loading_is_hidden() -> None:
    """The paper's first case: the device computes faster than it loads."""
    ratios = []
    for bytes_per_s in (400e9, 25e9, 15e9, 12e9):
        plan = outcome(asked(bytes_per_s, chunks=1, size=3072, is_alone=True))
        assert isinstance(plan, BlendPlan)
        ratios.append(plan.selection.ratio)
    assert ratios[0] == 0.15
    assert ratios == sorted(ratios)
    assert ratios[-1] > 0.3
    assert all(round(ratio * 20, 6).is_integer() for ratio in ratios)


def test_the_ratio_stays_where_others_could_use_the_computing() -> None:
    for changes in ({"is_alone": False}, {"is_alone": True, "options": BlendOptions(ratio=0.2)}):
        plan = outcome(asked(12e9, chunks=1, size=3072, **changes))
        assert isinstance(plan, BlendPlan)
        assert plan.selection.ratio == (0.2 if "options" in changes else 0.15)


def test_loading_hides_behind_the_passes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it may run ahead."""
    monkeypatch.setattr("kintsugi.fusor.control.forecast.PREFETCH_LAYERS", 16)
    request = asked(12e9, chunks=1, size=3072)
    plan = outcome(request)
    behind = outcome(replace(request, ahead_s=0.5))
    assert isinstance(plan, BlendPlan)
    assert isinstance(behind, BlendPlan)
    assert plan.predicted_ttft_s is not None
    assert behind.predicted_ttft_s is not None
    assert behind.predicted_ttft_s - 0.5 < 0.8 * plan.predicted_ttft_s


def test_a_refusal_says_what_was_predicted() -> None:
    with pytest.raises(NotBlendable) as refused:
        CONTROLLER.plan(asked(1e8))
    assert refused.value.reason == "loading_is_slower"
    assert "ms" in str(refused.value)
    slow = replace(asked(1e12).measured, tail_s=1.0)
    with pytest.raises(NotBlendable) as refused:
        CONTROLLER.plan(asked(1e12, measured=slow))
    assert refused.value.reason == "blending_is_slower"


def test_no_hit_is_no_blend() -> None:
    with pytest.raises(NotBlendable, match="no_chunk_cached"):
        CONTROLLER.plan(replace(asked(1e9), hits=()))


@pytest.mark.parametrize("seed", range(30))
def test_alike_prompts_on_a_busy_machine_stay_blended(seed: int) -> None:
    """Passes take 0.85 to 1.3 times what their work says, and nothing else has been measured: their
    differences must not be taken for costs of loaded rows, which a full prefill would not have."""
    noise, estimates = random.Random(seed), Estimates()
    for _ in range(12):
        request = asked(1e12, measured=estimates.snapshot())
        request = replace(request, num_tokens=request.num_tokens + noise.randrange(32))
        plan = CONTROLLER.plan(request)
        assert plan.hits == request.hits
        region = ForecastRegion(0, request.num_tokens - 1)
        terms = terms_of(GPU, plan.selection, plan.hits, region)
        seconds = _dot(GPU_BLEND, terms) * noise.uniform(0.85, 1.3)
        estimates.observe_blend(terms, GPU.num_layers, seconds)


def test_short_prompts_first_do_not_make_a_long_blend_look_dear() -> None:
    """Chats, a few short prompts, short blends, each at what it costs; then the first long prompt."""
    estimates = Estimates()
    blend = (25e-3, *GPU_BLEND[1:])
    for tokens in (*range(20, 60, 2), 500, 500, 500):
        pairs = count_attention_pairs(0, tokens)
        seconds = 8e-3 + GPU_STEP[1] * tokens + GPU_STEP[2] * pairs
        estimates.observe_step(tokens, pairs, seconds)
    for _ in range(3):
        request = asked(1e12, chunks=2, size=256)
        region = ForecastRegion(0, request.num_tokens - 1)
        terms = terms_of(GPU, Selection(0.15), request.hits, region)
        estimates.observe_blend(terms, GPU.num_layers, _dot(blend, terms))
    request = asked(1e12, chunks=7, measured=estimates.snapshot())
    region = ForecastRegion(0, request.num_tokens - 1)
    truth_s = _dot(blend, terms_of(GPU, Selection(0.15), request.hits, region))
    predicted_s = CONTROLLER.plan(request).predicted_ttft_s
    assert predicted_s is not None
    assert predicted_s < 2 * truth_s


def _dot(coefficients: tuple[float, ...], terms: tuple[float, ...]) -> float:
    return sum(cost * term for cost, term in zip(coefficients, terms, strict=True))
