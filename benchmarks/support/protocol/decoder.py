"""Llama's and Qwen2's decoder in plain torch with a checkpoint's weights, behind `fusor.stack.DecoderStack`.

Blends run through the fusor's own passes, loader and codecs; only vLLM's layers are replaced. An engine takes
half a minute to start and serves one configuration of chunks; this decoder serves all of them in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from kintsugi.core.errors import InvalidField
from kintsugi.core.layout import KVLayout, Part
from kintsugi.fusor.rope import Rotary
from kintsugi.fusor.stack import AttentionRule, FreshKV, Hidden, LayerBatch, Slots, T

MODEL_TYPES = ("llama", "qwen2")


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights, fp32 `[out, in]`."""

    before_attention: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class KV:
    """K before RoPE and V of some tokens, `[layers, tokens, kv_heads, head_dim]`."""

    key: Tensor
    value: Tensor


class Decoder:
    """A checkpoint's weights and the formulas of one layer. Computes in fp32."""

    def __init__(self, folder: Path, positions_max: int) -> None:
        """Read a checkpoint of one safetensors file. Raises `InvalidField` for other architectures."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if config["model_type"] not in MODEL_TYPES:
            raise InvalidField("model", f"{config['model_type']} is not one of {', '.join(MODEL_TYPES)}")
        self.num_layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.epsilon: float = config["rms_norm_eps"]
        self.stops = _stop_tokens(folder, config)
        weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.unembedding = weights.get("lm_head.weight", self.embedding)
        self.last_norm = weights["model.norm.weight"]
        self.layers = [_layer_weights(weights, layer) for layer in range(self.num_layers)]
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.head_dim, 2).double() / self.head_dim)
        angles = torch.arange(positions_max).double()[:, None] * frequencies
        self.rotary = Rotary(angles.cos().float(), angles.sin().float(), is_neox=True)
        self.layout = KVLayout.uniform(self.num_layers, self.kv_heads, self.head_dim, "bfloat16")
        qkv, mlp = self.layers[0].qkv.numel(), self.layers[0].gate_up.numel() + self.layers[0].down.numel()
        self.projection_share = qkv / (qkv + self.layers[0].output.numel() + mlp)

    def project(self, layer: int, stream: Tensor, positions: Tensor) -> FreshKV:
        """Return Q, K and V of tokens with the residual stream `[tokens, hidden]`."""
        weights, d = self.layers[layer], self.head_dim
        normed = rms_norm(stream, stream.shape[-1:], weights.before_attention, self.epsilon)
        sizes = [self.heads * d, self.kv_heads * d, self.kv_heads * d]
        query, key, value = (
            part.view(len(stream), -1, d)
            for part in torch.split(linear(normed, weights.qkv, weights.qkv_bias), sizes, -1)
        )
        return FreshKV(self.rotary.rotate(query, positions), key, self.rotary.rotate(key, positions), value)

    def finish(self, layer: int, stream: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output from its input and its attention's result `[tokens, heads, head_dim]`."""
        weights = self.layers[layer]
        stream = stream + linear(attended.flatten(1), weights.output)
        normed = rms_norm(stream, stream.shape[-1:], weights.before_mlp, self.epsilon)
        gate, up = linear(normed, weights.gate_up).chunk(2, -1)
        return stream + linear(silu(gate).mul_(up), weights.down)

    def logits(self, stream: Tensor) -> Tensor:
        normed = rms_norm(stream, stream.shape[-1:], self.last_norm, self.epsilon)
        return linear(normed, self.unembedding)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, past: KV | None = None) -> KV:
        """Compute int64 `token_ids` `[tokens]` after `past`. Returns the KV of both."""
        start = 0 if past is None else past.key.shape[1]
        positions = torch.arange(start, start + len(token_ids))
        every = torch.arange(start + len(token_ids))
        visible = every[None] <= positions[:, None]
        stream, keys, values = self.embedding[token_ids], [], []
        for layer in range(self.num_layers):
            fresh = self.project(layer, stream, positions)
            assert fresh.key_before_rope is not None
            key, value = fresh.key_before_rope, fresh.value
            if past is not None:
                key, value = torch.cat((past.key[layer], key)), torch.cat((past.value[layer], value))
            rotated = self.rotary.rotate(key, every)
            stream = self.finish(layer, stream, attend(fresh.query, rotated, value, visible))
            keys.append(key)
            values.append(value)
        return KV(torch.stack(keys), torch.stack(values))


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention of `[queries, heads, head_dim]` over `[keys, kv_heads, head_dim]` where `visible`, a mask
    `[queries, keys]`."""
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    is_square = visible.shape[0] == visible.shape[1]
    attended = scaled_dot_product_attention(
        query, key, value, None if is_square else visible, is_causal=is_square, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _layer_weights(weights: dict[str, Tensor], layer: int) -> LayerWeights:
    def of(name: str) -> Tensor:
        return weights[f"model.layers.{layer}.{name}"]

    projections = [f"self_attn.{one}_proj" for one in "qkv"]
    has_bias = f"model.layers.{layer}.self_attn.q_proj.bias" in weights
    return LayerWeights(
        of("input_layernorm.weight"),
        torch.cat([of(f"{one}.weight") for one in projections]),
        torch.cat([of(f"{one}.bias") for one in projections]) if has_bias else None,
        of("self_attn.o_proj.weight"),
        of("post_attention_layernorm.weight"),
        torch.cat([of("mlp.gate_proj.weight"), of("mlp.up_proj.weight")]),
        of("mlp.down_proj.weight"),
    )


def _stop_tokens(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    found = config["eos_token_id"] if found is None else found
    return frozenset(found if isinstance(found, list) else [found])


class PlainStack:
    """`DecoderStack` for one sequence over a dense cache of `places`."""

    world_size = 1
    failure = None
    sees_order_alone = True
    device = torch.device("cpu")

    def __init__(self, decoder: Decoder, places: int) -> None:
        self.decoder, self.num_layers = decoder, decoder.num_layers
        self.projection_share = decoder.projection_share
        self.attending = tuple(range(decoder.num_layers))
        shape = (decoder.num_layers, places, decoder.kv_heads, decoder.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def with_own_cache(self, start: int, end: int) -> PlainStack:
        own = PlainStack(self.decoder, end)
        own.keys[:, :start], own.values[:, :start] = self.keys[:, :start], self.values[:, :start]
        return own

    def contain(self, act: Callable[[], T], otherwise: Callable[[], T]) -> T:
        return act()

    def batch(
        self, positions: Tensor, owners: Tensor | None = None, places: Tensor | None = None
    ) -> LayerBatch:
        assert owners is None
        places = positions if places is None else places
        visible = torch.arange(int(places[-1]) + 1)[None] <= places[:, None]
        return LayerBatch(len(positions), (positions, places, visible))

    def slots(self, places: Tensor) -> Slots:
        return Slots(places)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        return Hidden(self.decoder.embedding[token_ids], None)

    def begin_layer(self, layer: int) -> None:
        """Do nothing: a pass needs no preparation."""

    def end_layer(self, layer: int) -> None:
        """Do nothing: nothing needs to be restored."""

    def keeps_layer(self, layer: int) -> bool:
        return True

    def write_kv(self, layer: int, slots: Slots, key: Tensor, value: Tensor) -> None:
        self.keys[layer, slots.prepared] = key.float()
        self.values[layer, slots.prepared] = value.float()

    def project_kv(self, layer: int, hidden: Hidden, batch: LayerBatch) -> FreshKV:
        return self.decoder.project(layer, hidden.states, batch.prepared[0])

    def run_layer(
        self, layer: int, hidden: Hidden, batch: LayerBatch, capture: bool = False
    ) -> FreshKV | None:
        positions, places, visible = batch.prepared
        fresh = self.decoder.project(layer, hidden.states, positions)
        self.keys[layer, places], self.values[layer, places] = fresh.key, fresh.value
        end = visible.shape[1]
        attended = attend(fresh.query, self.keys[layer, :end], self.values[layer, :end], visible)
        hidden.states = self.decoder.finish(layer, hidden.states, attended)
        return fresh if capture else None

    def parts(self, layer: int) -> tuple[Part, ...]:
        return self.decoder.layout.group_of(layer).parts

    def attention_rule(self, layer: int) -> AttentionRule:
        return AttentionRule(self.decoder.head_dim**-0.5)

    def end_pass(self) -> Callable[[], bool]:
        return lambda: True

    def gather_heads(self, layer: int, values: Tensor) -> Tensor:
        return values

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, start: int) -> Tensor:
        """Compute int64 `token_ids` at positions from `start`, over what the cache holds. Returns the last
        layer's output `[tokens, hidden]`."""
        positions = torch.arange(start, start + len(token_ids))
        hidden, batch = self.embed(token_ids, positions), self.batch(positions)
        for layer in range(self.num_layers):
            self.run_layer(layer, hidden, batch)
        return hidden.states
