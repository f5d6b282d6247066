"""Prepared chunks in a real engine: exact in first place, as if behind the context everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kintsugi.core.exchange import LayerFrame
from kintsugi.core.layout import ChunkManifest, HeadRange
from kintsugi.core.report import Binding
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.fusor.codecs import decode_frame
from tests.fakes.random_models.factory import make_checkpoint_once
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
    save_discovered,
    when_discovering,
)
from tests.oracle import Oracle

pytestmark = pytest.mark.engine("tiny-llama prepared")

STORE = "prepared"
CONTEXT = random_tokens(150, seed=5)
CHUNKS = chunks_of(96, 64, 40, seed=7)
BLOCK = 32


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    config: dict[str, Any] = {"store": f"ram://{STORE}", "context_token_ids": CONTEXT}
    return engine_slot.get("tiny-llama", config, dtype="float32")


@pytest.fixture(scope="module")
def saved(engine: LocalEngine) -> list[Generation]:
    saved = engine.save(PREFIX, CHUNKS, NAMESPACE)
    assert all(one.is_saved for one in saved)
    return saved


@pytest.fixture
def space(engine: LocalEngine, saved: list[Generation]) -> ChunkSpace:
    return ChunkSpace(engine.binding.model, NAMESPACE, tuple(PREFIX), context_token_ids=tuple(CONTEXT))


def accounting_of(generation: Generation) -> dict[str, Any]:
    assert generation.accounting is not None
    assert generation.accounting["outcome"] == "blended", generation.accounting
    return generation.accounting


def test_the_context_is_computed_once_for_all_chunks(engine: LocalEngine, saved: list[Generation]) -> None:
    lead = len(PREFIX) + len(CONTEXT)
    computed = [
        one.accounting["token_layers_computed"] / engine.num_layers for one in saved if one.accounting
    ]
    alone = [lead + len(chunk) for chunk in CHUNKS]
    shared = [lead % BLOCK + len(chunk) for chunk in CHUNKS]
    assert sorted(tokens == most for tokens, most in zip(computed, alone, strict=True)) == [
        False,
        False,
        True,
    ]
    assert all(tokens in pair for tokens, *pair in zip(computed, alone, shared, strict=True))


def test_a_prepared_chunk_is_what_follows_prefix_and_context(space: ChunkSpace) -> None:
    oracle = Oracle(make_checkpoint_once("tiny-llama"))
    store = ram_store(STORE)
    for copy, before in ((space, [*PREFIX, *CONTEXT]), (space.plain, PREFIX)):
        expected = oracle.cached(before, CHUNKS[1])
        key = ChunkKey.of(copy, CHUNKS[1])
        (manifest,) = store.lookup(NAMESPACE, [key])
        assert manifest is not None
        heads = HeadRange(0, manifest.layout.num_kv_heads)
        frames = store.stream(NAMESPACE, [key], range(manifest.layout.num_layers), heads, 10.0)
        for frame, k, v in zip(frames, expected.keys_before_rope, expected.values, strict=True):
            assert isinstance(frame, LayerFrame)
            keys, values = decode_frame(frame.data, manifest.layout, manifest.codec, len(CHUNKS[1]))
            torch.testing.assert_close(keys, k, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, v, atol=1e-4, rtol=1e-4)


def test_a_report_about_this_engine_is_bound_to_the_context(engine: LocalEngine) -> None:
    mine = engine.binding
    bound = Binding.of(mine.model, PREFIX, mine.codec, CONTEXT)
    assert mine == bound != Binding.of(mine.model, PREFIX, mine.codec)


def test_full_ratio_is_full_prefill(engine: LocalEngine, space: ChunkSpace) -> None:
    prompt = rag(*CHUNKS)
    full = ask_cold(engine, prompt.token_ids)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert accounting_of(blended)["chunks_hit"] == len(CHUNKS)
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 1e-3


def test_the_only_chunk_is_exact_without_recomputing(engine: LocalEngine, space: ChunkSpace) -> None:
    prompt = rag(CHUNKS[0])
    full = ask_cold(engine, prompt.token_ids)
    reused = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert accounting_of(reused)["tokens_recomputed"] == 0
    assert accounting_of(reused)["tokens_hit"] == len(CHUNKS[0])
    assert max_dlogprob(full, reused) <= 1e-3


def test_a_prepared_chunk_in_first_place_would_not_be_exact(engine: LocalEngine, space: ChunkSpace) -> None:
    """Else the test above could not fail: behind other text, the only chunk is the prepared one."""
    prompt = rag(CHUNKS[0])
    prompt.prefix = (*PREFIX, 5, 6, 7)
    full = ask_cold(engine, prompt.token_ids)
    assert max_dlogprob(full, ask_cold(engine, prompt.token_ids, prompt.params(0.0))) > 0.01


def test_a_later_turn_finds_the_blend_and_a_plain_prompt_finds_what_is_exact(
    engine: LocalEngine, space: ChunkSpace
) -> None:
    prompt = rag(*CHUNKS)
    first = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    again = ask(engine, prompt.token_ids, prompt.params(0.0))
    assert accounting_of(again)["tokens_prefix_cached"] == len(prompt.token_ids) // BLOCK * BLOCK
    assert again.token_ids == first.token_ids
    (plain,) = engine.generate(
        [Prompt(prompt.token_ids, max_tokens=8, cache_salt=NAMESPACE, ignore_eos=True)]
    )
    assert plain.num_cached_tokens == (len(PREFIX) + len(CHUNKS[0])) // BLOCK * BLOCK
    assert plain.token_ids == ask_cold(engine, prompt.token_ids).token_ids


@pytest.mark.parametrize("names", ["keys", "content"])
def test_chunks_are_found_by_their_prepared_keys_and_by_content(
    engine: LocalEngine, space: ChunkSpace, names: str
) -> None:
    prompt = rag(*CHUNKS)
    keyed = tuple(
        Span(span.start, span.end, ChunkKey.of(space, chunk))
        for span, chunk in zip(prompt.spans, CHUNKS, strict=True)
    )
    params = KintsugiParams(NAMESPACE, spans=keyed if names == "keys" else None, ratio=0.0)
    by_span = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    found = ask_cold(engine, prompt.token_ids, params)
    assert accounting_of(found)["chunks_hit"] == len(CHUNKS)
    assert max_dlogprob(by_span, found) <= 1e-3


def test_a_missing_plain_copy_is_computed(engine: LocalEngine, space: ChunkSpace) -> None:
    prompt = rag(*CHUNKS)
    whole = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    ram_store(STORE).delete(NAMESPACE, [ChunkKey.of(space.plain, CHUNKS[0])])
    try:
        without = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    finally:
        assert engine.save(PREFIX, CHUNKS[:1], NAMESPACE)[0].is_saved
    accounting = accounting_of(without)
    assert (accounting["chunks_hit"], accounting["chunks_missed"]) == (2, 1)
    assert accounting["tokens_missed"] == len(CHUNKS[0])
    assert max_dlogprob(whole, without) <= 1e-3, "the first chunk is exact, loaded or computed"


def test_segments_that_are_saved_together_are_what_each_is_alone(engine: LocalEngine) -> None:
    """They share the blocks of the context, and nothing else."""
    when_discovering(engine)
    (line_break,) = engine.tokenizer("\n", add_special_tokens=False).input_ids
    passages = [[*random_tokens(200 + seed, seed), line_break, line_break] for seed in range(70, 73)]
    for end in range(2):
        prompt = [*PREFIX, *(token for one in passages for token in one), *random_tokens(20, end)]
        ask_cold(engine, prompt, KintsugiParams("together", discover=True))
    save_discovered(engine)
    assert all(one.is_saved for one in engine.save(PREFIX, passages, "alone"))
    together, alone = (
        {(one.num_tokens, _is_plain(engine, one)): one for one in ram_store(STORE).list(namespace)}
        for namespace in ("together", "alone")
    )
    assert len(together) == 2 * len(passages)
    assert together.keys() == alone.keys()
    for key, one in together.items():
        assert one.digests == alone[key].digests, key


def _is_plain(engine: LocalEngine, manifest: ChunkManifest) -> bool:
    space = ChunkSpace(engine.binding.model, manifest.namespace, tuple(PREFIX))
    return manifest.space_digest == space.digest


def test_without_plain_copies_one_copy_is_stored(engine_slot: EngineSlot) -> None:
    config = {"store": "ram://unplain", "context_token_ids": CONTEXT, "plain_copies": False}
    engine = engine_slot.get("tiny-llama", config, dtype="float32")
    assert all(one.is_saved for one in engine.save(PREFIX, CHUNKS, NAMESPACE))
    assert ram_store("unplain").stats().chunks == len(CHUNKS)
    prompt = rag(*CHUNKS)
    accounting = accounting_of(ask_cold(engine, prompt.token_ids, prompt.params(0.0)))
    assert (accounting["chunks_hit"], accounting["chunks_missed"]) == (2, 1)
