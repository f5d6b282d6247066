"""Models that mix tokens by short convolutions, Gated DeltaNet or Mamba-2 in most layers.

In float32 where vLLM's operations compute it, against vLLM itself and an independent oracle. vLLM's Gated
DeltaNet on a CPU computes bfloat16 alone: there a blend is compared with a prefill of the same steps, and is
no further from the oracle, which computes float32, than twice what that prefill is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import isfinite
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from kintsugi.core.layout import ChunkManifest, Codec, HeadRange, KVLayout, LayerGroup, Part, PartKind
from kintsugi.core.request import KintsugiParams, SelectorName
from kintsugi.core.sizing import model_size
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
    folder_of,
    max_dlogprob,
    rag,
    ram_store,
    random_tokens,
    require_blended,
    saved,
)
from tests.oracle import Oracle, measured_layers
from tests.stepwise import prefill_like_a_blend

pytestmark = pytest.mark.engine("{hybrid}")

SIZES = (1, 33, 100, 257, 64)
EXACT_MAX = 1e-4
"""Largest difference of a logprob from vLLM's own prefill."""
ORACLE_MAX = 1e-3
"""Largest difference from the oracle in float32."""
ROUNDING_SHARE_MAX = 2.0
"""Where one of two answers was computed in other steps, or in float32: their difference in bfloat16 ÷ that of
vLLM's own answers."""

NATIVE_ROTATION = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""vLLM's rotation kernel on a CPU takes LFM2's queries and keys `[tokens, heads, width]` for ones without
heads, and so rotates other elements."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "lfm2": {"dtype": "float32", **NATIVE_ROTATION},
    "granite-4": {"dtype": "float32"},
    "nemotron-h": {"dtype": "float32"},
    "lfm2-moe": {"dtype": "float32", **NATIVE_ROTATION},
    "qwen3.5": {"dtype": "bfloat16"},
    "qwen3.5-moe": {"dtype": "bfloat16"},
    "qwen3-next": {"dtype": "bfloat16"},
}
SMALL = {
    "lfm2": (640, 30),
    "lfm2-moe": (640, 30),
    "granite-4": (640, 24),
    "nemotron-h": (640, 24),
    "qwen3.5": (1024, 14),
    "qwen3.5-moe": (1024, 14),
    "qwen3-next": (1024, 14),
}
"""vLLM's `max_model_len`, and the blocks of a cache that holds one answer of `ANSWER_TOKENS` and not four."""
ANSWER_TOKENS = {640: 120, 1024: 250}
"""By `max_model_len`: answers have to grow by a block, which holds as many tokens as its state has bytes."""

IN_EVERY_RUN = ("lfm2", "granite-4")
WITH_VISION = ("qwen3.5", "qwen3.5-moe")
"""Models whose module in vLLM imports torchvision; tests/fakes/absent is enough."""
needs_torchvision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="put tests/fakes/absent into PYTHONPATH, as make test-full does"
)


def marks_of(hybrid: str) -> list[pytest.MarkDecorator]:
    marks = [] if hybrid in IN_EVERY_RUN else [pytest.mark.full]
    return [*marks, needs_torchvision] if hybrid in WITH_VISION else marks


