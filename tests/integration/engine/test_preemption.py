"""Blends on a cache too small for all of them: preempted requests answer as they do alone."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
    random_tokens,
)
from tests.simulation.mixed import blocks_in_use

pytestmark = pytest.mark.engine

BLOCK = 32
BLOCKS = 40
BLOCK_BYTES = BLOCK * 4 * 2 * 2 * 32 * 4
"""Tokens, layers, K and V, heads, elements, float32."""
MAX_MODEL_LEN = 1024
SIZES = (100, 257, 64)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    engine = engine_slot.get(
        "tiny-llama",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES,
    )
    engine.save(PREFIX, chunks_of(*SIZES, seed=7), NAMESPACE)
    return engine


def together(
    engine: LocalEngine, asked: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Generation], int]:
    """All answers, and how often a request was preempted meanwhile."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *arguments: Any, **keywords: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **keywords)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    engine.reset_prefix_cache()
    answers = engine.generate(asked)
    assert blocks_in_use(engine) == 0
    return answers, len(preempted)


def crowd(ratio: float | None) -> list[Prompt]:
    """More than fits into the cache at once, and none that does not fit alone."""
    first, second, third = chunks_of(*SIZES, seed=7)
    arrangements = [rag(second, third), rag(third, second), rag(first, second), rag(second, first)]
    for index, prompt in enumerate(arrangements):
        prompt.question = random_tokens(45, 70 + index)
    asked = [
        Prompt(p.token_ids, None if ratio is None else p.params(ratio), 120, top_logprobs=5, ignore_eos=True)
        for p in arrangements
    ]
    return [*asked, Prompt(random_tokens(200, 75), None, 120, top_logprobs=5, ignore_eos=True)]


@pytest.mark.parametrize("ratio", [None, 0.0, 1.0])
def test_preempted_requests_answer_as_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, ratio: float | None
) -> None:
    asked = crowd(ratio)
    answers, preempted = together(engine, asked, monkeypatch)
    assert preempted > 0, "the cache is too large for this test"
    for prompt, answer in zip(asked, answers, strict=True):
        alone = ask_cold(engine, prompt.token_ids, prompt.params, max_tokens=120)
        assert answer.token_ids == alone.token_ids
        assert max_dlogprob(alone, answer) <= 1e-3
        if prompt.params is not None:
            assert answer.accounting is not None
            assert answer.accounting["outcome"] == "blended"


def test_a_preempted_blend_of_some_tokens_ends(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is blended again is what the prefix cache lost: the share that is recomputed is taken of that,
    so the answer may part from the solo run's. Everything else holds."""
    answers, preempted = together(engine, crowd(0.3), monkeypatch)
    assert preempted > 0
    assert [len(answer.token_ids) for answer in answers] == [120] * len(answers)
    assert all(answer.accounting["outcome"] == "blended" for answer in answers if answer.accounting)


def test_a_prompt_that_never_fits_is_refused(engine: LocalEngine) -> None:
    from vllm.exceptions import VLLMValidationError

    too_long = random_tokens(MAX_MODEL_LEN + 1, 9)
    with pytest.raises(InvalidField, match="exceed the model's 1024"):
        engine.generate([Prompt(too_long, KintsugiParams(NAMESPACE))])
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        engine._submit("too-long", Prompt(too_long, KintsugiParams(NAMESPACE)))
    assert blocks_in_use(engine) == 0
    assert not engine.llm.llm_engine.has_unfinished_requests()
