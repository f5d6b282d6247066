"""How much of a device passes may use, and how much a blend is counted for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kintsugi.core.plan import BlendPlan, ChunkHit, Selection
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.engine.config import EngineConfig
from kintsugi.engine.protocol import BlendJob
from kintsugi.engine.worker import defects, memory, side
from kintsugi.engine.worker.calls import LayerCalls
from kintsugi.engine.worker.model import CacheGroup, LoadedModel
from kintsugi.engine.worker.side import WorkerSide
from kintsugi.engine.worker.stack import VllmStack
from kintsugi.store.client.ram import RamStore

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK, HEADS, HEAD_DIM, HIDDEN, LAYERS, PREFETCH = 32, 2, 16, 100, 8, 4
TOKENS, HIT = 1000, 990
LAYER_BYTES = 2 * HIT * HEADS * HEAD_DIM * 2
ROW_BYTES = HIDDEN * 2
FULL = [[*range(1, 33)], [*range(1, 33)]]
"""Blocks of two groups for 1,024 positions."""


def model_of(device: torch.device = CUDA) -> LoadedModel:
    """Every second layer is of the second group, whose kernel sees blocks of half the size."""
    config: Any = SimpleNamespace(model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16)
    groups = [
        CacheGroup(i, i, spec, (), BLOCK, size, None, False) for i, size in enumerate((BLOCK, BLOCK // 2))
    ]
    caches = [torch.zeros(40, HEADS, group.kernel_block_size, 2 * HEAD_DIM).bfloat16() for group in groups]
    layers: Any = tuple(
        SimpleNamespace(
            group=groups[index % 2],
            attention=SimpleNamespace(
                num_kv_heads=HEADS,
                head_size=HEAD_DIM,
                head_size_v=HEAD_DIM,
                kv_cache=caches[index % 2],
                sliding_window=None,
                impl=None,
            ),
        )
        for index in range(LAYERS)
    )
    calls, kv_heads = LayerCalls((), (), ()), (HEADS,) * LAYERS
    return LoadedModel(config, nn.Module(), layers, device, torch.bfloat16, 0.2, calls, kv_heads)


def job_of(selection: Selection, blocks: list[list[int]] = FULL, cached: int = 0) -> Any:
    """A prompt that begins with a hit, of which vLLM's prefix cache holds the first `cached` tokens."""
    hits = (ChunkHit(0, HIT, ChunkKey(bytes(32))),)
    tokens = SimpleNamespace(
        request_id="one", token_ids=range(cached, TOKENS), start=cached, block_ids=tuple(blocks)
    )
    return SimpleNamespace(plan=BlendPlan(hits, selection), tokens=tokens, manifests={})


def bytes_of(selection: Selection, blocks: list[list[int]] = FULL) -> int:
    return memory.pass_bytes(model_of(), job_of(selection, blocks))


def asking(selector: SelectorName, check_layer: int = 1) -> Selection:
    return Selection(0.15, selector, check_layer, query_layers=(2, 5))


def test_a_selection_by_deviation_computes_every_token_below_its_layer() -> None:
    loaded = (PREFETCH + 3 + 3) * LAYER_BYTES
    assert bytes_of(Selection(0.15)) == loaded + 5 * TOKENS * ROW_BYTES


def test_a_selection_before_the_first_layer_embeds_every_token_and_computes_few() -> None:
    loaded = (PREFETCH + 3 + 3) * LAYER_BYTES
    assert bytes_of(Selection(0.15, SelectorName.RANDOM)) == loaded + TOKENS * ROW_BYTES
    half = TOKENS - HIT + HIT // 2
    assert bytes_of(Selection(0.5, SelectorName.RANDOM)) == loaded + 5 * half * ROW_BYTES