EVERY = [pytest.param(one, marks=marks_of(one)) for one in ARGUMENTS]

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
    if hybrid not in ("qwen3-next", "qwen3.5-moe", "lfm2-moe"):
        return
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="module")
def caching(engine_slot: EngineSlot, hybrid: str) -> LocalEngine:
    """With prefix caching, and shorter steps; replaces `engine`, so its tests come last. vLLM's Mamba-2 keeps
    states from inside a step, which its scan on a CPU does not return: here steps end there instead, as for
    other recurrent layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
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


def is_bfloat16(hybrid: str) -> bool:
    return bool(ARGUMENTS[hybrid]["dtype"] == "bfloat16")


def full_prefill(
    engine: LocalEngine,
    hybrid: str,
    token_ids: Sequence[int],
    max_tokens: int = 8,
    step_tokens: int | None = None,
) -> Generation:
    """What vLLM alone answers; in bfloat16 with the steps of a blend."""
    if not is_bfloat16(hybrid):
        return ask_cold(engine, token_ids, max_tokens=max_tokens)
    engine.reset_prefix_cache()
    prompt = Prompt(token_ids, None, max_tokens, top_logprobs=5, ignore_eos=True)
    return prefill_like_a_blend(engine, prompt, step_tokens)


def rounding_max(engine: LocalEngine, hybrid: str, token_ids: Sequence[int], max_tokens: int = 8) -> float:
    """Return the largest difference that is allowed of an answer that was computed in other steps."""
    if not is_bfloat16(hybrid):
        return EXACT_MAX
    whole = ask_cold(engine, token_ids, max_tokens=max_tokens)
    others = (full_prefill(engine, hybrid, token_ids, max_tokens, step) for step in (None, 100, 33))
    return ROUNDING_SHARE_MAX * max(max_dlogprob(whole, other) for other in others)


def assert_same(full: Generation, other: Generation) -> float:
    """Return the largest difference of a logprob."""
    difference = max_dlogprob(full, other)
    assert difference <= EXACT_MAX
    assert other.token_ids == full.token_ids
    return difference


def test_full_ratio_is_full_prefill(
    engine: LocalEngine, hybrid: str, supports: Supports, figure: Figure
) -> None:
    prompt = saved(engine, *SIZES)
    full = full_prefill(engine, hybrid, prompt.token_ids, 32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0), max_tokens=32)
    loaded = sum(layout_of_model().chunk_bytes(Codec.RAW, size) for size in SIZES)
    assert require_blended(blended)["bytes_loaded"] == loaded
    figure("hybrid_r1_max_abs_dlogprob", hybrid, assert_same(full, blended))
    assert len(set(full.token_ids)) >= 4, "a model that repeats itself proves little"
    supports(hybrid, "blending", "exact")


def test_one_chunk_behind_its_own_prefix_needs_no_recomputing(engine: LocalEngine, hybrid: str) -> None:
    prompt = saved(engine, 301)
    full = full_prefill(engine, hybrid, prompt.token_ids, 32)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(0.0), max_tokens=32)
    require_blended(blended)
    assert_same(full, blended)


def test_any_ratio_is_what_the_oracle_says(engine: LocalEngine, hybrid: str, figure: Figure) -> None:
    oracle, prompt = Oracle(folder_of(hybrid)), saved(engine, *SIZES)
    full, apart = oracle.full(prompt.token_ids).logprobs[0], 0.0
    plain = full_prefill(engine, hybrid, prompt.token_ids, 1).top_logprobs[0]
    own = max(abs(float(full[token]) - logprob) for token, logprob in plain.items())
    hits = [(span.start, span.end) for span in prompt.spans]
    bound = ROUNDING_SHARE_MAX * own if is_bfloat16(hybrid) else ORACLE_MAX
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
    full = full_prefill(engine, hybrid, turn)
    blended = ask(engine, turn, prompt.params(1.0))
    require_blended(blended)
    assert_same(full, blended)


def test_blends_and_plain_prompts_share_steps(engine: LocalEngine, hybrid: str) -> None:
    prompt = saved(engine, *SIZES)
    others = [[*PREFIX, *prompt.question[::-1]], [*PREFIX, *prompt.token_ids[200:260]]]
    alone = [*(ask_cold(engine, one) for one in others), full_prefill(engine, hybrid, prompt.token_ids)]
    asked = [
        *(Prompt(one, None, 8, top_logprobs=5, ignore_eos=True) for one in others),
        *(
            Prompt(prompt.token_ids, prompt.params(ratio), 8, top_logprobs=5, ignore_eos=True)
            for ratio in (1.0, 0.15)
        ),
    ]
    *together, partial = engine.generate(asked)
    for mine, its in zip(together, alone, strict=True):
        assert_same(its, mine)
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

    full = full_prefill(engine, hybrid, prompt.token_ids)
    monkeypatch.setattr(RamStore, "stream", lossy)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert require_blended(blended)["restarts"] == 1
    assert_same(full, blended)


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
    assert_same(full, failed)


@pytest.mark.parametrize("differs", ["width", "dtype", "kind"])
def test_a_chunk_of_another_layout_costs_a_full_prefill(
    engine: LocalEngine, hybrid: str, differs: str
) -> None:
    chunk, layout = random_tokens(50, 9), layout_of_model()
    first, *others = layout.groups
    parts, dtype = first.parts, layout.dtype
    if differs == "width":
        parts = tuple(Part(part.kind, max(1, part.width // 2)) for part in parts)
    elif differs == "dtype":
        dtype = "float16"
    else:
        parts = (Part(PartKind.K, parts[0].width), Part(PartKind.V, parts[-1].width))
    other = KVLayout.of_groups([LayerGroup(first.layers, first.heads, parts), *others], dtype)
    space, store = engine.space(NAMESPACE), ram_store(hybrid)
    key = ChunkKey.of(space, chunk)
    frames = [bytes(other.frame_bytes(Codec.RAW, len(chunk), layer)) for layer in range(other.num_layers)]
    manifest = ChunkManifest.of(space, key, (), len(chunk), other, Codec.RAW, frames)
    store.delete(NAMESPACE, [key])
    store.put(manifest, [memoryview(one) for one in frames])
    prompt = rag(random_tokens(40, 8), chunk)
    full = ask_cold(engine, prompt.token_ids)
    failed = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    assert failed.accounting is not None
    assert failed.accounting["outcome"] == "failed"
    assert failed.accounting["reason"].startswith("chunk_layout: chunk ")
    assert_same(full, failed)


def test_stale_bytes_behind_a_blend_are_never_read(engine: LocalEngine, hybrid: str) -> None:
    """Layers share blocks: the state of one may be no number in the dtype of another. vLLM zeroes its new
    blocks, but not those that a connector fills."""
    prompt = saved(engine, *SIZES)
    full = full_prefill(engine, hybrid, prompt.token_ids, 32)
    for layer in get_kv_transfer_group()._worker._model.layers:
        if not layer.group.is_recurrent:
            layer.attention.kv_cache[1:] = float("nan")
    for ratio in (0.0, 1.0):
        blended = ask_cold(engine, prompt.token_ids, prompt.params(ratio), max_tokens=32)
        require_blended(blended)
        assert all(isfinite(one) for top in blended.top_logprobs for one in top.values())
    assert_same(full, blended)


def test_the_size_of_a_token_is_what_its_config_tells(engine: LocalEngine, hybrid: str) -> None:
    config = json.loads((folder_of(hybrid) / "config.json").read_text())
    assert model_size(config, ARGUMENTS[hybrid]["dtype"]).layout == layout_of_model()


@pytest.mark.engine("{hybrid} caching")
def test_plain_prompts_never_find_a_blend_s_state(caching: LocalEngine, hybrid: str) -> None:
    """Blends begin at the first token: vLLM frees a prefix's state when tokens behind it are claimed."""
    prompt, nothing = saved(caching, *SIZES), KintsugiParams(NAMESPACE, spans=())
    plain = ask_cold(caching, prompt.token_ids)
    full = full_prefill(caching, hybrid, prompt.token_ids)
    caching.reset_prefix_cache()
    ask(caching, [*prompt.token_ids[: prompt.spans[3].end], 11, 12], nothing)
    blended = ask(caching, prompt.token_ids, prompt.params(1.0))
    assert require_blended(blended)["tokens_prefix_cached"] == 0
    assert_same(full, blended)
    ask_cold(caching, prompt.token_ids, prompt.params(0.0), max_tokens=300)
    assert_same(plain, ask(caching, prompt.token_ids, nothing))


