"""Latent attention in bfloat16, where vLLM's CPU backend caches prefixes and chunks prefills."""

from __future__ import annotations

import pytest
import torch

from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import LocalEngine, Prompt
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask,
    ask_cold,
    chunks_of,
    rag,
    require_blended,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.engine("deepseek-v2 bfloat16"),
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM's other backend for latents has neither"
    ),
]

SIZES = (129, 1, 33, 100, 64)
STEP_TOKENS = 64
"""Shorter than chunks and than the tokens of a pass."""


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    return engine_slot.get("deepseek-v2", max_num_batched_tokens=STEP_TOKENS, max_num_seqs=8)


@pytest.fixture(scope="module")
def prompt(engine: LocalEngine) -> Rag:
    """A prompt of chunks that the store holds."""
    chunks = chunks_of(*SIZES, seed=20)
    for generation in engine.save(PREFIX, chunks, NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved", generation.accounting
    return rag(*chunks)


def test_full_ratio_is_full_prefill_in_steps(engine: LocalEngine, prompt: Rag) -> None:
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32)
    assert require_blended(blended)["bytes_loaded"] == sum(SIZES) * 576 * 2 * 4
    assert blended.token_ids == full.token_ids
    assert len(set(full.token_ids)) >= 4


def test_a_blend_behind_a_cached_prefix_is_full_prefill(engine: LocalEngine, prompt: Rag) -> None:
    full = ask_cold(engine, prompt.token_ids)
    engine.reset_prefix_cache()
    nothing = KintsugiParams(NAMESPACE, spans=())
    ask(engine, [*prompt.token_ids[: prompt.spans[0].end], 11, 12], nothing, max_tokens=1)
    behind = ask(engine, prompt.token_ids, prompt.params(1.0))
    assert require_blended(behind)["tokens_prefix_cached"] == 128
    assert behind.token_ids == full.token_ids
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert ask(engine, prompt.token_ids, nothing).token_ids == full.token_ids


def test_blends_and_plain_prompts_share_steps(engine: LocalEngine, prompt: Rag) -> None:
    others = [[*PREFIX, *prompt.question[::-1]], [*PREFIX, *prompt.token_ids[200:260]]]
    alone = [ask_cold(engine, one).token_ids for one in (*others, prompt.token_ids)]
    engine.reset_prefix_cache()
    asked = [
        *(Prompt(one, None, 8, ignore_eos=True) for one in others),
        *(Prompt(prompt.token_ids, prompt.params(ratio), 8, ignore_eos=True) for ratio in (1.0, 0.15)),
    ]
    *together, partial = engine.generate(asked)
    assert [one.token_ids for one in together] == alone
    require_blended(together[-1])
    require_blended(partial)
