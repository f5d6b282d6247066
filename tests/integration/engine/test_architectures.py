"""Every architecture: ratio 1 is vLLM's own full prefill, and any ratio is what an independent oracle says.

The oracle runs on transformers. In bfloat16 the two already differ by up to 0.29 at a full prefill of
these random models, so the comparison with it runs in float32. The comparison with vLLM itself runs in both:
in float32 logprobs must agree; in bfloat16, as models are served, the answers must.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from kintsugi.core.layout import ELEMENT_BYTES
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.engine.local import Generation, LocalEngine
from kintsugi.fusor.gaps import KEPT_TOKENS
from tests.conftest import Figure, Supports
from tests.fakes.random_models.factory import make_checkpoint_once
from tests.fakes.random_models.shapes import TINY_SHAPES
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
    needs_fp8_kv,
    rag,
    random_tokens,
)
from tests.oracle import Oracle, measured_layers

pytestmark = pytest.mark.engine("{shape}")

FLOAT32_DIFFERENCE_MAX = 1e-3
BFLOAT16_DIFFERENCE_MAX = 0.1
"""Of a logprob. A CPU with AMX rounds a row of bfloat16 by how many rows there are: two full prefills of one
prompt, alone and beside another, differ by up to 0.065 on these random models."""

SIZES = (1, 33, 100, 257, 64)
SPREAD = (1, 2, 3, 15, 16, 17, 31, 32, 63, 65, 127, 129, 500, 511, 999, 1000)
"""Lengths on both sides of every block border, up to the longest."""

ONE_SEED = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3, 4))]
SHAPES = sorted(TINY_SHAPES)

REPRESENTATIVE = ("tiny-llama", "tiny-gemma3")
"""One cache group, and several with windows: the others only under `full` where an engine is its price."""


def mostly_full(*exceptions: str) -> list[object]:
    return [shape if shape in exceptions else pytest.param(shape, marks=pytest.mark.full) for shape in SHAPES]


def sizes_of(seed: int) -> tuple[int, ...]:
    """Chunk lengths of a prompt: odd ones first, then random ones."""
    if seed == 0:
        return SIZES
    generator = random.Random(seed)
    return tuple(generator.randint(1, generator.choice((10, 100, 1000))) for _ in range(5))


def assert_exact(
    engine: LocalEngine, prompt: Rag, params: KintsugiParams, difference_max: float = 0.01
) -> float:
    """A blend of `prompt` answers 32 tokens as full prefill does; the largest difference of a logprob."""
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, params, max_tokens=32)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.accounting["bytes_loaded"] > 0
    assert blended.token_ids == full.token_ids
    difference = max_dlogprob(full, blended)
    assert difference <= difference_max
    return difference


def saved(engine: LocalEngine, seed: int, sizes: tuple[int, ...] | None = None) -> Rag:
    """A prompt of chunks that the store holds."""
    chunks = chunks_of(*(sizes or sizes_of(seed)), seed=20 + seed)
    for generation in engine.save(PREFIX, chunks, NAMESPACE):
        assert generation.accounting is not None
        assert generation.accounting["outcome"] == "saved", generation.accounting
    return rag(*chunks)


def stored_bytes(shape: str, num_tokens: int) -> int:
    """Bytes that a blend of this many stored tokens loads: K and V of every layer."""
    dims = TINY_SHAPES[shape]
    return num_tokens * dims.layers * 2 * dims.kv_heads * dims.head_dim * ELEMENT_BYTES[engine_dtype()]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, shape: str) -> LocalEngine:
    """In the dtype of `engine_dtype`, to compare with vLLM itself."""
    return engine_slot.get(shape)


@pytest.fixture(scope="module")
def float32_engine(engine_slot: EngineSlot, shape: str) -> LocalEngine:
    """To compare with the oracle; replaces `engine`, so its tests come last."""
    return engine_slot.get(shape, dtype="float32")


@pytest.mark.parametrize("seed", ONE_SEED)
def test_full_ratio_is_full_prefill(
    engine: LocalEngine, shape: str, seed: int, supports: Supports, figure: Figure
) -> None:
    prompt = saved(engine, seed)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32)
    assert blended.accounting is not None
    assert blended.accounting["outcome"] == "blended", blended.accounting
    assert blended.accounting["bytes_loaded"] == stored_bytes(shape, sum(sizes_of(seed)))
    assert blended.token_ids == full.token_ids
    difference = max_dlogprob(full, blended)
    figure("r1_max_abs_dlogprob", shape, difference)
    assert difference <= (0.01 if seed == 0 else BFLOAT16_DIFFERENCE_MAX)
    supports(shape, "blending", "exact")
    if TINY_SHAPES[shape].sliding_window:
        supports(shape, "sliding window", "exact")
    if TINY_SHAPES[shape].experts:
        supports(shape, "MoE", "exact")


def test_one_chunk_behind_its_own_prefix_needs_no_recomputing(
    engine: LocalEngine, shape: str, figure: Figure
) -> None:
    prompt = saved(engine, 0, (301,))
    figure("r0_own_prefix_max_abs_dlogprob", shape, assert_exact(engine, prompt, prompt.params(0.0)))


def test_exact_prefixes_are_found_and_never_poisoned(
    engine: LocalEngine, shape: str, supports: Supports
) -> None:
    first, second = saved(engine, 0, (301, 77)).pieces
    prompt = Rag([first, second])
    full = ask_cold(engine, prompt.token_ids)
    engine.reset_prefix_cache()
    nothing_to_blend = KintsugiParams(NAMESPACE, spans=())
    ask(engine, [*PREFIX, *first[1], 11, 12], nothing_to_blend)
    blended = ask(engine, prompt.token_ids, prompt.params(1.0))
    assert blended.accounting is not None
    # Layers with a window would have let go of what the blend's first tokens see.
    assert blended.accounting["tokens_prefix_cached"] == (0 if TINY_SHAPES[shape].sliding_window else 288)
    assert max_dlogprob(full, blended) <= 0.01
    ask_cold(engine, prompt.token_ids, prompt.params(0.0))
    plain = ask(engine, prompt.token_ids, nothing_to_blend)
    assert plain.token_ids == full.token_ids
    assert max_dlogprob(full, plain) <= 0.01
    supports(shape, "prefix caching", "exact")


QUERY_LAYERS = {4: (1, 2), 6: (2, 3, 4)}
"""The fusor's choice by the number of layers."""

