"""Attention of scattered queries over one sequence's paged KV cache, masked strictly by position.

A blend recomputes n tokens that lie anywhere in a context of L tokens. An engine's own kernels expect
queries that are contiguous at the end of a sequence. The workaround, one pseudo request per token, reads the
context once per token. Here a tile of T tokens shares each K/V tile that it loads.

Cost, for q query heads, h kv heads, head size d and e bytes per cache element::

    FLOPs        4 · q · d · Σ positions            ≈ 2 · q · d · n · L    (either way)
    bytes read   2 · h · d · e · Σ over tiles of last position  ≈ h · d · e · L · n / T   (tiles)
                 2 · h · d · e · Σ positions                    ≈ h · d · e · L · n       (pseudo requests)

Arithmetic, not a measurement: Mistral-7B (32/8 heads of 128, bf16) with 15 % of 16k tokens has
n = 2,458 and T = 32, hence 330 GFLOP per layer and 2.6 GB instead of 82 GB. At 600 TFLOP/s and 4 TB/s
that is 0.55 ms of computing and 0.65 ms of reading (less when tiles of one head meet in the L2 cache),
against 20 ms. `benchmarks/gpu/scattered_attention.py` measures it on a GPU.

On a CPU with AVX-512, `fusor.kernels.native` computes the same tiles, over a cache in the order that suits
the processor.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attend_scattered(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention output `[n, q_heads, head_dim]`, in the query's dtype, accumulated in fp32.

    query: `[n, q_heads, head_dim]`, bf16, fp16 or fp32; query head i reads kv head
        i // (q_heads // kv_heads).
    key_cache, value_cache: `[num_blocks, block_size, kv_heads, head_dim]` in the query's dtype, contiguous
        in the last dimension: views of an engine's cache.
    block_table: int32 `[blocks]`, this one sequence's.
    positions: int32 `[n]`, strictly ascending. Query i attends kv positions j <= positions[i] and, with
        a `sliding_window` of w tokens (including itself, as vLLM counts), j > positions[i] - w. No K or V
        after the last position is read.
    softcap: logits become `softcap * tanh(logit / softcap)` (Gemma-2).
    sinks: `[q_heads]`, one extra logit per head that takes probability and contributes no value (gpt-oss).

    On CUDA this never waits for the device, so the caller guarantees that positions ascend and lie inside
    the block table.
    """
    _check(query, key_cache, value_cache, block_table, positions, sinks)
    assert sliding_window is None or sliding_window > 0
    assert softcap is None or softcap > 0
    if query.shape[0] == 0:
        return torch.empty_like(query)
    if query.device.type != "cuda":
        implementation = reference_attention
    else:
        from kintsugi.fusor.kernels.scattered import triton_attention

        implementation = triton_attention
    return implementation(
        query,
        key_cache,
        value_cache,
        block_table,
        positions,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
) -> None:
    """Assert the layout of memory that the kernel accesses through pointers."""
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, cache_dim = key_cache.shape
    assert value_cache.shape == key_cache.shape
    assert cache_dim == head_dim
    assert num_heads % num_kv_heads == 0
    assert query.dtype in DTYPES
    assert key_cache.dtype is value_cache.dtype is query.dtype
    assert query.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
    assert block_table.dtype == positions.dtype == torch.int32
    assert block_table.ndim == 1
    assert positions.shape == (num_tokens,)
    assert num_tokens <= block_size * len(block_table)
    assert sinks is None or sinks.shape == (num_heads,)


def reference_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend_scattered` in plain torch, one kv head at a time: slow, obviously correct, and used
    without a GPU.

    Memory beyond its arguments: fp32 `[n, q_heads / kv_heads, L]` logits and one head's `[L, head_dim]`
    K and V, where L is the last position + 1.
    """
    assert bool((positions.diff() > 0).all()), "positions must ascend"
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    visible = visible_positions(positions, sliding_window)
    output = torch.empty_like(query)
    for head in range(num_kv_heads):
        mine = slice(head * group, (head + 1) * group)
        key = gather_head(key_cache, block_table, head, visible.shape[1])
        value = gather_head(value_cache, block_table, head, visible.shape[1])
        logits = torch.einsum("ngd,jd->ngj", query[:, mine].float(), key) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible[:, None, :], float("-inf"))
        weights = _softmax(logits, None if sinks is None else sinks[mine].float())
        output[:, mine] = torch.einsum("ngj,jd->ngd", weights, value).to(query.dtype)
    return output


def visible_positions(positions: Tensor, sliding_window: int | None) -> Tensor:
    """Whether query i attends to kv position j: bool `[n, L]`, where L is the last position + 1."""
    kv_positions = torch.arange(int(positions[-1]) + 1, device=positions.device)
    visible = kv_positions[None, :] <= positions[:, None]
    if sliding_window is not None:
        visible &= kv_positions[None, :] > positions[:, None] - sliding_window
    return visible


def gather_head(cache: Tensor, block_table: Tensor, head: int, num_tokens: int) -> Tensor:
    """Read one kv head of the sequence from its blocks: fp32 `[num_tokens, head_dim]`."""
    slots = torch.arange(num_tokens, device=cache.device)
    blocks = block_table.long()[slots // cache.shape[1]]
    return cache[blocks, slots % cache.shape[1], head].float()


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of `[n, group, L]`, with one sink logit per head in the denominator."""
    if sinks is None:
        return logits.softmax(dim=-1)
    column = sinks[None, :, None].expand(logits.shape[0], -1, 1)
    return torch.cat([logits, column], dim=-1).softmax(dim=-1)[..., :-1]
