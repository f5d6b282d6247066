"""Models that mix tokens by short convolutions, Gated DeltaNet or Mamba-2 in most layers.

In float32 where vLLM's operations compute it, against vLLM itself and an independent oracle. Its Gated
DeltaNet on a CPU computes bfloat16 alone: there answers are compared, up to a tie of the two best tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout, LayerGroup, Part
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.local import Generation, LocalEngine, Prompt
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import ChunkLost, LayerFrame
from tests.conftest import Figure, Supports
from tests.integration.engine.conftest import (
    NAMESPACE,
    PREFIX,
    EngineSlot,
    ask,
    ask_cold,
    chunks_of,
    engine_dtype,
    folder_of,
    max_dlogprob,
    rag,
    ram_store,
    random_tokens,
    require_blended,
    saved,
)
from tests.oracle import Oracle, measured_layers

pytestmark = pytest.mark.engine("{hybrid}")

SIZES = (1, 33, 100, 257, 64)
EXACT_MAX = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest difference of a logprob from vLLM's own prefill."""
ORACLE_MAX = {"float32": 1e-3, "bfloat16": 0.3}
"""The same from the oracle, which computes in float32."""

NATIVE_ROTATION = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""vLLM's rotation kernel on a CPU takes LFM2's queries and keys `[tokens, heads, width]` for ones without
heads, and so rotates other elements."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "lfm2": {"dtype": "float32", **NATIVE_ROTATION},
    "granite-4": {"dtype": "float32"},
    "qwen3.5": {"dtype": "bfloat16"},
    "qwen3-next": {"dtype": "bfloat16"},
}
MAMBA2 = ("granite-4",)
needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="vLLM's module of Qwen3.5 imports torchvision"
)
MARKS = {"qwen3.5": [pytest.mark.full, needs_torchvision], "qwen3-next": [pytest.mark.full]}
EVERY = [pytest.param(one, marks=MARKS.get(one, [])) for one in ARGUMENTS]

SELECTIONS = [
    (SelectorName.HKVD, 0.0),
    (SelectorName.HKVD, 0.15),
    (SelectorName.HKVD, 0.5),
    (SelectorName.HKVD_GRADUAL, 0.3),
    (SelectorName.QUERY, 0.15),
    (SelectorName.HYBRID, 0.3),
    (SelectorName.RANDOM, 0.5),
]


@pytest.fixture(scope="module", params=EVERY)
def hybrid(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(engine_slot: EngineSlot, hybrid: str) -> LocalEngine:
    _forget_ranks(hybrid)
    return engine_slot.get(hybrid, enable_prefix_caching=False, **ARGUMENTS[hybrid])


def _forget_ranks(hybrid: str) -> None:
    """vLLM makes the group of ranks that share experts only with the first model of a process."""
    if hybrid != "qwen3-next":
        return
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="module")
def caching(engine_slot: EngineSlot, hybrid: str) -> LocalEngine:
    """With prefix caching, and shorter steps; replaces `engine`, so its tests come last."""
    if hybrid in MAMBA2:
        pytest.skip("vLLM's Mamba-2 on a CPU fails with prefix caching: its scan returns final states alone")
    return engine_slot.get(
        hybrid,
        enable_prefix_caching=True,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        **ARGUMENTS[hybrid],
    )


def layout_of_model() -> KVLayout:
    """What the engine's worker, in this process, stores of a chunk."""
    layout: KVLayout = get_kv_transfer_group()._worker._model.layout
    return layout


def assert_same(hybrid: str, full: Generation, other: Generation) -> float:
    """Two answers are equal, up to a tie in bfloat16; the largest difference of a logprob."""
    dtype = ARGUMENTS[hybrid]["dtype"]
    if dtype == "bfloat16" and engine_dtype() != dtype:
        pytest.skip("without AVX-512, products of bfloat16 round by the number of rows")
    difference = max_dlogprob(full, other)
    assert difference <= EXACT_MAX[dtype]
    if dtype == "float32":
        assert other.token_ids == full.token_ids
    else:
        assert len(set(full.token_ids[:8]) & set(other.token_ids[:8])) >= 1
    return difference


def test_full_ratio_is_full_prefill(
    engine: LocalEngine, hybrid: str, supports: Supports, figure: Figure
) -> None:
    prompt = saved(engine, *SIZES)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32)
    loaded = sum(layout_of_model().chunk_bytes(Codec.RAW, size) for size in SIZES)
    assert require_blended(blended)["bytes_loaded"] == loaded
    figure("hybrid_r1_max_abs_dlogprob", hybrid, assert_same(hybrid, full, blended))
    assert len(set(full.token_ids)) >= 4, "a model that repeats itself proves little"
    supports(hybrid, "blending", "exact")


