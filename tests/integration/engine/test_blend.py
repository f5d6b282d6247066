"""Blending in a real engine: exact where it must be, whatever the prompt is made of."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from kintsugi.core.layout import ELEMENT_BYTES
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import LocalEngine
from kintsugi.engine.worker.attention import scattered
from kintsugi.fusor.kernels.native import PackedKernel, find_compiler, find_instructions
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask,
    ask_cold,
    chunks_of,
    engine_dtype,
    max_dlogprob,
    rag,
    random_tokens,
)

pytestmark = pytest.mark.engine("tiny-llama")

SIZES = (1, 33, 100, 257, 64)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot) -> LocalEngine:
    engine = engine_slot.get("tiny-llama")
    for generation in engine.save(PREFIX, chunks_of(*SIZES), NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved"
    return engine


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    return chunks_of(*SIZES)


def test_full_ratio_is_full_prefill(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended"
    assert blended.accounting["chunks_hit"] == len(chunks)
    assert blended.accounting["bytes_loaded"] == sum(SIZES) * 4 * 2 * 2 * 32 * ELEMENT_BYTES[engine_dtype()]
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 0.01


def test_one_chunk_behind_its_own_prefix_is_exact_without_recomputing(
    engine: LocalEngine, chunks: list[list[int]]
) -> None:
    prompt = rag(chunks[3])
    full = ask_cold(engine, prompt.token_ids)
    reused = ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert reused.accounting is not None
    assert reused.accounting["tokens_recomputed"] == 0
    assert reused.token_ids == full.token_ids
    assert max_dlogprob(full, reused) <= 0.01


def test_reuse_without_recomputing_is_not_full_prefill(engine: LocalEngine, chunks: list[list[int]]) -> None:
    """Else the tests of this module would compare full prefill with itself."""
    prompt = rag(*chunks)
    full = ask_cold(engine, prompt.token_ids)
    assert max_dlogprob(full, ask_cold(engine, prompt.token_ids, prompt.params(0.0))) > 0.1


PROMPTS = {
    "another order": lambda c: rag(c[4], c[2], c[0], c[3]),
    "repeated": lambda c: rag(c[2], c[4], c[2], c[2]),
    "gaps": lambda c: Rag(
        [("gap", random_tokens(9, 7)), ("chunk", c[2]), ("gap", [5, 6, 7]), ("chunk", c[4])]
    ),
    "missing in the middle": lambda c: rag(c[2], random_tokens(50, 77), c[4]),
    "hits only, no question": lambda c: Rag([("chunk", c[4]), ("chunk", c[3])], question=[]),
    "one token": lambda c: rag(c[0]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_any_arrangement_is_exact_at_full_ratio(
    engine: LocalEngine, chunks: list[list[int]], name: str
) -> None:
    prompt = PROMPTS[name](chunks)
    full = ask_cold(engine, prompt.token_ids)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 0.01


def test_a_missed_chunk_is_counted_and_computed(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = PROMPTS["missing in the middle"](chunks)
    accounting = ask_cold(engine, prompt.token_ids, prompt.params(0.0)).accounting
    assert accounting is not None
    assert (accounting["chunks_hit"], accounting["chunks_missed"]) == (2, 1)
    assert accounting["tokens_missed"] == 50
    assert accounting["token_layers_computed"] == 4 * (len(PREFIX) + 50 + 17 - 1)


@pytest.mark.parametrize("selector", list(SelectorName))
def test_every_selector_recomputes_what_it_says(
    engine: LocalEngine, chunks: list[list[int]], selector: SelectorName
) -> None:
    prompt = rag(*chunks)
    accounting = ask_cold(engine, prompt.token_ids, prompt.params(0.2, selector, explain=True)).accounting
    assert accounting is not None
    positions = {int(layer): set(p) for layer, p in accounting["recomputed_positions"].items()}
    for layer in range(1, 4):
        assert positions[layer] <= positions[layer - 1]
    outside = {*range(len(PREFIX)), *range(len(PREFIX) + sum(SIZES), len(prompt.token_ids) - 1)}
    assert outside <= positions[3]
    assert len(positions[3] - outside) == accounting["tokens_recomputed"]
    assert len(PREFIX) not in positions[0], "the first chunk, of one token, is exact as loaded"
    assert len(accounting["timeline"]) == 4


@pytest.mark.parametrize("selector", [SelectorName.QUERY, SelectorName.HYBRID, SelectorName.HKVD])
def test_kv_chosen_for_one_question_is_not_used_for_another(
    engine: LocalEngine, chunks: list[list[int]], selector: SelectorName
) -> None:
    one, other = rag(*chunks), rag(*chunks)
    other.question = random_tokens(21, 55)
    alone = ask_cold(engine, other.token_ids, other.params(0.1, selector))
    ask_cold(engine, one.token_ids, one.params(0.1, selector))
    behind = ask(engine, other.token_ids, other.params(0.1, selector))
    again = ask(engine, other.token_ids, other.params(0.1, selector))
    assert behind.accounting is not None
    assert again.accounting is not None
    depends = selector is not SelectorName.HKVD
    assert behind.accounting["tokens_prefix_cached"] == (0 if depends else 448)
    assert again.accounting["tokens_prefix_cached"] == 448
    if depends:
        assert behind.token_ids == alone.token_ids


def test_chunks_are_found_by_content(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = Rag([("gap", random_tokens(40, 5)), ("chunk", chunks[3]), ("gap", [9]), ("chunk", chunks[2])])
    explicit = ask_cold(engine, prompt.token_ids, prompt.params(0.5))
    matched = ask_cold(engine, prompt.token_ids, KintsugiParams(NAMESPACE, ratio=0.5))
    assert explicit.accounting is not None
    assert matched.accounting is not None
    assert matched.accounting["tokens_hit"] == explicit.accounting["tokens_hit"] == 357
    assert max_dlogprob(explicit, matched) == 0.0


@pytest.mark.parametrize("selector", [SelectorName.CHUNK_HEAD, SelectorName.RANDOM])
def test_a_chunk_behind_its_prefix_is_never_recomputed(
    engine: LocalEngine, chunks: list[list[int]], selector: SelectorName
) -> None:
    """Whether the prefix cache holds it or the store: the same tokens of the other chunks are chosen."""
    prompt = rag(chunks[3], chunks[2], chunks[4])
    first = {*range(len(PREFIX), len(PREFIX) + len(chunks[3]))}
    cold = ask_cold(engine, prompt.token_ids, prompt.params(0.3, selector, explain=True)).accounting
    assert cold is not None
    assert cold["tokens_hit"] == sum(map(len, (chunks[3], chunks[2], chunks[4])))
    assert cold["tokens_recomputed"] == round(0.3 * (len(chunks[2]) + len(chunks[4])))
    for positions in cold["recomputed_positions"].values():
        assert not first & set(positions)
    engine.reset_prefix_cache()
    ask(engine, [*PREFIX, *chunks[3], 11, 12], KintsugiParams(NAMESPACE, spans=()))
    warm = ask(engine, prompt.token_ids, prompt.params(0.3, selector, explain=True)).accounting
    assert warm is not None
    assert warm["tokens_prefix_cached"] == 256
    behind = {p for p in cold["recomputed_positions"][3] if p >= 256}
    assert set(warm["recomputed_positions"][3]) == behind


def test_an_exact_prefix_hit_comes_first(engine: LocalEngine, chunks: list[list[int]]) -> None:
    prompt = rag(chunks[3], chunks[2])
    engine.reset_prefix_cache()
    # The prefix and the first chunk as an ordinary prompt of the same tenant.
    warm = [*PREFIX, *chunks[3], 11, 12]
    ask(engine, warm, KintsugiParams(NAMESPACE, spans=()))
    blended = ask(engine, prompt.token_ids, prompt.params(1.0))
    assert blended.accounting is not None
    assert blended.accounting["tokens_prefix_cached"] == 256
    full = ask_cold(engine, prompt.token_ids)
    assert blended.token_ids == full.token_ids
    assert max_dlogprob(full, blended) <= 0.01


def test_several_blends_and_plain_requests_share_steps(engine: LocalEngine, chunks: list[list[int]]) -> None:
    from kintsugi.engine.local import Prompt

    one, other = rag(chunks[3], chunks[2]), rag(chunks[4], chunks[3])
    asked = [
        Prompt(one.token_ids, one.params(0.3), 8, top_logprobs=5, ignore_eos=True),
        Prompt(random_tokens(200, 3), None, 8, top_logprobs=5, ignore_eos=True),
        Prompt(other.token_ids, other.params(0.0), 8, top_logprobs=5, ignore_eos=True),
        Prompt(one.token_ids, one.params(1.0), 8, top_logprobs=5, ignore_eos=True),
    ]
    alone = [ask_cold(engine, prompt.token_ids, prompt.params) for prompt in asked]
    engine.reset_prefix_cache()
    together = engine.generate(asked)
    for single, shared in zip(alone, together, strict=True):
        assert shared.token_ids == single.token_ids
        assert max_dlogprob(single, shared) <= 0.05  # other batch shapes round differently


def test_measuring_the_deviation_is_counted(engine: LocalEngine, chunks: list[list[int]]) -> None:
    """tiny-llama: hidden 128, 4 and 2 heads of 32, MLP 256; 4 layers, of which the first at full width."""
    prompt = rag(*chunks)
    accounting = ask_cold(engine, prompt.token_ids, prompt.params(0.2)).accounting
    assert accounting is not None
    hit, region = sum(SIZES), len(prompt.token_ids) - 1
    exact = SIZES[0]  # The first chunk stands where it was prefilled: never computed.
    chosen = round(0.2 * (hit - exact))
    fused, output, mlp = 128 * (128 + 2 * 64), 128 * 128, 3 * 128 * 256
    layers = region - exact + 3 * (region - hit + chosen)
    measured = (region - exact) * fused / (fused + output + mlp)
    assert accounting["token_layers_computed"] == pytest.approx(layers + measured, abs=0.1)
    assert accounting["token_layers_total"] == 4 * region


@pytest.mark.skipif(
    not find_instructions() or find_compiler() is None, reason="no AVX-512 or no C++ compiler here"
)
def test_scattered_tokens_attend_as_through_the_backends_own_kernel(
    engine: LocalEngine, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[int] = []
    attend = PackedKernel.attend

    def counted(kernel: PackedKernel, query: Tensor, *rest: Any) -> None:
        served.append(len(query))
        attend(kernel, query, *rest)

    monkeypatch.setattr(PackedKernel, "attend", counted)
    prompt = rag(*chunks)
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    assert not served, "prefix and question are two runs"
    params = prompt.params(0.3, SelectorName.RANDOM)
    ours = ask_cold(engine, prompt.token_ids, params)
    assert len(served) == 4, "every layer"
    monkeypatch.setattr(scattered, "RUNS_MIN_PACKED", len(prompt.token_ids))
    theirs = ask_cold(engine, prompt.token_ids, params)
    assert len(served) == 4
    assert max_dlogprob(ours, theirs) <= 0.1, "more than bfloat16 explains"
