"""Choosing a context over real engines and the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.core.report import Thresholds
from kintsugi.core.request import SelectorName
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.context import encode_context
from kintsugi.models.passages import read_bundled_passages
from kintsugi.models.prompt_form import load_form
from kintsugi.quality.calibrate import Budget, calibrate
from kintsugi.quality.contexts import PROMPTS_MIN, ContextProber
from kintsugi.quality.measure import Bench, tokenize_questions
from kintsugi.quality.questions import make_passage_questions
from kintsugi.quality.session import MeasuringEngineSpec, start_measuring_engine
from tests.integration.engine.conftest import EngineSlot

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

MODEL = str(bundled_checkpoint())
CHUNK_TOKENS = 24
BUDGET = Budget(minutes=None, ratios=(0.4,), selectors=(SelectorName.HKVD,))


def test_contexts_are_tried_on_engines_of_their_own_and_the_report_is_of_the_last_one(
    engine_slot: EngineSlot, tmp_path: Path
) -> None:
    engine_slot.close()
    sample = tmp_path / "sample.txt"
    sample.write_text(read_bundled_passages()[-1].text[:400])
    form = load_form(MODEL)
    questions = make_passage_questions(lambda text: len(form.tokenize(text)), CHUNK_TOKENS, 40, seed=0)
    cases, _ = tokenize_questions(questions, form, 512, max_tokens=8)
    prober = ContextProber(2, BUDGET, Thresholds(), form.name.value)
    bench: Bench | None = None
    for context in ("none", str(sample)):
        spec = MeasuringEngineSpec(
            MODEL,
            form=form,
            context_token_ids=encode_context(context, form.tokenizer),
            vllm_args={"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20},
        )
        with start_measuring_engine(spec) as engine:
            bench = Bench(engine, cases, 8) if bench is None else bench.on_engine(engine)
            prober.probe(context, bench, engine.num_layers)
            if context != "none":
                arguments = (engine.num_layers, engine.binding, BUDGET, Thresholds(), "test", "now")
                report = calibrate(bench, *arguments, form.name.value).report
                assert report.binding.context != ""
                assert report.entries
    choice = prober.choose()
    none, behind = choice.tried
    assert choice.num_prompts == PROMPTS_MIN
    assert none.kl_mean > 0.0
    assert behind.kl_mean != none.kl_mean
    assert behind.gain is not None
    assert choice.context == (str(sample) if behind.gain.low > 0 else "none")