@pytest.mark.engine("{hybrid} caching")
def test_a_second_turn_finds_the_blend_of_the_first(caching: LocalEngine, hybrid: str) -> None:
    """vLLM keeps the states behind full blocks that a decode reaches, under the blend's own name."""
    prompt = saved(caching, *SIZES)
    first = ask_cold(caching, prompt.token_ids, prompt.params(1.0), max_tokens=300)
    turn = [*prompt.token_ids, *first.token_ids, *random_tokens(40, 3)]
    second = ask(caching, turn, prompt.params(1.0))
    assert second.accounting is not None
    assert second.accounting["outcome"] in ("prefix_hit", "blended")
    difference = max_dlogprob(ask_cold(caching, turn), second)
    assert difference <= rounding_max(caching, hybrid, turn)


@pytest.fixture(scope="module")
def small(engine_slot: EngineSlot, hybrid: str) -> LocalEngine:
    """With short steps, and a cache that does not hold four answers."""
    length, blocks = SMALL[hybrid]
    return engine_slot.get(
        hybrid,
        enable_prefix_caching=False,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=length,
        num_gpu_blocks_override=blocks,
        **ARGUMENTS[hybrid],
    )


@pytest.mark.engine("{hybrid} small")
def test_a_blend_in_short_steps_is_a_prefill_in_short_steps(small: LocalEngine, hybrid: str) -> None:
    prompt = saved(small, *SIZES)
    full = full_prefill(small, hybrid, prompt.token_ids, step_tokens=128)
    blended = ask_cold(small, prompt.token_ids, prompt.params(1.0))
    require_blended(blended)
    assert_same(full, blended)


