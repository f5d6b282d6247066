"""What an engine promises beside blends of one prompt: samples, several answers, grammars, mixed steps.

With `KINTSUGI_POSED=1`, the engine is the one that runs by default on a GPU: Model Runner V2 and async
scheduling, which starts loads after a step's forward pass.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kintsugi.core.request import PARAMS_KEY
from kintsugi.engine.local import LocalEngine, Prompt
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask,
    ask_cold,
    chunks_of,
    is_posed,
    max_dlogprob,
    rag,
    random_tokens,
)

pytestmark = pytest.mark.engine("tiny-llama")

SIZES = (40, 70, 50)
EXACT = 0.01


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    return chunks_of(*SIZES, seed=21)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, chunks: list[list[int]]) -> LocalEngine:
    engine = engine_slot.get("tiny-llama")
    for saved in engine.save(PREFIX, chunks, NAMESPACE):
        assert saved.is_saved, saved.accounting
    return engine


def answers_of(engine: LocalEngine, prompt: Rag, ratio: float, **sampling: Any) -> Any:
    """vLLM's output for one blended request with these sampling parameters."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    extra = {"kv_transfer_params": prompt.params(ratio).to_mapping()}
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": prompt.token_ids}], SamplingParams(extra_args=extra, **sampling), use_tqdm=False
    )
    assert output.kv_transfer_params[PARAMS_KEY]["outcome"] in ("blended", "prefix_hit")
    return output


def test_the_engine_is_the_default_one(engine: LocalEngine) -> None:
    config = engine.llm.llm_engine.vllm_config
    assert bool(config.scheduler_config.async_scheduling) is is_posed()
    assert config.use_v2_model_runner is is_posed()
    assert engine._scheduler.declined_because is None


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_a_blend_beside_full_prefill(engine: LocalEngine, chunks: list[list[int]], ratio: float) -> None:
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(ratio))
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.accounting["chunks_hit"] == len(chunks)
    if ratio == 1:
        assert blended.token_ids == full.token_ids
        assert max_dlogprob(full, blended) <= EXACT
    else:
        assert max_dlogprob(full, blended) > EXACT, "or it compares a full prefill with itself"


def test_a_later_turn_finds_the_blend(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    first = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    later = Rag(prompt.pieces, [*prompt.question, *first.token_ids, *random_tokens(9, 8)])
    found = ask(engine, later.token_ids, later.params(0.0))
    assert found.accounting is not None
    assert found.accounting["tokens_prefix_cached"] >= sum(SIZES) // 32 * 32
    assert max_dlogprob(ask_cold(engine, later.token_ids, later.params(0.0)), found) <= EXACT


def test_a_plain_prompt_does_not(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    plain = ask(engine, prompt.token_ids)
    assert plain.token_ids == full.token_ids
    assert max_dlogprob(full, plain) <= EXACT


def test_several_answers_to_one_blend(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    greedy = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    output = answers_of(engine, prompt, 1.0, n=4, top_k=1, max_tokens=8, ignore_eos=True)
    assert [list(one.token_ids) for one in output.outputs] == [greedy.token_ids] * 4


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")  # vLLM sets it
def test_a_grammar_holds_in_a_blend(engine: LocalEngine, chunks: list[list[int]]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    output = answers_of(
        engine,
        rag(*chunks),
        0.15,
        temperature=0.0,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True),
    )
    assert json.loads(output.outputs[0].text)["a"] in (1, 2)


def test_blends_and_plain_prompts_share_steps(engine: LocalEngine, chunks: list[list[int]]) -> None:
    one, other, plain = rag(*chunks), rag(*chunks[::-1]), random_tokens(90, 31)
    asked = [
        Prompt(plain, None, 12, top_logprobs=5, ignore_eos=True),
        Prompt(one.token_ids, one.params(1.0), 8, top_logprobs=5, ignore_eos=True),
        Prompt(other.token_ids, other.params(0.15), 8, top_logprobs=5, ignore_eos=True),
        Prompt(one.token_ids, None, 8, top_logprobs=5, ignore_eos=True),
    ]
    alone = [ask_cold(engine, each.token_ids, each.params, each.max_tokens) for each in asked]
    engine.reset_prefix_cache()
    for before, together in zip(alone, engine.generate(asked), strict=True):
        assert together.token_ids == before.token_ids
        assert max_dlogprob(before, together) <= EXACT


@pytest.mark.engine("tiny-llama chunked")
def test_prompts_are_prefilled_in_parts_beside_a_blend(
    engine_slot: EngineSlot, chunks: list[list[int]]
) -> None:
    """A step takes 64 tokens, of a prompt as of a pass: decodes, parts of a prefill and slices alternate."""
    engine = engine_slot.get("tiny-llama", max_num_batched_tokens=64, max_num_seqs=8)
    assert all(saved.is_saved for saved in engine.save(PREFIX, chunks, NAMESPACE))
    prompt, plain = rag(*chunks), random_tokens(200, 33)
    asked = [
        Prompt(plain, None, 8, top_logprobs=5, ignore_eos=True),
        Prompt(prompt.token_ids, prompt.params(1.0), 8, top_logprobs=5, ignore_eos=True),
        Prompt(prompt.token_ids, prompt.params(0.15), 8, top_logprobs=5, ignore_eos=True),
    ]
    full = ask_cold(engine, prompt.token_ids)
    alone = [ask_cold(engine, each.token_ids, each.params) for each in asked]
    assert [(each.accounting or {}).get("outcome") for each in alone] == [None, "blended", "blended"]
    assert alone[1].token_ids == full.token_ids
    assert max_dlogprob(full, alone[1]) <= EXACT
    engine.reset_prefix_cache()
    for before, together in zip(alone, engine.generate(asked), strict=True):
        assert together.token_ids == before.token_ids
        assert max_dlogprob(before, together) <= EXACT
