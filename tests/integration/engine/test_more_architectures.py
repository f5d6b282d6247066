"""Families that differ from Llama in one way each: ratio 1 is vLLM's own full prefill, and any ratio is what
an independent oracle says. float32, where both must agree; bfloat16 under `full`, where answers must."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import LocalEngine
from kintsugi.fusor.gaps import KEPT_TOKENS
from tests.conftest import Figure, Supports
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    Rag,
    ask,
    ask_cold,
    folder_of,
    max_dlogprob,
    random_tokens,
    saved,
)
from tests.model_configs import FAMILIES, WINDOW, config_of
from tests.oracle import Oracle, measured_layers

pytestmark = pytest.mark.engine("{family}")

SIZES = (1, 33, 100, 257, 64)
R1_DIFFERENCE_MAX = 1e-4
ORACLE_DIFFERENCE_MAX = 1e-3
BFLOAT16_DIFFERENCE_MAX = 0.1

REPRESENTATIVE = ("gpt-oss", "smollm3", "deepseek-v2")
"""Sinks, windows and experts; vLLM's Transformers backend and layers without a rotation; latents. The others
under `full`: an engine is their price."""
EVERY = [f if f in REPRESENTATIVE else pytest.param(f, marks=pytest.mark.full) for f in sorted(FAMILIES)]

ENGINE_ARGS: dict[str, dict[str, Any]] = {"phi4-mini": {"max_model_len": 2048}}
"""The oracle rotates prompts of this length by the short factors, as vLLM does if none can be longer."""
LATENTS_IN_FLOAT32 = {"attention_config": {"backend": "CPU_MLA"}}
"""With AMX, vLLM takes a backend for latents that knows bfloat16 alone."""
FLOAT32_ARGS = dict.fromkeys(("deepseek-v2", "deepseek-v2-lite", "deepseek-v3"), LATENTS_IN_FLOAT32)
ORACLE_FIELDS: dict[str, dict[str, Any]] = {"cohere2": {"sliding_window": WINDOW + 1}}
"""vLLM lets Cohere 2 see one position more than transformers does."""

ROTATED_IN_FUNCTIONS = ("smollm3", "olmo2", "olmo3", "starcoder2")
"""vLLM's Transformers backend: no module returns the rotated key."""

WITHOUT_ORACLE = ("falcon-alibi",)
"""transformers computes its attention in a way that the oracle cannot look into."""

SELECTIONS = [
    (SelectorName.HKVD, 0.0),
    (SelectorName.HKVD, 0.15),
    (SelectorName.HKVD_GRADUAL, 0.3),
    (SelectorName.QUERY, 0.15),
    (SelectorName.HYBRID, 0.3),
    (SelectorName.RANDOM, 0.5),
    (SelectorName.CHUNK_HEAD, 0.15),
]


@pytest.fixture(scope="module", params=EVERY)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(family: str) -> Oracle | None:
    if family in WITHOUT_ORACLE:
        return None
    return Oracle(folder_of(family), **ORACLE_FIELDS.get(family, {}))


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, family: str) -> LocalEngine:
    arguments: dict[str, Any] = {**ENGINE_ARGS.get(family, {}), **FLOAT32_ARGS.get(family, {})}
    return engine_slot.get(family, dtype="float32", **arguments)


def difference_from_full(engine: LocalEngine, prompt: Rag, ratio: float) -> float:
    """Largest difference of a logprob over 32 tokens, which have to be those of full prefill, and to vary."""
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(ratio), max_tokens=32)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.accounting["bytes_loaded"] > 0
    assert blended.token_ids == full.token_ids
    assert len(set(full.token_ids)) >= 4, "a model that repeats itself proves little"
    return max_dlogprob(full, blended)


def test_full_ratio_is_full_prefill(
    engine: LocalEngine, family: str, supports: Supports, figure: Figure
) -> None:
    difference = difference_from_full(engine, saved(engine, *SIZES), 1.0)
    figure("r1_max_abs_dlogprob_float32", family, difference)
    assert difference <= R1_DIFFERENCE_MAX
    supports(family, "blending", "exact")


def test_one_chunk_behind_its_own_prefix_needs_no_recomputing(engine: LocalEngine) -> None:
    assert difference_from_full(engine, saved(engine, 301), 0.0) <= R1_DIFFERENCE_MAX


def test_a_plain_prompt_behind_a_blend_is_answered_as_without(engine: LocalEngine, family: str) -> None:
    prompt = saved(engine, 301)
    full = ask_cold(engine, prompt.token_ids)
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    plain = ask(engine, prompt.token_ids, KintsugiParams(NAMESPACE, spans=()))
    assert plain.token_ids == full.token_ids
    difference = max_dlogprob(full, plain)
    assert difference <= R1_DIFFERENCE_MAX
    if family in ROTATED_IN_FUNCTIONS:
        assert difference == 0, "it found keys whose rotation was taken off and put on again"


