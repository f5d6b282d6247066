"""Measuring, calibrating and shadowing over a real engine with random weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.core.plan import Selection
from kintsugi.core.prompt import Domain, LengthRange
from kintsugi.core.report import CalibrationReport, LossBound, Noise, Quantity, Search, Thresholds
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import reports
from kintsugi.quality.calibrate import Budget, calibrate
from kintsugi.quality.evaluate import Axes, evaluate, measure_rates
from kintsugi.quality.measure import NAMESPACE, Bench, make_baseline, measure_selection, tokenize_questions
from kintsugi.quality.questions import Question
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.quality.shadow import Shadow, ShadowConfig
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.integration.engine.conftest import EngineSlot

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

STORE = "ram://quality-test"
TOKENS = 3
LENGTHS = LengthRange(1, 2048)
ANY = Domain("plain", LENGTHS, LENGTHS, LENGTHS, LENGTHS)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> Iterator[LocalEngine]:
    engine_slot.close()
    spec = MeasuringEngineSpec(
        str(make_checkpoint_once("tiny-llama")),
        store=STORE,
        vllm_args={"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 128 << 20},
    )
    with start_measuring_engine(spec) as engine:
        yield engine


@pytest.fixture(scope="module")
def bench(engine: LocalEngine) -> Bench:
    words = ["glass", "river", "engine", "winter", "copper", "letter", "garden"]
    questions = [
        Question(
            tuple(" ".join(words[(i + j + k) % 7] for k in range(30)) + "\n" for j in range(3)),
            f"\nQuestion: what is {words[i % 7]} {i}?\nAnswer:",
        )
        for i in range(36)
    ]
    form = PromptForm.of(engine.tokenizer)
    assert form.head == engine.prefix_token_ids
    cases, warnings = tokenize_questions(questions, form, 2048, TOKENS)
    assert not warnings
    bench = Bench(engine, cases, TOKENS, batch=18)
    bench.store_chunks()
    return bench


def test_a_full_ratio_measures_as_no_loss(bench: Bench) -> None:
    entry = measure_selection(bench, Selection(1.0), range(6)).entry
    assert entry.kl_mean < 1e-4
    assert (entry.top1_agreement, entry.num_positions) == (1.0, 6 * TOKENS)
    assert entry.cost == pytest.approx(1.0, abs=0.01)


def test_full_reuse_measures_as_a_loss_along_the_same_tokens(bench: Bench) -> None:
    scores = measure_selection(bench, Selection(0.0), range(6))
    assert scores.entry.kl_mean > 1e-5
    assert scores.entry.cost < 0.5
    assert all(len(blend.steps) == TOKENS for blend in scores.blend)
    for full, blend in zip(scores.full, scores.blend, strict=True):
        for mine, theirs in zip(full.token_ids, blend.steps, strict=True):
            assert mine in theirs, "forced along full prefill's tokens, whatever the blend would have said"


def test_calibration_decides_alike_twice_and_the_gate_reads_it(engine: LocalEngine, bench: Bench) -> None:
    budget = Budget(ratios=(0.15, 0.5), selectors=(SelectorName.HKVD,), cost_max=0.9)
    lenient = Thresholds(top1_agreement_min=0.3, kl_mean_max=0.4)
    first, again = (
        calibrate(
            bench,
            engine.num_layers,
            engine.binding,
            budget,
            lenient,
            "test",
            "now",
            "plain",
            clock_s=lambda: 0.0,
        ).report
        for _ in range(2)
    )
    assert first.to_bytes() == again.to_bytes()
    assert first.choice.selection is not None
    assert {entry.selection.selector for entry in first.entries} == {SelectorName.HKVD}
    (chosen,) = (entry for entry in first.entries if entry.selection == first.choice.selection)
    assert all(bound.mean < bound.upper < 0.5 for bound in chosen.bounds)
    assert first.domain.chunks == LengthRange(3, 3)
    assert first.noise.kl_mean < 1e-4
    store = RamStore()
    reports.publish(store, first)
    assert reports.fetch_report(store, engine.binding) == first


def test_an_evaluation_has_baselines_and_times(engine: LocalEngine, bench: Bench) -> None:
    axes = Axes([Selection(0.3)], chunk_tokens=(16,), chunk_counts=(4,), batches=(4,))
    full, reuse, blend = evaluate(engine, bench.cases[:4], axes, "raw", None, 1)
    assert full.cost == 1.0 > blend.cost > reuse.cost
    assert all(row.ttft.mean > 0 and row.num_prompts == 4 for row in (full, reuse, blend))
    small = Bench(engine, bench.cases[:4], 1)
    rates = measure_rates(engine, small, [Selection(0.3)], [50.0], lambda text: None)
    assert len(rates) == 3
    assert all(math.isfinite(row.ttft.mean) and row.ttft_p95_s > 0 for row in rates)


def test_arrivals_are_kept_to(engine: LocalEngine, bench: Bench) -> None:
    prompts = [bench.prompt(index, None) for index in range(3)]
    engine.generate(prompts)
    together = engine.generate(prompts)
    apart = engine.generate(prompts, arrivals_s=[0.0, 0.3, 0.6])
    assert [answer.token_ids for answer in apart] == [answer.token_ids for answer in together]
    with pytest.raises(ValueError):
        engine.generate(prompts, arrivals_s=[0.0])


def test_forced_answers_report_the_models_own_logprobs(engine: LocalEngine, bench: Bench) -> None:
    token_ids = bench.prompt(0, None).token_ids
    (free,) = engine.generate([Prompt(token_ids, None, 3, top_logprobs=5)])
    other = [free.token_ids[0], (free.token_ids[1] + 1) % 500 + 3]
    (forced, plain) = engine.generate(
        [Prompt(token_ids, None, 3, top_logprobs=5, forced=other), Prompt(token_ids, None, 3, top_logprobs=5)]
    )
    assert forced.token_ids[:2] == other
    assert len(forced.token_ids) == 3, "free again behind the forced ones"
    assert forced.logprobs[1] < free.logprobs[1]
    assert forced.top_logprobs[0] == pytest.approx(free.top_logprobs[0], abs=1e-4)
    assert plain.token_ids == free.token_ids, "a request beside it is left alone"


def test_damaged_chunks_are_seen_by_shadowing_and_trip_the_report(engine: LocalEngine, bench: Bench) -> None:
    """Held to thresholds of full ratio's noise, full reuse is damage enough."""
    store = RamStore()
    strict = Thresholds(kl_mean_max=1e-6, top1_agreement_min=0.99)
    full = measure_selection(bench, Selection(1.0), range(32))
    quiet = dataclasses.replace(
        full.entry,
        place=0,
        error=0.05,
        bounds=[LossBound(Quantity.DISAGREEMENT, "", 0.0, 0.01, 32)],
    )
    report = CalibrationReport.of(
        engine.binding, "now", "test", 0, Noise(0.0, 0.0, 1.0), strict, ANY, Search(1, 1, 0.1), [quiet]
    )
    report = dataclasses.replace(report, baseline=make_baseline(full.by_prompt))
    reports.publish(store, report)
    shadow = Shadow(engine, store, engine.binding, ShadowConfig(share=1.0, positions=TOKENS))
    engine.plan_with(Selection(0.0))
    for number, case in enumerate(bench.cases):
        params = KintsugiParams(NAMESPACE, spans=case.prompt.spans)
        prompt = shadow.prepare_prompt(str(number), Prompt(case.prompt.token_ids, params, TOKENS))
        (answer,) = engine.generate([prompt])
        assert shadow.take(prompt, answer)
        assert shadow.run_pending() == 1
    assert shadow.counts.compared == len(bench.cases)
    assert shadow.counts.trips == 1
    tripped = reports.fetch_report(store, engine.binding)
    assert tripped is not None
    assert tripped.tripped is not None


def test_a_report_is_written_whole_and_read_again(engine: LocalEngine, tmp_path: Path) -> None:
    search = Search(0, 0, 0.0)
    report = CalibrationReport.of(
        engine.binding, "now", "test", 0, Noise(0.0, 0.0, 1.0), Thresholds(), ANY, search, []
    )
    path = tmp_path / "report.json"
    reports.write(path, report)
    assert reports.read(path) == report
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert open_store(STORE) is not None