@pytest.mark.engine("{hybrid} small")
def test_preempted_blends_answer_as_alone(
    small: LocalEngine, hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = chunks_of(100, 257, 64, seed=20)
    small.save(PREFIX, chunks, NAMESPACE)
    scheduler = small.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *arguments: Any, **keywords: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *arguments, **keywords)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    first, second, third = chunks
    prompts = [rag(second, third), rag(third, second), rag(first, second), rag(second, first)]
    for index, prompt in enumerate(prompts):
        prompt.question = random_tokens(45, 70 + index)
    length = ANSWER_TOKENS[SMALL[hybrid][0]]
    asked = [Prompt(p.token_ids, p.params(1.0), length, top_logprobs=5, ignore_eos=True) for p in prompts]
    answers = small.generate(asked)
    assert preempted, "the cache is too large for this test"
    # What a preempted answer had is computed again in other steps.
    bound = max(rounding_max(small, hybrid, prompt.token_ids, length) for prompt in prompts[:2])
    for prompt, answer in zip(prompts, answers, strict=True):
        require_blended(answer)
        alone = ask_cold(small, prompt.token_ids, prompt.params(1.0), max_tokens=length)
        assert max_dlogprob(alone, answer) <= bound


OTHER_STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"mamba_cache_dtype": "float16"},
    "granite-4": {"mamba_ssm_cache_dtype": "float16"},
}
"""vLLM's arguments for states of another dtype than the model's."""


@pytest.mark.engine("{hybrid} other states")
def test_states_of_another_dtype_are_written_as_vllm_writes_them(
    engine_slot: EngineSlot, hybrid: str
) -> None:
    """A blend rounds a state where a step ends, as a prefill of the same steps does."""
    if hybrid not in OTHER_STATES:
        pytest.skip("vLLM's Gated DeltaNet on a CPU takes states of one dtype")
    arguments = {**ARGUMENTS[hybrid], **OTHER_STATES[hybrid]}
    engine = engine_slot.get(hybrid, enable_prefix_caching=False, **arguments)
    prompt = saved(engine, *SIZES)
    for layer in get_kv_transfer_group()._worker._model.layers:
        if layer.group.is_recurrent:
            assert layer.attention.kv_cache[-1].dtype == torch.float16
    asked = Prompt(prompt.token_ids, None, 8, top_logprobs=5, ignore_eos=True)
    full = prefill_like_a_blend(engine, asked)
    blended = ask_cold(engine, prompt.token_ids, prompt.params(1.0))
    require_blended(blended)
    assert_same(full, blended)
