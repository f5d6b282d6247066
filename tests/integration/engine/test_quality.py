"""Measuring, calibrating and shadowing over a real engine with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from kintsugi.core.evidence import Quality
from kintsugi.core.plan import Selection
from kintsugi.core.report import FILE, LADDER, Report
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.models.prompt_form import PromptForm
from kintsugi.quality import reports
from kintsugi.quality.calibrate import calibrate
from kintsugi.quality.evaluate import EvaluationGrid, evaluate
from kintsugi.quality.measure import NAMESPACE, Bench, measure_selection, tokenize_questions
from kintsugi.quality.questions import Question
from kintsugi.quality.reports import ReportKeeper
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from kintsugi.store.client.ram import RamStore
from kintsugi.store.client.registry import open_store
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.fakes.reports import fetch_report
from tests.integration.engine.conftest import EngineSlot

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

STORE = "ram://quality-test"
TOKENS = 3


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
        for i in range(48)
    ]
    form = PromptForm.of(engine.tokenizer)
    assert form.head == engine.prefix_token_ids
    cases, warnings = tokenize_questions(questions, form, 2048, TOKENS)
    assert not warnings
    bench = Bench(engine, cases, TOKENS, batch=18)
    bench.store_chunks()
    return bench


def test_a_full_ratio_measures_as_no_loss(bench: Bench) -> None:
    scores = measure_selection(bench, Selection(1.0), range(6))
    assert scores.kl_mean < 1e-4
    assert scores.top1_agreement == 1.0
    assert [len(one.divergences) for one in scores.by_prompt] == [TOKENS] * 6
    assert scores.cost == pytest.approx(1.0, abs=0.01)


def test_full_reuse_measures_as_a_loss_along_the_same_tokens(bench: Bench) -> None:
    scores = measure_selection(bench, Selection(0.0), range(6))
    assert scores.kl_mean > 1e-5
    assert scores.cost < 0.5
    assert all(len(blend.steps) == TOKENS for blend in scores.blend)
    for full, blend in zip(scores.full, scores.blend, strict=True):
        for mine, theirs in zip(full.token_ids, blend.steps, strict=True):
            assert mine in theirs, "forced along full prefill's tokens, whatever the blend would have said"


def test_calibration_decides_alike_twice_and_the_gate_reads_it(engine: LocalEngine, bench: Bench) -> None:
    found = []
    for _ in range(2):
        keeper = ReportKeeper(None, engine.binding, engine.versions, Quality.BALANCED)
        calibrate(bench, keeper, Quality.BALANCED, "plain", minutes=None)
        found.append(keeper.report)
    report = found[0]
    # How prompts share steps moves a loss by a rounding step, and not what is decided.
    decided, decided_again = (
        [(cell, report.standing(cell, FILE, Quality.BALANCED).passed) for cell in report.cells]
        for report in found
    )
    assert decided == decided_again
    (cell,) = report.cells
    tally = report.tally(cell, FILE, LADDER[0])
    assert tally.pairs == len(bench.cases)
    assert tally.loss < 0.1, "hardly anything is lost where three quarters are computed"
    store = RamStore()
    reports.publish(store, report)
    stored = fetch_report(store, engine.binding)
    assert stored is not None
    assert stored.tally(cell, FILE, LADDER[0]) == tally


def test_an_evaluation_has_baselines_and_times(engine: LocalEngine, bench: Bench) -> None:
    grid = EvaluationGrid(chunk_tokens=(16,), chunks=(4,), batches=(4,))
    full, reuse, blend = evaluate(engine, bench.cases[:4], [Selection(0.3)], grid, "raw", None, 1)
    assert full.cost == 1.0 > blend.cost > reuse.cost
    assert all(row.ttft.mean > 0 and row.num_prompts == 4 for row in (full, reuse, blend))


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_trial_along_an_answer_reports_what_decoding_it_would(
    engine: LocalEngine, bench: Bench, length: int
) -> None:
    """Along any tokens, at every position, beside a request that is left alone."""
    token_ids = bench.prompt(0, None).token_ids
    other = tuple((7 * position) % 500 + 3 for position in range(length))
    each = [Prompt([*token_ids, *other[:position]], None, 1, top_logprobs=5) for position in range(length)]
    expected = [one.top_logprobs[0] for one in engine.generate(each)]
    trial, plain = engine.generate([bench.prompt(0, Selection(1.0), other), each[0]])
    assert trial.token_ids == list(other)
    assert len(trial.top_logprobs) == length
    for found, wanted in zip(trial.top_logprobs, expected, strict=True):
        best = sorted(found, key=lambda token: -found[token])[:5]
        assert {token: found[token] for token in best} == pytest.approx(
            {token: wanted[token] for token in best}, abs=1e-3
        )
    assert plain.top_logprobs[0] == expected[0]


@pytest.mark.parametrize(
    ("namespace", "outcome", "rows"), [(NAMESPACE, "blended", 2), ("absent", "declined", 0)]
)
def test_only_a_blended_trial_computes_logprobs_of_prompt_tokens(
    engine: LocalEngine, bench: Bench, namespace: str, outcome: str, rows: int
) -> None:
    """Of a whole prompt they take more memory than its prefill."""
    prompt = bench.prompt(1, Selection(0.4), (5, 6, 7))
    assert prompt.params is not None
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    with patch.object(model, "compute_logits", wraps=model.compute_logits) as computed:
        (answer,) = engine.generate([replace(prompt, params=replace(prompt.params, namespace=namespace))])
    assert answer.accounting is not None
    assert answer.accounting["outcome"] == outcome
    assert sum(len(call.args[0]) for call in computed.mock_calls) == rows + 1
    assert len(answer.top_logprobs) == rows + 1


def test_a_report_is_written_whole_and_read_again(engine: LocalEngine, tmp_path: Path) -> None:
    report = Report(engine.binding, "2026-01-01T00:00:00+00:00")
    path = tmp_path / "report.json"
    reports.write(path, report)
    assert reports.read(path) == report
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert open_store(STORE) is not None