SELECTIONS = [
    (SelectorName.HKVD, 0.0),
    (SelectorName.HKVD, 0.15),
    (SelectorName.HKVD, 0.5),
    (SelectorName.HKVD_GRADUAL, 0.15),
    (SelectorName.HKVD_GRADUAL, 0.5),
    (SelectorName.CHUNK_HEAD, 0.15),
    (SelectorName.QUERY, 0.15),
    (SelectorName.HYBRID, 0.15),
    (SelectorName.HYBRID, 0.5),
    (SelectorName.RANDOM, 0.15),
    (SelectorName.RANDOM, 0.5),
]


def worst_against(
    oracle: Oracle, prompt: Rag, selector: SelectorName, ratio: float, got: Generation
) -> float:
    """Largest difference of the first token's reported logprobs, given the positions that vLLM selected."""
    assert got.accounting is not None
    assert got.accounting["outcome"] == "blended", got.accounting
    active = {int(layer): p for layer, p in got.accounting["recomputed_positions"].items()}
    measured = measured_layers(selector.value, 1, ratio, oracle.num_layers)
    hits = [(span.start, span.end) for span in prompt.spans]
    expected = oracle.blended(prompt.token_ids, PREFIX, hits, active, measured).logprobs[0]
    return max(abs(float(expected[token]) - logprob) for token, logprob in got.top_logprobs[0].items())


@pytest.fixture(scope="module")
def oracle(shape: str) -> Oracle:
    return Oracle(make_checkpoint_once(shape))


@pytest.mark.engine("{shape} float32")
@pytest.mark.parametrize("seed", ONE_SEED)
def test_any_ratio_is_what_the_oracle_says(
    float32_engine: LocalEngine, oracle: Oracle, shape: str, seed: int, figure: Figure
) -> None:
    prompt = saved(float32_engine, seed)
    full = oracle.full(prompt.token_ids).logprobs[0]
    apart = 0.0
    for selector, ratio in SELECTIONS:
        params = prompt.params(ratio, selector, explain=True)
        got = ask_cold(float32_engine, prompt.token_ids, params, max_tokens=1)
        worst = worst_against(oracle, prompt, selector, ratio, got)
        figure("oracle_max_abs_dlogprob", shape, worst)
        assert worst <= FLOAT32_DIFFERENCE_MAX, (selector, ratio)
        apart = max(apart, *(abs(float(full[t]) - lp) for t, lp in got.top_logprobs[0].items()))
    assert apart > (0.1 if seed == 0 else 10 * FLOAT32_DIFFERENCE_MAX), (
        "else this would compare full prefill with itself"
    )


