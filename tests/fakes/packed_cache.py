"""A KV cache ordered as vLLM's CPU backend packs it for AMX, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """`[blocks, block_size, heads, head_dim]` twice -> `[blocks, heads, block_size, 2 * head_dim]`, in the
    order that `packed.cpp` describes."""
    blocks, size, heads, dim = key_cache.shape
    key = key_cache.permute(0, 2, 1, 3).reshape(blocks, heads, size // 16, 16, dim // 2, 2)
    value = value_cache.permute(0, 2, 1, 3).reshape(blocks, heads, size // 2, 2, dim // 16, 16)
    halves = key.transpose(3, 4), value.permute(0, 1, 4, 2, 5, 3)
    both = torch.cat([half.reshape(blocks, heads, -1) for half in halves], dim=-1)
    return both.view(blocks, heads, size, 2 * dim)