@pytest.mark.parametrize(
    ("selection", "layers"),
    [
        (asking(SelectorName.QUERY), 1),
        (asking(SelectorName.HYBRID, 1), 2),
        (asking(SelectorName.HYBRID, 5), 1),
        (asking(SelectorName.HYBRID, 7), 1),
    ],
)
def test_after_the_question_a_layer_counts_where_it_is_written_or_compared(
    selection: Selection, layers: int
) -> None:
    by_prior = Selection(0.15, SelectorName.RANDOM)
    hidden = max(TOKENS, 5 * (TOKENS - HIT + -(-int(HIT * 22.5) // 100)))  # 1.5 · .15 of them in `hybrid`
    extra = (hidden - TOKENS) * ROW_BYTES if selection.selector is SelectorName.HYBRID else 0
    assert bytes_of(selection) == bytes_of(by_prior) + layers * LAYER_BYTES + extra


def test_windows_need_a_cache_of_their_own_and_keep_every_layer_that_was_asked() -> None:
    windows = [FULL[0], [0] * 20 + FULL[1][20:]]
    scratch = 2 * (1 + 32 * 2) * HEADS * (BLOCK // 2) * 2 * HEAD_DIM * 2
    assert bytes_of(Selection(0.15), windows) == bytes_of(Selection(0.15)) + scratch
    kept = bytes_of(asking(SelectorName.QUERY), windows) - bytes_of(asking(SelectorName.QUERY))
    assert kept == scratch + 2 * LAYER_BYTES  # 1 and 3; 5 is kept anyway


def test_a_question_that_passes_without_a_gap_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    selection, model, gap = asking(SelectorName.QUERY), model_of(), 200
    job = job_of(selection, cached=40)
    (hit,) = job.plan.hits
    hits = (replace(hit, end=100), replace(hit, start=100 + gap))
    job.plan = replace(job.plan, hits=hits, chunks=(range(100, 100 + gap),))
    monkeypatch.setattr("kintsugi.fusor.gaps.KEPT_TOKENS", gap)
    closed = memory.pass_bytes(model, job)
    monkeypatch.setattr("kintsugi.fusor.gaps.KEPT_TOKENS", gap - 30)
    blocks = 1 + -(-(TOKENS + 1 - 30) // BLOCK)
    halves = 1 + (blocks - 1) * 2
    own = 2 * (blocks * BLOCK + halves * BLOCK // 2) * HEADS * 2 * HEAD_DIM * 2
    assert memory.pass_bytes(model, job) == closed + own
    model.layers[0].attention.sliding_window = 100
    assert memory.pass_bytes(model, job) == closed


def test_what_the_engine_has_cached_is_not_loaded() -> None:
    whole = memory.pass_bytes(model_of(), job_of(Selection(0.15)))
    rest = memory.pass_bytes(model_of(), job_of(Selection(0.15), cached=90))
    assert whole - rest == (PREFETCH + 3 + 3) * LAYER_BYTES * 90 // HIT + 5 * 90 * ROW_BYTES


@pytest.mark.parametrize(
    "blocks",
    [[*range(1, 33)], [*range(1, 32)], [0, *range(2, 33)], [*range(1, 33), 0], [*range(1, 32), 0], []],
)
@pytest.mark.parametrize("end", [1000, 1024, 992])
def test_it_judges_a_layer_as_the_stack_does(blocks: list[int], end: int) -> None:
    model = model_of(CPU)
    job = job_of(Selection(0.15), [blocks, FULL[1]])
    if blocks and -(-end // BLOCK) - 1 > len(blocks):
        pytest.skip("vLLM lacks the last block at most")
    stack = VllmStack(model, [job.tokens.block_ids], [end])
    for layer in range(2):
        found = memory._scratch_bytes(model.layers[layer], job, end)
        assert (found == 0) == stack.keeps_layer(layer)


def cache_of(utilization: float, cache_bytes: int | None = None) -> Any:
    return SimpleNamespace(gpu_memory_utilization=utilization, kv_cache_memory_bytes=cache_bytes)


def test_a_cpu_reserves_nothing() -> None:
    assert memory.reserve_memory(CPU, cache_of(0.5)) == float("inf")


@pytest.mark.parametrize(
    ("cache", "reserved_gib"),
    [
        (cache_of(0.9), 0.6 * 8),  # 8 GiB outside vLLM's share, and its working memory of 2 GiB, are free
        (cache_of(0.8), 0.6 * 10),  # others use the device
        (cache_of(0.9, 1 << 30), 0.25 * 10),  # the share is not what limits vLLM
    ],
)
def test_a_gpu_reserves_a_share_of_what_vllm_leaves(
    cache: Any, reserved_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10 << 30, 80 << 30))
    monkeypatch.setattr(memory, "min_over_ranks", lambda number: number - 1)
    monkeypatch.setattr(memory, "keep_for_loading", lambda size, _device: taken.append(size))
    assert memory.reserve_memory(CUDA, cache) == taken[0] - 1
    assert taken == [pytest.approx(reserved_gib * 2**30, abs=1)]


def test_the_log_says_at_start_which_prompts_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(memory.logger, "warning", lambda text, *values: said.append(text % values))
    model = model_of()
    token_bytes = (PREFETCH + 3 + 3) * 2 * HEADS * HEAD_DIM * 2 + 5 * HIDDEN * 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10 << 30, 80 << 30))
    config: Any = model.vllm_config
    config.cache_config = cache_of(1 - 1e-5)
    room = int(0.6 * (80 << 30) * 1e-5)
    config.model_config.max_model_len = room // token_bytes - 1
    memory.warn_of_short_memory(model)
    assert said == []
    config.model_config.max_model_len += 2
    memory.warn_of_short_memory(model)
    (text,) = said
    assert f"more than about {room // token_bytes} tokens" in text
    assert "lower gpu_memory_utilization" in text


def test_where_nothing_can_be_had_no_rank_blends(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_size: int, _device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (8 << 30, 80 << 30))
    monkeypatch.setattr(memory, "min_over_ranks", lambda number: number)
    monkeypatch.setattr(memory, "keep_for_loading", refuse)
    assert memory.reserve_memory(CUDA, cache_of(0.9)) == 0


def test_the_first_blend_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not `register`: capturing CUDA graphs, which comes after it, empties torch's caches."""
    reserved: list[torch.device] = []
    begun: list[int] = []

    def reserve(device: torch.device, _cache: Any) -> float:
        reserved.append(device)
        return 1e7

    def begin(_worker: WorkerSide, _job: BlendJob, size: int) -> Any:
        begun.append(size)
        return SimpleNamespace(work=SimpleNamespace(close=lambda: None))

    monkeypatch.setattr(side, "reserve_memory", reserve)
    for module in (side, defects):
        monkeypatch.setattr(module, "is_so_on_any_rank", lambda flag: flag)
    monkeypatch.setattr(side, "find_unsupported", lambda _config: None)
    monkeypatch.setattr(side, "find_layers", lambda *_arguments: None)
    monkeypatch.setattr(side, "learn_model", lambda _found: model_of())
    monkeypatch.setattr(WorkerSide, "_stored_codec", lambda worker, _model: worker._codec)
    monkeypatch.setattr(side, "LoadedWeights", lambda *_arguments: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(WorkerSide, "_begin_blend", begin)
    monkeypatch.setattr(side, "warn_of_short_memory", lambda _model: None)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64), cache_config=cache_of(0.9)
    )
    groups: Any = None
    worker = WorkerSide(config, groups, EngineConfig(store="memory:", self_test=False), RamStore(), 64)
    try:
        worker.register({})
        assert reserved == []
        for _ in range(2):
            assert worker._admit(job_of(Selection(0.15)))
        assert reserved == [CUDA]
        assert begun == [bytes_of(Selection(0.15))] * 2
    finally:
        worker.close()
