"""Attention over cached latents for the vLLM backend whose prefill does not read the cache.

On a CPU without AMX, and in float32 on every CPU, vLLM's latent attention prefills only whole prompts: it has
no prefix caching and no chunked prefill there. Scattered tokens, and chunks after a context, follow cached
tokens. `fusor.latent` computes their attention, in place of the layer's attention during one call. All other
backends read the cache themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kintsugi.fusor.latent import attend_to_latents

BACKENDS = frozenset({"CPU_MLA"})
"""vLLM's backends whose prefill does not read the cache."""


@dataclass(frozen=True)
class LatentRows:
    """Adjacent tokens of one sequence in a batch."""

    rows: slice
    places: Tensor
    """Places of the tokens, int64 `[n]`."""
    slots: Tensor
    """Cache slots of the sequence, int64 `[last place + 1]`."""


def is_latent(attention: Any) -> bool:
    """Return whether an attention stores latents instead of K and V."""
    return hasattr(attention, "kv_lora_rank")


def needs_rows(attention: Any) -> bool:
    """Return whether tokens after cached ones need `replace_latent_attention`."""
    return attention.attn_backend.get_name() in BACKENDS


@contextlib.contextmanager
def replace_latent_attention(attention: Any, sequences: Sequence[LatentRows]) -> Iterator[None]:
    """Replace `attention.forward_impl` in the block by attention over the layer's cache."""

    def attend(query: Tensor, latent: Tensor, key: Tensor, cache: Tensor, *_: Any, **named: Any) -> Tensor:
        """As `MLAAttention.forward_impl`; the tokens' own latents are already in the cache."""
        output: Tensor = named["output"]
        flat = cache.view(-1, cache.shape[-1])
        for one in sequences:
            attended = attend_to_latents(
                query[one.rows],
                flat[one.slots],
                one.places,
                attention.W_UK_T,
                attention.W_UV,
                attention.impl.scale,
            )
            output[one.rows] = attended.flatten(1)
        return output

    attention.__dict__["forward_impl"] = attend
    try:
        yield
    finally:
        del attention.__dict__["forward_impl"]
