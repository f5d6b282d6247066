"""The KV that a layer's attention stores per token: heads of K and V, or a latent and a rotary key.

vLLM has a class for each, with different arguments and different calls that write the cache. The rest of this
package uses the two classes here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kintsugi.fusor.latent import absorb_query
from kintsugi.models.layers import LayerKind


class HeadsKV:
    """The KV of vLLM's `Attention`: K and V of each KV head."""

    kind = LayerKind.ATTENTION

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.heads = int(attention.num_kv_heads)
        """KV heads of this rank."""
        self.key_width = self.query_width = int(attention.head_size)
        self.value_width = int(attention.head_size_v)

    def tell_apart(self, query: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, K and V, `[tokens, heads, width]`, from the arguments of the attention."""
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
        """Write rotated K and V, `[tokens, heads, width]`, into slots of the layer's cache."""
        attention = self._attention
        attention.impl.do_kv_cache_update(attention, key, value, attention.kv_cache, slots)


class LatentKV(HeadsKV):
    """The KV of vLLM's `MLAAttention`: the latent in place of V and the rotary key in place of K, shared by
    all heads and ranks."""

    kind = LayerKind.LATENT

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.heads = int(attention.num_kv_heads)
        self.key_width = int(attention.qk_rope_head_dim)
        self.value_width = int(attention.kv_lora_rank)
        self.query_width = int(attention.qk_nope_head_dim) + self.key_width

    def _key_and_value(self, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        return third, second

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        attention = self._attention
        attention.impl.do_kv_cache_update(
            value[:, 0], key, attention.kv_cache, slots, attention.kv_cache_dtype, attention._k_scale
        )

    def absorb(self, query: Tensor) -> Tensor:
        """Absorb a query as `fusor.latent.absorb_query` does, with the weights as vLLM stores them."""
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


def is_latent(attention: Any) -> bool:
    """Return whether an attention stores latents instead of K and V."""
    return hasattr(attention, "kv_lora_rank")


def kv_of(attention: Any) -> HeadsKV:
    """Return the description of the KV that an attention stores."""
    return LatentKV(attention) if is_latent(attention) else HeadsKV(attention)