@pytest.mark.engine("{shape} float32")
@pytest.mark.parametrize("seed", ONE_SEED)
def test_full_ratio_is_full_prefill_in_float32(
    float32_engine: LocalEngine, shape: str, seed: int, figure: Figure
) -> None:
    prompt = saved(float32_engine, seed)
    difference = assert_exact(float32_engine, prompt, prompt.params(1.0), FLOAT32_DIFFERENCE_MAX)
    figure("r1_max_abs_dlogprob_float32", shape, difference)


@pytest.mark.engine("{shape} float32")
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("seed", ONE_SEED)
def test_a_question_that_passes_without_missed_chunks_attends_to_what_the_oracle_says(
    float32_engine: LocalEngine, oracle: Oracle, shape: str, seed: int, is_cached: bool
) -> None:
    """One is missed before the first hit that is approximate, one between two, and one behind the last. The
    text before them may be in vLLM's prefix cache."""
    prompt = saved(float32_engine, seed)
    missed = [("chunk", random_tokens(size, 95 + size)) for size in (99, 205, 130)]
    first, *others = prompt.pieces
    text = ("gap", random_tokens(99, 96))
    counts_distances = bool(TINY_SHAPES[shape].sliding_window)
    last = [] if counts_distances else [missed[2]]  # a window would not reach beyond it
    pieces = [first, text, missed[0], others[0], missed[1], *others[1:], *last]
    prompt = dataclasses.replace(prompt, pieces=pieces)
    spans = [range(span.start, span.end) for span in prompt.spans]
    chunks = [piece for piece in pieces if piece is not text]
    unstored = [span for span, piece in zip(spans, chunks, strict=True) if piece in missed]
    hits = [(span.start, span.stop) for span in spans if span not in unstored]
    # Where layers count distances, nothing is left out.
    left_out = [] if counts_distances else [range(one.start + KEPT_TOKENS, one.stop) for one in unstored]
    layers = QUERY_LAYERS[oracle.num_layers]
    question, exact_end = spans[-1].stop, unstored[0].start
    attended = oracle.attended(prompt.token_ids, PREFIX, hits, layers, left_out, question, exact_end)
    candidates = {p for first, end in hits[1:] for p in range(first, end)}
    attended[: hits[1][0]] = 0  # exact as loaded: no candidates
    float32_engine.reset_prefix_cache()
    if is_cached:
        ask(float32_engine, prompt.token_ids[: unstored[0].start], KintsugiParams(NAMESPACE, spans=()))
    params = prompt.params(0.3, SelectorName.QUERY, explain=True)
    accounting = ask(float32_engine, prompt.token_ids, params, max_tokens=1).accounting
    assert accounting is not None
    assert accounting["outcome"] == "blended", accounting
    cached = accounting["tokens_prefix_cached"]
    assert (cached > 0) == (is_cached and not counts_distances)
    chosen = candidates & {*next(iter(accounting["recomputed_positions"].values()))}
    best = set(attended.topk(len(chosen)).indices.tolist())
    assert len(chosen & best) >= 0.95 * len(best)


