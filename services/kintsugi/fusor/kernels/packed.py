"""The CPU kernel for scattered queries, over the bfloat16 KV cache of vLLM's CPU backend.

vLLM's own kernel takes one pseudo-request per run of queries, and reads the whole context for each: a request
of one token has only 2 rows to multiply by each key (at two query heads per KV head). Here a tile of queries
fills 32 rows and shares the keys and values that it reads (`packed.cpp`). With AMX the cache is multiplied in
place; with AVX-512 its rows are interleaved first, once per tile, at a tenth of the multiplication's
instructions.

With q query heads, h KV heads and head size d, a query-key pair takes 2 · q · d multiplications and q powers
of 2; the 4 · h · d bytes of a key and its value are read once for 32 · h / q queries.

CPU time per pair ÷ that of a dense prefill by vLLM, one thread (`benchmarks/ttft.py`, `scattered_pair_cost`):

=====================================  ======  ===========
Instructions                           kernel  vLLM's own
=====================================  ======  ===========
AMX (Intel Xeon)                       0.8     2.3
AVX-512 BF16 (AMD EPYC, 15 of 27 ns)   0.56    1.5
AVX-512 (the same EPYC)                0.97    1.5
=====================================  ======  ===========

If it cannot be built (`native`), the engine's own kernel computes scattered queries.

Rejected: torch's flash attention over tiles with a mask, which takes 2.2 to 3.7 times a dense prefill with
AMX (its dense attention takes 1.5).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

GROUP_MAX = 32
HEAD_DIM_MAX = 256


def supports(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Return whether the kernel can compute such a layer, on a supported processor."""
    return (
        num_heads // num_kv_heads <= GROUP_MAX
        and head_dim % 32 == 0
        and head_dim <= HEAD_DIM_MAX
        and block_size % 32 == 0
    )


class PackedKernel:
    """The kernel of a library that `native.load` has loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend_packed
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        tensors: list[Any] = [pointer, integer, integer] * 3
        self._attend.argtypes = [*tensors, pointer, pointer, *[integer] * 5, ctypes.c_float]
        self._attend.restype = None

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        positions: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        """Write attention into `output`, by the rules of `fusor.attention.attend_scattered`.

        query, output: bfloat16 `[n, q_heads, head_dim]`, contiguous in the last dimension.
        cache: bfloat16 `[num_blocks, kv_heads, block_size, 2 * head_dim]`, contiguous in the last two, whose
            elements are ordered as `amx.h` or `avx512.h` says, whichever the library was built for.
        block_table: int32 `[blocks]`. positions: int32 `[n]`, strictly ascending, inside the block table.
        """
        _check(query, cache, block_table, positions, output)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, block_size = cache.shape[1:3]
        self._attend(
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *(output.data_ptr(), output.stride(0), output.stride(1)),
            *(cache.data_ptr(), cache.stride(0), cache.stride(1)),
            *(block_table.data_ptr(), positions.data_ptr()),
            *(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, scale),
        )


def _check(query: Tensor, cache: Tensor, block_table: Tensor, positions: Tensor, output: Tensor) -> None:
    """Assert the layout of memory that the kernel accesses through pointers."""
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, width = cache.shape
    assert supports(num_heads, num_kv_heads, head_dim, block_size)
    assert num_heads % num_kv_heads == 0
    assert width == 2 * head_dim
    assert {query.dtype, cache.dtype, output.dtype} == {torch.bfloat16}
    assert {query.device.type, cache.device.type, output.device.type} == {"cpu"}
    assert output.shape == query.shape
    assert query.stride(2) == output.stride(2) == cache.stride(3) == 1
    assert cache.stride(2) == width
    assert block_table.dtype == positions.dtype == torch.int32
    assert block_table.is_contiguous()
    assert positions.is_contiguous()
    assert positions.shape == (num_tokens,)
    if num_tokens:
        assert int(positions[0]) >= 0
        assert int(positions[-1]) < block_size * len(block_table)
