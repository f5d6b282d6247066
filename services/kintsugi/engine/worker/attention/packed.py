"""Checks at start whether the CPU kernel for scattered tokens can replace a layer's attention.

The kernel depends on the order of vLLM's cache, which is not an interface. So it serves a shape only after it
has correctly read back a cache that vLLM wrote. Otherwise vLLM's kernel computes scattered tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from kintsugi.engine.worker import native
from kintsugi.fusor.attention import reference_attention
from kintsugi.fusor.kernels.native import Instructions, PackedKernel, packed_supports

logger = init_logger(__name__)

TOLERANCE = 0.03
"""Maximum difference between attention outputs of unit scale that bfloat16 explains."""

ISA = {Instructions.AMX: "amx", Instructions.AVX512_BF16: "vec", Instructions.AVX512: "vec"}
"""vLLM's name of the cache order that a library reads."""

_reads: dict[tuple[int, ...], bool] = {}
"""Whether the kernel correctly reads a cache of a shape, as tested in this process."""


def packed_kernel(attention: Any) -> PackedKernel | None:
    """Return the kernel if it computes the same as this layer's attention on the CPU; else None."""
    if not _is_plain(attention):
        return None
    library = native.library()
    if library is None:
        return None
    kernel = PackedKernel(library)
    shape = (attention.num_heads, *attention.kv_cache.shape[1:])
    if shape not in _reads:
        error = _error_against_reference(kernel, attention)
        _reads[shape] = error <= TOLERANCE
        if not _reads[shape]:
            logger.warning("Scattered tokens attend through vLLM's kernel: ours is off by %.3g", error)
    return kernel if _reads[shape] else None


def _is_plain(attention: Any) -> bool:
    """Return whether the layer has a bfloat16 cache in the order that our library reads, and attends to the
    whole cache with a plain softmax."""
    impl = attention.impl
    instructions = native.instructions()
    if attention.attn_backend.get_name() != "CPU_ATTN" or instructions is None:
        return False
    if getattr(attention, "isa", None) != ISA[instructions]:
        return False
    if attention.kv_cache_dtype != "auto" or attention.kv_cache.dtype is not torch.bfloat16:
        return False
    if attention.sliding_window is not None or getattr(impl, "logits_soft_cap", None):
        return False
    if getattr(impl, "sinks", None) is not None or getattr(impl, "alibi_slopes", None) is not None:
        return False
    _, num_kv_heads, block_size, width = attention.kv_cache.shape
    return packed_supports(attention.num_heads, num_kv_heads, width // 2, block_size)


def _error_against_reference(kernel: PackedKernel, attention: Any) -> float:
    """Return the largest difference of the kernel's and the reference's output on a cache that vLLM wrote."""
    _, num_kv_heads, block_size, width = attention.kv_cache.shape
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    table = torch.tensor([2, 1], dtype=torch.int32)
    end = block_size + block_size // 2 + 3
    positions = torch.arange(1, end, 3, dtype=torch.int32)
    slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()[:end]
    key, value = (random(3 * block_size, num_kv_heads, width // 2) for _ in range(2))
    query = random(len(positions), attention.num_heads, width // 2)
    cache = attention.kv_cache.new_zeros((3, *attention.kv_cache.shape[1:]))
    attention.impl.do_kv_cache_update(attention, key[slots], value[slots], cache, slots)
    output = torch.empty_like(query)
    scale = attention.impl.scale
    kernel.attend(query, cache, table, positions, output, scale)
    keys, values = (half.view(3, block_size, num_kv_heads, -1) for half in (key, value))
    expected = reference_attention(query, keys, values, table, positions, scale=scale)
    return float((output.float() - expected.float()).abs().nan_to_num(float("inf")).max())