def test_one_chunk_behind_its_own_prefix_needs_no_recomputing(engine: LocalEngine, hybrid: str) -> None:
    prompt = saved(engine, 301)
    full = ask_cold(engine, prompt.token_ids, max_tokens=32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.0), max_tokens=32)
    require_blended(blended)
    assert_same(hybrid, full, blended)


def test_any_ratio_is_what_the_oracle_says(engine: LocalEngine, hybrid: str, figure: Figure) -> None:
    oracle, prompt = Oracle(folder_of(hybrid)), saved(engine, *SIZES)
    full, apart = oracle.full(prompt.token_ids).logprobs[0], 0.0
    hits = [(span.start, span.end) for span in prompt.spans]
    bound = ORACLE_MAX[ARGUMENTS[hybrid]["dtype"]]
    for selector, ratio in SELECTIONS:
        got = ask_cold(engine, prompt.token_ids, prompt.params(ratio, selector, explain=True), max_tokens=1)
        positions = require_blended(got)["recomputed_positions"]
        active = {int(layer): chosen for layer, chosen in positions.items()}
        measured = measured_layers(selector.value, 1, ratio, oracle.num_layers)
        expected = oracle.blended(prompt.token_ids, PREFIX, hits, active, measured).logprobs[0]
        reported = got.top_logprobs[0].items()
        worst = max(abs(float(expected[token]) - logprob) for token, logprob in reported)
        figure("hybrid_oracle_max_abs_dlogprob", hybrid, worst)
        assert worst <= bound, (selector, ratio)
        apart = max(apart, *(abs(float(full[token]) - logprob) for token, logprob in reported))
    assert apart > bound, "else this would compare full prefill with itself"


def test_a_second_turn_is_blended_again(engine: LocalEngine, hybrid: str) -> None:
    """Without prefix caching, vLLM keeps no state behind a turn."""
    prompt = saved(engine, *SIZES)
    first = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=16)
    turn = [*prompt.token_ids, *first.token_ids, *random_tokens(40, 3)]
    full = ask_cold(engine, turn)
    blended = ask(engine, turn, prompt.params(1.0))
    require_blended(blended)
    assert_same(hybrid, full, blended)


