"""The kernel in the place of a layer's attention: reads the backend's cache layout, leaves no trace."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kintsugi.core.errors import SelfTestFailed
from kintsugi.engine.worker.attention import scattered
from kintsugi.engine.worker.attention.scattered import (
    ScatteredRows,
    kernel_serves,
    replace_attention_impl,
    run_variants,
)
from kintsugi.fusor.kernels.scattered import variant_sizes

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 6


def attention(window: int | None = None) -> Any:
    impl = SimpleNamespace(scale=HEAD_DIM**-0.5, logits_soft_cap=0.0, other="kept")
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    return SimpleNamespace(
        impl=impl,
        attn_backend=backend,
        head_size=HEAD_DIM,
        head_size_v=HEAD_DIM,
        sliding_window=window,
        kv_cache_dtype="auto",
        kv_cache_torch_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("window", [None, 9])
def test_it_attends_like_dense_attention(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM, generator=generator)
    table = torch.tensor([4, 1, 5, 2], dtype=torch.int32)
    positions = torch.tensor([0, 3, 11, 12, 25], dtype=torch.int32)
    query = torch.randn(len(positions), HEADS, HEAD_DIM, generator=generator)
    layer = attention(window)
    output = torch.empty(len(positions), HEADS, HEAD_DIM)
    with replace_attention_impl(layer, ScatteredRows(positions, table)):
        assert layer.impl.other == "kept"
        layer.impl.forward(layer, query, None, None, cache, None, output)
    assert isinstance(layer.impl, SimpleNamespace)

    context = cache[table.long()].permute(0, 2, 1, 3).reshape(-1, KV_HEADS, 2 * HEAD_DIM)
    keys, values = (
        half.repeat_interleave(HEADS // KV_HEADS, dim=1) for half in context.split(HEAD_DIM, dim=-1)
    )
    kv_positions = torch.arange(len(context))
    seen = kv_positions[None] <= positions[:, None]
    if window is not None:
        seen &= kv_positions[None] > positions[:, None] - window
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=seen
    ).transpose(0, 1)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_the_implementation_comes_back_after_an_error() -> None:
    layer = attention()
    impl = layer.impl
    rows = ScatteredRows(torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(RuntimeError, match="within"), replace_attention_impl(layer, rows):
        raise RuntimeError("within")
    assert layer.impl is impl


def test_a_cpu_keeps_its_own_attention() -> None:
    assert not kernel_serves(attention(), torch.device("cpu"))


@pytest.mark.parametrize(
    "changes", [{"head_size_v": 2 * HEAD_DIM}, {"alibi": [0.5, 0.25]}, {"attention_chunk_size": 8}]
)
def test_what_the_kernel_does_not_compute_stays_with_the_backend(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    layer, device = attention(), torch.device("cuda")
    assert kernel_serves(layer, device)
    layer.impl.alibi_slopes = changes.pop("alibi", None)
    layer.__dict__.update(changes)
    assert not kernel_serves(layer, device)


def layer_with_cache() -> Any:
    layer = attention()
    layer.num_heads, layer.num_kv_heads = HEADS, KV_HEADS
    layer.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=torch.bfloat16)
    return layer


def test_every_variant_runs_once_and_several_compile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, together = [], threading.Barrier(2)

    def attend(query: torch.Tensor, key: Any, value: Any, table: torch.Tensor, *_: Any, **__: Any) -> Any:
        sizes.append((len(query), len(table) * BLOCK))
        if len(sizes) <= 2:
            together.wait(60.0)
        assert torch.is_inference_mode_enabled()
        return query

    monkeypatch.setattr(scattered, "attend_scattered", attend)
    layer = layer_with_cache()
    impl = layer.impl
    run_variants(layer, torch.bfloat16, 4096)
    wanted = variant_sizes(HEADS // KV_HEADS, HEAD_DIM * 2, 4096)
    assert sorted(sizes) == sorted((count, -(-context // BLOCK) * BLOCK) for count, context in wanted)
    assert layer.impl is impl


def test_a_variant_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(query: torch.Tensor, *_: Any, **__: Any) -> Any:
        if len(query) > 1:
            raise RuntimeError("out of resource: shared memory")
        return query

    monkeypatch.setattr(scattered, "attend_scattered", attend)
    with pytest.raises(SelfTestFailed, match=r"queries of 4 heads of 16 .* shared memory; update Triton"):
        run_variants(layer_with_cache(), torch.bfloat16, 4096)
