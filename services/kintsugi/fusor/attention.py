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

A CPU with AVX-512 has a kernel of its own for the same tiles: `fusor.kernels.packed` (its cache is ordered
for the processor).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kintsugi.core.errors import InvalidField, NotBlendable
from kintsugi.fusor.reference import reference_attention

CACHE_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention output `[n, q_heads, head_dim]`, in the query's dtype, accumulated in fp32.

    query: `[n, q_heads, head_dim]`, bf16, fp16 or fp32; query head i reads kv head
        i // (q_heads // kv_heads).
    key_cache, value_cache: `[num_blocks, block_size, kv_heads, head_dim]` with any strides: views of an
        engine's cache. A 16- or 32-bit float, or fp8 that stands for `element * k_scale` (`v_scale`).
    block_table: int32 `[blocks]`, this one sequence's.
    positions: int32 `[n]`, strictly ascending. Query i attends kv positions j <= positions[i] and, with
        a `sliding_window` of w tokens (including itself, as vLLM counts), j > positions[i] - w. No K or V
        after the last position is read.
    softcap: logits become `softcap * tanh(logit / softcap)` (Gemma-2).
    sinks: `[q_heads]`, one extra logit per head that takes probability and contributes no value (gpt-oss).

    On CUDA this never waits for the device, so the caller guarantees that positions ascend and lie inside
    the block table. Raises `InvalidField` for shapes and dtypes that do not fit together and `NotBlendable`
    for a cache that the kernel cannot read on this GPU.
    """
    _check(query, key_cache, value_cache, block_table, positions, sinks)
    assert sliding_window is None or sliding_window > 0
    assert softcap is None or softcap > 0
    if query.shape[0] == 0:
        return torch.empty_like(query)
    if query.device.type != "cuda":
        implementation = reference_attention
    else:
        _check_device(query.device, key_cache.dtype)
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
        k_scale=k_scale,
        v_scale=v_scale,
    )


def kernel_reads(cache_dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether the kernel can read such a cache on a GPU of this compute capability.

    Triton converts e4m3 only on hardware that does: Ada, Hopper and later.
    """
    return cache_dtype is not torch.float8_e4m3fn or capability >= (8, 9)


def _check_device(device: torch.device, cache_dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability(device)
    if not kernel_reads(cache_dtype, capability):
        major, minor = capability
        raise NotBlendable(
            "fp8_kv_unsupported", f"compute capability {major}.{minor} cannot read e4m3; use fp8_e5m2 or auto"
        )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
) -> None:
    """Raise `InvalidField` naming the first argument whose shape or dtype does not fit."""
    num_tokens, num_heads, head_dim = _shape("query", query, 3)
    _, block_size, num_kv_heads, cache_dim = _shape("key_cache", key_cache, 4)
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        raise InvalidField("value_cache", "must have the shape and dtype of key_cache")
    if cache_dim != head_dim or num_heads % num_kv_heads:
        raise InvalidField(
            "query", f"heads {num_heads} × {head_dim} do not fit a cache of {num_kv_heads} × {cache_dim}"
        )
    if query.dtype not in QUERY_DTYPES:
        raise InvalidField("query", f"is {query.dtype}; must be bfloat16, float16 or float32")
    if key_cache.dtype not in (*QUERY_DTYPES, *CACHE_FP8):
        raise InvalidField("key_cache", f"is {key_cache.dtype}; view its bytes as the fp8 type they hold")
    for name, ids in (("block_table", block_table), ("positions", positions)):
        _shape(name, ids, 1)
        if ids.dtype != torch.int32:
            raise InvalidField(name, f"is {ids.dtype}; must be int32")
    if positions.shape[0] != num_tokens or num_tokens > block_size * block_table.shape[0]:
        raise InvalidField(
            "positions", f"{positions.shape[0]} for {num_tokens} queries over {block_table.shape[0]} blocks"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise InvalidField("sinks", f"has shape {tuple(sinks.shape)}; must be [{num_heads}]")


def _shape(name: str, tensor: Tensor, rank: int) -> torch.Size:
    if tensor.ndim != rank:
        raise InvalidField(name, f"has {tensor.ndim} dimensions; must have {rank}")
    return tensor.shape
