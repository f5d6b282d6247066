"""A KV cache ordered as vLLM's CPU backend orders it for a processor, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kintsugi.fusor.kernels.native import Instructions


def pack(key_cache: Tensor, value_cache: Tensor, instructions: Instructions) -> Tensor:
    """`[blocks, block_size, heads, head_dim]` twice -> `[blocks, heads, block_size, 2 * head_dim]`, in the
    order that `amx.h` or `avx512.h` describes."""
    blocks, size, heads, dim = key_cache.shape
    halves = (_for_amx if instructions is Instructions.AMX else _for_vectors)(key_cache, value_cache)
    both = torch.cat([half.reshape(blocks, heads, -1) for half in halves], dim=-1)
    return both.view(blocks, heads, size, 2 * dim)


def _for_amx(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, size, heads, dim = key_cache.shape
    key = key_cache.permute(0, 2, 1, 3).reshape(blocks, heads, size // 16, 16, dim // 2, 2)
    value = value_cache.permute(0, 2, 1, 3).reshape(blocks, heads, size // 2, 2, dim // 16, 16)
    return key.transpose(3, 4), value.permute(0, 1, 4, 2, 5, 3)


def _for_vectors(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    return key_cache.permute(0, 2, 3, 1), value_cache.transpose(1, 2)
