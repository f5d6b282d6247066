"""Attention over cached latents for the vLLM backend whose prefill reads none.

On a CPU without AMX, and in float32 on every CPU, vLLM prefills latent attention from a prompt's first token
alone: it has no prefix caching and no chunked prefill there. Scattered tokens, and chunks behind a context,
stand behind tokens that are in the cache already. `fusor.latent` lets them attend, in the place of the
layer's attention for the length of one call. Every other backend serves them itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kintsugi.fusor.latent import attend_to_latents

BACKENDS = frozenset({"CPU_MLA"})
"""vLLM's backends whose prefill reads no cache."""


@dataclass(frozen=True)
class LatentRows:
    """Tokens of one sequence, next to each other in a batch."""

    rows: slice
    places: Tensor
    """int64 `[n]`."""
    slots: Tensor
    """int64 `[last place + 1]`: where the sequence lies in the cache."""


def needs_rows(attention: Any) -> bool:
    """Whether tokens behind cached ones need `replace_latent_attention`."""
    return attention.attn_backend.get_name() in BACKENDS


@contextlib.contextmanager
def replace_latent_attention(attention: Any, sequences: Sequence[LatentRows]) -> Iterator[None]:
    """Attend to the layer's cache in the place of `attention.forward_impl`."""

    def attend(query: Tensor, latent: Tensor, key: Tensor, cache: Tensor, *_: Any, **named: Any) -> Tensor:
        """As `MLAAttention.forward_impl`; the tokens' own latents are in the cache already."""
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
