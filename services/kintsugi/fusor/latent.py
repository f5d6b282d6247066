"""Attention over latents in plain torch: slow, obviously correct, and used if a backend lacks it.

Multi-head latent attention (DeepSeek-V2, section 2.1) keeps one latent and one rotary key per token for all
heads. A head's K is the latent times `w_uk`, followed by the rotary key, and its V is the latent times
`w_uv`. Neither is computed here: the query is multiplied by `w_uk` instead, so that it attends to the latents
directly, and the weighted sum of latents is multiplied by `w_uv`.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOGITS_MAX = 1 << 23
"""Maximum number of logits in memory at a time: 32 MiB."""


def absorb_query(query: Tensor, w_uk: Tensor) -> Tensor:
    """Convert queries `[n, heads, nope + rotary]` to queries over rotary key and latent, `[n, heads, rotary +
    rank]`, of the same dtype. `w_uk`: `[heads, nope, rank]`."""
    nope = w_uk.shape[1]
    absorbed = torch.einsum("nhp,hpr->nhr", query[..., :nope], w_uk)
    return torch.cat((query[..., nope:], absorbed), -1)


def attend_to_latents(
    query: Tensor, cached: Tensor, positions: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float
) -> Tensor:
    """Compute the attention of queries `[n, heads, nope + rotary]` at int64 `positions` `[n]` to the cached
    tokens up to their own positions. Returns `[n, heads, v_width]` in the query's dtype.

    `cached`: `[tokens, rank + rotary]`, the latent before the rotary key, at positions 0, 1, …; `w_uk`:
    `[heads, nope, rank]`; `w_uv`: `[heads, rank, v_width]`. Everything is computed in fp32.
    """
    rank = w_uk.shape[2]
    latents = cached[:, :rank].float()
    keys = torch.cat((cached[:, rank:].float(), latents), -1)
    absorbed = absorb_query(query.float(), w_uk.float()) * scale
    hidden = torch.arange(len(cached), device=cached.device)[None] > positions[:, None]
    rows = max(1, LOGITS_MAX // (len(cached) * query.shape[1]))
    output = query.new_empty(*query.shape[:2], w_uv.shape[2])
    for start in range(0, len(query), rows):
        mine = slice(start, start + rows)
        logits = absorbed[mine] @ keys.T
        logits.masked_fill_(hidden[mine, None], float("-inf"))
        attended = logits.softmax(-1) @ latents
        output[mine] = torch.einsum("nhr,hrv->nhv", attended, w_uv.float()).to(output.dtype)
    return output