def test_any_ratio_is_what_the_oracle_says(
    engine: LocalEngine, oracle: Oracle | None, family: str, figure: Figure
) -> None:
    if oracle is None:
        pytest.skip("no oracle for this family")
    prompt = saved(engine, *SIZES)
    hits = [(span.start, span.end) for span in prompt.spans]
    full = oracle.full(prompt.token_ids).logprobs[0]
    apart = 0.0
    for selector, ratio in SELECTIONS:
        params = prompt.params(ratio, selector, explain=True)
        got = ask_cold(engine, prompt.token_ids, params, max_tokens=1)
        assert got.accounting is not None
        assert got.accounting["outcome"] == "blended", got.accounting
        active = {int(layer): p for layer, p in got.accounting["recomputed_positions"].items()}
        measured = measured_layers(selector.value, 1, ratio, oracle.num_layers)
        expected = oracle.blended(prompt.token_ids, PREFIX, hits, active, measured).logprobs[0]
        reported = got.top_logprobs[0].items()
        worst = max(abs(float(expected[token]) - logprob) for token, logprob in reported)
        figure("oracle_max_abs_dlogprob", family, worst)
        assert worst <= ORACLE_DIFFERENCE_MAX, (selector, ratio)
        apart = max(apart, *(abs(float(full[token]) - logprob) for token, logprob in reported))
    assert apart > 10 * ORACLE_DIFFERENCE_MAX, "else this would compare full prefill with itself"


QUERY_LAYERS = (1, 2)
"""The fusor's choice in four layers."""


def counts_distances(family: str) -> bool:
    """Whether some layer attends by how far a token lies back: windows and ALiBi."""
    config = config_of(family).to_dict()
    return bool(config.get("alibi") or config.get("sliding_window"))


def test_a_missed_chunk_passes_once_unless_layers_count_distances(
    engine: LocalEngine, oracle: Oracle | None, family: str
) -> None:
    sizes = (1, 33, 100)
    prompt = saved(engine, *sizes)
    gap = ("chunk", random_tokens(KEPT_TOKENS + 100, 95))
    missing = dataclasses.replace(prompt, pieces=[*prompt.pieces[:2], gap, *prompt.pieces[2:]])
    asked: list[float] = []
    for one in (prompt, missing):
        params = one.params(0.3, SelectorName.QUERY, explain=True)
        got = ask_cold(engine, one.token_ids, params, max_tokens=1)
        assert got.accounting is not None
        assert got.accounting["outcome"] == "blended", got.accounting
        active = {int(layer): p for layer, p in got.accounting["recomputed_positions"].items()}
        asked.append(got.accounting["token_layers_computed"] - sum(map(len, active.values())))
    others = len(prompt.token_ids) - sum(sizes)
    passing = round(asked[1] / (asked[0] / others))
    assert passing == others + KEPT_TOKENS + (100 if counts_distances(family) else 0)
    if oracle is not None:
        hits = [(span.start, span.end) for index, span in enumerate(missing.spans) if index != 2]
        expected = oracle.blended(missing.token_ids, PREFIX, hits, active).logprobs[0]
        worst = max(abs(float(expected[token]) - logprob) for token, logprob in got.top_logprobs[0].items())
        assert worst <= ORACLE_DIFFERENCE_MAX
        gaps = [range(end + KEPT_TOKENS, start) for (_, end), (start, _) in pairwise(hits)]
        left_out = [gap for gap in gaps if gap and not counts_distances(family)]
        attended = oracle.attended(missing.token_ids, PREFIX, hits, QUERY_LAYERS, left_out)
        attended[: hits[0][1]] = 0  # exact as loaded: no candidates
        chosen = set(active[0]) & {p for first, end in hits for p in range(first, end)}
        best = set(attended.topk(len(chosen)).indices.tolist())
        assert len(chosen & best) >= 0.95 * len(best)


@pytest.mark.full
@pytest.mark.engine("{family} bfloat16")
def test_full_ratio_is_full_prefill_in_bfloat16(engine_slot: EngineSlot, family: str, figure: Figure) -> None:
    if family in FLOAT32_ARGS:
        pytest.skip(
            "vLLM's own answer to this prompt is another one behind a cached prefix; see test_latents"
        )
    engine = engine_slot.get(family, **ENGINE_ARGS.get(family, {}))
    difference = difference_from_full(engine, saved(engine, *SIZES), 1.0)
    figure("r1_max_abs_dlogprob", family, difference)
    assert difference <= BFLOAT16_DIFFERENCE_MAX
