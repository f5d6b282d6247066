"""What a layer's attention stores of each token: heads of K and V, or a latent with a rotary key beside it.

vLLM has a class for each. They are called with different arguments, and write their caches by different
calls. Everything else in this package asks one of the two classes here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kintsugi.fusor.latent import absorb_query
from kintsugi.models.layers import LayerKind


class HeadsKV:
    """What vLLM's `Attention` stores: K and V of each KV head."""

    kind = LayerKind.ATTENTION

    def __init__(self, attention: Any) -> None:
        self._attention = attention

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return int(self._attention.num_kv_heads)

    @property
    def key_width(self) -> int:
        return int(self._attention.head_size)

    @property
    def value_width(self) -> int:
        return int(self._attention.head_size_v)

    @property
    def query_width(self) -> int:
        return self.key_width

    def tell_apart(self, query: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, K and V, `[tokens, heads, width]`, of what the attention is called with."""
        key, value = self._key_and_value(second, third)
        count = len(query)
        return (
            query.view(count, -1, self.query_width),
            key.view(count, self.heads, self.key_width),
            value.view(count, self.heads, self.value_width),
        )

    def _key_and_value(self, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        return second, third

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write rotated K and V `[tokens, heads, width]` into the slots of the layer's cache."""
        attention = self._attention
        attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)


class LatentKV(HeadsKV):
    """What vLLM's `MLAAttention` stores: the latent in V's place and the rotary key in K's, one of each for
    all heads and all ranks."""

    kind = LayerKind.LATENT

    @property
    def key_width(self) -> int:
        return int(self._attention.qk_rope_head_dim)

    @property
    def value_width(self) -> int:
        return int(self._attention.kv_lora_rank)

    @property
    def query_width(self) -> int:
        return int(self._attention.qk_nope_head_dim + self._attention.qk_rope_head_dim)

    def _key_and_value(self, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        return third, second

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        attention = self._attention
        attention.impl.do_kv_cache_update(
            value[:, 0], key, attention.kv_cache, slots, attention.kv_cache_dtype, attention._k_scale
        )

    def absorb(self, query: Tensor) -> Tensor:
        """As `fusor.latent.absorb_query`, with the weights in the form in which vLLM keeps them."""
        attention = self._attention
        if not getattr(attention, "is_amx_bmm_enabled", False):
            return absorb_query(query, attention.W_UK_T)
        width: int = attention.qk_nope_head_dim
        nope, rotary = query[..., :width], query[..., width:]
        absorbed = query.new_empty(query.shape[1], len(query), self.value_width)
        packed, scale = attention.impl._w_uk_packed, attention.impl._w_scale
        # What `vllm._custom_ops.bmm_cpu` calls; older versions have neither, nor the packed weights.
        torch.ops._C.bmm_cpu(absorbed, nope.transpose(0, 1), packed, True, scale)
        return torch.cat((rotary, absorbed.transpose(0, 1)), -1)


def kv_of(attention: Any) -> HeadsKV:
    """What an attention stores."""
    return LatentKV(attention) if hasattr(attention, "kv_lora_rank") else HeadsKV(attention)
