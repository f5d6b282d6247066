"""Blended KV in vLLM's prefix cache: never found as exact, never across tenants, found by a later turn."""

from __future__ import annotations

import time

import pytest

from kintsugi.core.request import KintsugiParams, Op
from kintsugi.engine.local import LocalEngine, Prompt
from kintsugi.store.protocol.save_times import CLOCKS_DIFFER_S
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask,
    ask_cold,
    chunks_of,
    max_dlogprob,
    rag,
    ram_store,
    random_tokens,
)

pytestmark = pytest.mark.engine("tiny-llama")


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    return chunks_of(100, 257, 64, seed=2)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, chunks: list[list[int]]) -> LocalEngine:
    engine = engine_slot.get("tiny-llama")
    engine.save(PREFIX, chunks, NAMESPACE)
    return engine


@pytest.mark.parametrize("salt", [None, NAMESPACE])
def test_a_plain_request_never_finds_blended_blocks(
    engine: LocalEngine, chunks: list[list[int]], salt: str | None
) -> None:
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    plain = engine.generate(
        [Prompt(prompt.token_ids, None, 8, cache_salt=salt, top_logprobs=5, ignore_eos=True)]
    )[0]
    # The first chunk stands behind its own prefix: exact, and rightly shared within the tenant.
    assert plain.num_cached_tokens <= (96 if salt else 0)
    assert plain.token_ids == full.token_ids
    assert max_dlogprob(full, plain) <= 0.01


def test_blocks_that_fill_while_decoding_are_forked_too(engine: LocalEngine, chunks: list[list[int]]) -> None:
    """A prompt shorter than a block registers its first block only once its answer has filled it."""
    short = chunks_of(9, 8, seed=3)
    engine.save(PREFIX, short, NAMESPACE)
    prompt = rag(*short)
    prompt.question = [7, 8]
    answer = ask_cold(engine, prompt.token_ids, prompt.params(0.0), max_tokens=40)
    again = [*prompt.token_ids, *answer.token_ids]
    plain = engine.generate([Prompt(again, None, 8, cache_salt=NAMESPACE, top_logprobs=5, ignore_eos=True)])[
        0
    ]
    assert plain.num_cached_tokens == 0
    assert max_dlogprob(ask_cold(engine, again), plain) <= 0.01


def test_a_later_turn_finds_the_blended_blocks(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    first = ask_cold(engine, prompt.token_ids, prompt.params(0.2), max_tokens=40)
    turn2 = [*prompt.token_ids, *first.token_ids, *random_tokens(30, 8)]
    params = KintsugiParams(NAMESPACE, spans=prompt.spans, ratio=0.2)
    second = ask(engine, turn2, params)
    assert second.accounting is not None
    assert second.accounting["outcome"] == "prefix_hit"
    # Every full block of the first turn, its answer's included, but for the last token.
    assert second.num_cached_tokens >= (len(prompt.token_ids) + 39) // 32 * 32


def test_a_later_turn_by_content_finds_them_as_well(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    first = ask_cold(engine, prompt.token_ids, KintsugiParams(NAMESPACE), max_tokens=40)
    turn2 = [*prompt.token_ids, *first.token_ids, *random_tokens(30, 8)]
    second = ask(engine, turn2, KintsugiParams(NAMESPACE))
    assert second.accounting is not None
    assert second.accounting["outcome"] == "prefix_hit"


def test_another_plan_does_not_find_them(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    other = ask(engine, prompt.token_ids, prompt.params(1.0))
    assert other.accounting is not None
    assert other.accounting["outcome"] == "blended"
    assert other.accounting["tokens_prefix_cached"] <= 96


def test_tenants_share_nothing(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    ask_cold(engine, prompt.token_ids, prompt.params(0.2))
    for name, spans in (("rival", prompt.spans), ("other", None)):
        rival = ask(engine, prompt.token_ids, KintsugiParams(name, spans=spans, ratio=0.2))
        assert rival.accounting is not None
        assert rival.accounting["outcome"] == "declined"
        assert rival.accounting["reason"].startswith("no_chunk_cached")
        assert rival.num_cached_tokens == 0


def test_a_save_leaves_an_exact_prefix_behind(engine: LocalEngine) -> None:
    (chunk,) = chunks_of(100, seed=5)
    engine.reset_prefix_cache()
    engine.save(PREFIX, [chunk], NAMESPACE)
    prompt = [*PREFIX, *chunk, *random_tokens(10, 4)]
    plain = engine.generate([Prompt(prompt, None, 8, cache_salt=NAMESPACE, top_logprobs=5, ignore_eos=True)])[
        0
    ]
    assert plain.num_cached_tokens == 96
    assert max_dlogprob(ask_cold(engine, prompt), plain) <= 0.01


def test_saving_again_computes_again_but_stores_once(engine: LocalEngine) -> None:
    (chunk,) = chunks_of(100, seed=6)
    for _ in range(2):
        (generation,) = engine.save(PREFIX, [chunk], NAMESPACE)
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved"


def test_an_erased_namespace_is_computed_anew(engine: LocalEngine, chunks: list[list[int]]) -> None:
    """Neither its blends nor its plain requests find what was cached before; another namespace still does."""
    prompt = rag(*chunks)
    plain = KintsugiParams(NAMESPACE, op=Op.OFF)
    other = KintsugiParams("other", op=Op.OFF)
    engine.reset_prefix_cache()
    for params in (plain, other):
        ask(engine, prompt.token_ids, params)
        assert ask(engine, prompt.token_ids, params).num_cached_tokens > 0
    store = ram_store("tiny-llama")
    salts = engine._scheduler.salts
    salts.refresh()
    # No later: a save counts as requested `CLOCKS_DIFFER_S` ago, and those after the erasure must stay.
    store.erase(NAMESPACE, None, time.time() - CLOCKS_DIFFER_S)
    salts.refresh()
    assert ask(engine, prompt.token_ids, plain).num_cached_tokens == 0
    assert ask(engine, prompt.token_ids, other).num_cached_tokens > 0
    answer = ask(engine, prompt.token_ids, prompt.params(0.0))
    assert answer.accounting is not None
    assert answer.accounting["chunks_hit"] == 0
    for generation in engine.save(PREFIX, chunks, NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved"
