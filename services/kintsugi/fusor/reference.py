"""Scattered attention in plain torch: slow, obviously correct, and used when there is no GPU."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Compute `fusor.attention.attend_scattered`, one kv head at a time.

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