@pytest.mark.engine("{shape} float32")
@pytest.mark.parametrize("behind_last_block", [False, True])
def test_the_question_attends_to_what_the_oracle_says(
    float32_engine: LocalEngine, oracle: Oracle, behind_last_block: bool
) -> None:
    prompt = saved(float32_engine, 0)
    if behind_last_block:
        # The prompt's last token, which asks as well, has no cache block while the blend runs.
        length = -(-len(prompt.token_ids) // 32) * 32 + 1
        prompt.question += random_tokens(length - len(prompt.token_ids), 98)
    hits = [(span.start, span.end) for span in prompt.spans]
    candidates = {p for first, end in hits[1:] for p in range(first, end)}
    attended = oracle.attended(prompt.token_ids, PREFIX, hits, QUERY_LAYERS[oracle.num_layers])
    attended[: hits[0][1]] = 0  # exact as loaded: no candidates
    for ratio in (0.05, 0.3):
        params = prompt.params(ratio, SelectorName.QUERY, explain=True)
        accounting = ask_cold(float32_engine, prompt.token_ids, params, max_tokens=1).accounting
        assert accounting is not None
        chosen = candidates & {*next(iter(accounting["recomputed_positions"].values()))}
        best = set(attended.topk(len(chosen)).indices.tolist())
        assert len(chosen) == accounting["tokens_recomputed"] == round(ratio * len(candidates))
        # Tokens that are attended to alike may change places.
        assert len(chosen & best) >= 0.95 * len(best)


@pytest.mark.engine("tiny-qwen3 float32")
def test_lengths_from_1_to_1000(engine_slot: EngineSlot, figure: Figure) -> None:
    """float32: 3,529 tokens are several steps, cut elsewhere by a prefill than by a blend."""
    engine = engine_slot.get("tiny-qwen3", dtype="float32")
    prompt = saved(engine, 0, SPREAD)
    figure("r1_max_abs_dlogprob", "tiny-qwen3", assert_exact(engine, prompt, prompt.params(1.0)))
    for size in SPREAD:
        alone = saved(engine, 1, (size,))
        figure("r1_max_abs_dlogprob", "tiny-qwen3", assert_exact(engine, alone, alone.params(0.0)))


@needs_fp8_kv
@pytest.mark.engine("{shape} fp8")
@pytest.mark.parametrize("shape", mostly_full(*REPRESENTATIVE))
def test_an_fp8_kv_cache(engine_slot: EngineSlot, shape: str, supports: Supports, figure: Figure) -> None:
    # A store of its own: chunks that were prefilled over a bfloat16 cache are as good, but not the same.
    engine = engine_slot.get(shape, {"store": f"ram://{shape}-fp8"}, kv_cache_dtype="fp8")
    prompt, bound = saved(engine, 0), 0.01 if shape in REPRESENTATIVE else BFLOAT16_DIFFERENCE_MAX
    figure("r1_max_abs_dlogprob", shape, assert_exact(engine, prompt, prompt.params(1.0), bound))
    alone = saved(engine, 0, (301,))
    assert_exact(engine, alone, alone.params(0.0), bound)
    supports(shape, "fp8 KV", "exact")


@pytest.mark.engine("{shape} chunked")
@pytest.mark.parametrize("shape", mostly_full(*REPRESENTATIVE))
def test_chunked_prefill(engine_slot: EngineSlot, shape: str, supports: Supports, figure: Figure) -> None:
    """Blend passes are cut into units of the same 64 tokens."""
    engine = engine_slot.get(shape, max_num_batched_tokens=64, max_num_seqs=8)
    prompt = saved(engine, 0)
    figure("r1_max_abs_dlogprob", shape, assert_exact(engine, prompt, prompt.params(1.0)))
    supports(shape, "chunked prefill", "exact")


@pytest.mark.full
@pytest.mark.engine("{shape} compiled")
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_compile(engine_slot: EngineSlot, shape: str, supports: Supports, figure: Figure) -> None:
    """Our layer calls are eager, vLLM's forward is compiled: it rounds bfloat16 in other places, which moves
    these models' logprobs by up to 0.06. So in float32."""
    engine = engine_slot.get(shape, enforce_eager=False, dtype="float32")
    prompt = saved(engine, 0)
    figure("r1_max_abs_dlogprob", shape, assert_exact(engine, prompt, prompt.params(1.0)))
    supports(shape, "torch.compile", "exact")


SYSTEM = (*PREFIX, *random_tokens(290, 31))
"""Longer than the windows of the shapes that have one."""


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-mistral-window"])
def system_engine(engine_slot: EngineSlot, request: pytest.FixtureRequest) -> LocalEngine:
    """Chunks prefilled behind a system prompt, and only used there."""
    engine = engine_slot.get(request.param, {"prefix_token_ids": list(SYSTEM), "portable": False})
    ask(engine, [*SYSTEM, 11, 12], KintsugiParams(NAMESPACE, spans=()))  # saved behind a cached prefix
    engine.save(SYSTEM, chunks_of(*SIZES, seed=6), NAMESPACE)
    return engine


@pytest.mark.engine("{system_engine} system")
def test_full_ratio_behind_a_system_prompt(system_engine: LocalEngine) -> None:
    prompt = dataclasses.replace(rag(*chunks_of(*SIZES, seed=6)), prefix=SYSTEM)
    assert_exact(system_engine, prompt, prompt.params(1.0))


@pytest.mark.engine("{system_engine} system")
def test_a_chunk_directly_behind_the_system_prompt_is_exact(system_engine: LocalEngine) -> None:
    prompt = dataclasses.replace(rag(chunks_of(*SIZES, seed=6)[3]), prefix=SYSTEM)
    assert_exact(system_engine, prompt, prompt.params(0.0))


@pytest.mark.engine("{system_engine} system")
def test_another_prefix_is_foreign(system_engine: LocalEngine) -> None:
    prompt = rag(*chunks_of(*SIZES, seed=6))
    declined = ask_cold(system_engine, prompt.token_ids, prompt.params(0.2))
    assert declined.accounting is not None
    assert declined.accounting["outcome"] == "declined"
    assert declined.accounting["reason"].startswith("foreign_prefix")
    assert declined.token_ids == ask_cold(system_engine, prompt.token_ids).token_ids