def test_blends_and_plain_prompts_share_steps(engine: LocalEngine, hybrid: str) -> None:
    prompt = saved(engine, *SIZES)
    others = [[*PREFIX, *prompt.question[::-1]], [*PREFIX, *prompt.token_ids[200:260]]]
    alone = [ask_cold(engine, one) for one in (*others, prompt.token_ids)]
    asked = [
        *(Prompt(one, None, 8, top_logprobs=5, ignore_eos=True) for one in others),
        *(
            Prompt(prompt.token_ids, prompt.params(ratio), 8, top_logprobs=5, ignore_eos=True)
            for ratio in (1.0, 0.15)
        ),
    ]
    *together, partial = engine.generate(asked)
    for mine, its in zip(together, alone, strict=True):
        assert_same(hybrid, its, mine)
    require_blended(together[-1])
    require_blended(partial)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_chunk_lost_in_the_middle_is_computed_instead(
    engine: LocalEngine, hybrid: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of each layer is what it was before the pass when the pass begins again."""
    prompt, stream = saved(engine, *SIZES), RamStore.stream

    def lossy(
        self: RamStore,
        namespace: str,
        keys: Sequence[ChunkKey],
        layers: range,
        heads: HeadRange,
        deadline_s: float,
    ) -> Iterator[LayerFrame | ChunkLost]:
        for frame in stream(self, namespace, keys, layers, heads, deadline_s):
            if len(keys) < len(SIZES) or frame.chunk != 3 or frame.layer < layer:
                yield frame
            elif frame.layer == layer:
                yield ChunkLost(3, layer, "injected")

    full = ask_cold(engine, prompt.token_ids)
    monkeypatch.setattr(RamStore, "stream", lossy)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert require_blended(blended)["restarts"] == 1
    assert_same(hybrid, full, blended)


def test_a_store_that_loses_everything_costs_a_full_prefill(
    engine: LocalEngine, hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = saved(engine, *SIZES)

    def losing(
        self: RamStore, namespace: str, keys: Sequence[ChunkKey], *_: Any
    ) -> Iterator[LayerFrame | ChunkLost]:
        for chunk in range(len(keys)):
            yield ChunkLost(chunk, 0, "injected")

    full = ask_cold(engine, prompt.token_ids)
    monkeypatch.setattr(RamStore, "stream", losing)
    failed = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert failed.accounting is not None
    assert failed.accounting["outcome"] == "failed"
    assert failed.accounting["reason"].startswith("chunk_lost")
    assert_same(hybrid, full, failed)


def test_a_chunk_of_another_width_costs_a_full_prefill(engine: LocalEngine, hybrid: str) -> None:
    chunk, layout = random_tokens(50, 9), layout_of_model()
    first, *others = layout.groups
    narrow = tuple(Part(part.kind, max(1, part.width // 2)) for part in first.parts)
    groups = [LayerGroup(first.layers, first.heads, narrow), *others]
    other = KVLayout.of_groups(groups, layout.dtype)
    space, store = engine.space(NAMESPACE), ram_store(hybrid)
    frames = [bytes(other.frame_bytes(Codec.RAW, len(chunk), layer)) for layer in range(other.num_layers)]
    identity = (space, ChunkKey.of(space, chunk), (), len(chunk))
    store.put(ChunkManifest.of(*identity, other, Codec.RAW, frames), [memoryview(one) for one in frames])
    prompt = rag(random_tokens(40, 8), chunk)
    full = ask_cold(engine, prompt.token_ids)
    failed = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert failed.accounting is not None
    assert failed.accounting["outcome"] == "failed"
    assert failed.accounting["reason"].startswith("chunk_layout: chunk ")
    assert_same(hybrid, full, failed)


@pytest.mark.engine("{hybrid} caching")
def test_plain_prompts_never_find_a_blend_s_state(caching: LocalEngine, hybrid: str) -> None:
    """Blends begin at the first token: vLLM frees a prefix's state when tokens behind it are claimed."""
    prompt, nothing = saved(caching, *SIZES), KintsugiParams(NAMESPACE, spans=())
    full = ask_cold(caching, prompt.token_ids)
    caching.reset_prefix_cache()
    ask(caching, [*prompt.token_ids[: prompt.spans[3].end], 11, 12], nothing)
    blended = ask(caching, prompt.token_ids, prompt.params(1.0))
    assert require_blended(blended)["tokens_prefix_cached"] == 0
    assert_same(hybrid, full, blended)
    ask_cold(caching, prompt.token_ids, prompt.params(0.0), max_tokens=300)
    plain = ask(caching, prompt.token_ids, nothing)
    assert_same(hybrid, full, plain)


@pytest.mark.engine("{hybrid} caching")
def test_a_second_turn_finds_the_blend_of_the_first(caching: LocalEngine, hybrid: str) -> None:
    """vLLM keeps the states behind full blocks that a decode reaches, under the blend's own name."""
    prompt = saved(caching, *SIZES)
    first = ask_cold(caching, prompt.token_ids, prompt.params(1.0), max_tokens=300)
    turn = [*prompt.token_ids, *first.token_ids, *random_tokens(40, 3)]
    second = ask(caching, turn, prompt.params(1.0))
    assert second.accounting is not None
    assert second.accounting["outcome"] in ("prefix_hit", "blended")
    assert_same(hybrid, ask_cold(caching, turn), second)


@pytest.mark.engine("{hybrid} caching")
def test_preempted_blends_answer_as_alone(
    engine_slot: EngineSlot, hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hybrid.startswith("qwen"):
        pytest.skip("a block holds as many tokens as its state has bytes: no answer here grows by one")
    small = engine_slot.get(
        hybrid,
        enable_prefix_caching=False,
        max_num_seqs=8,
        max_model_len=640,
        num_gpu_blocks_override=24 if hybrid in MAMBA2 else 30,
        **ARGUMENTS[hybrid],
    )
    chunks = chunks_of(100, 257, 64, seed=20)
    small.save(PREFIX, chunks, NAMESPACE)
    scheduler = small.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *arguments: Any, **keywords: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **keywords)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    first, second, third = chunks
    prompts = [rag(second, third), rag(third, second), rag(first, second), rag(second, first)]
    for index, prompt in enumerate(prompts):
        prompt.question = random_tokens(45, 70 + index)
    asked = [Prompt(p.token_ids, p.params(1.0), 120, top_logprobs=5, ignore_eos=True) for p in prompts]
    answers = small.generate(asked)
    assert preempted, "the cache is too large for this test"
    for prompt, answer in zip(prompts, answers, strict=True):
        require_blended(answer)
        alone = ask_cold(small, prompt.token_ids, prompt.params(1.0), max_tokens=120)
        assert max_dlogprob(alone, answer) <= EXACT_MAX[ARGUMENTS[hybrid]["dtype"]]
