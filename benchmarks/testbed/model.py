"""A small Llama or Qwen3 in plain torch: the same parameters, names and arithmetic as in transformers.

Attention is spelled out as two matrix products, because the CPU backward pass of torch's fused attention is
several times slower at this size. A few heads start out as "look k tokens back" and as "look where this was
said", which small models otherwise take most of their training to find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelShape:
    """The architecture. Fields have the names of those in transformers' LlamaConfig and Qwen3Config."""

    vocab_size: int
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    head_dim: int = 32
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    model_type: str = "llama"
    """`llama`, or `qwen3`, which normalises queries and keys, head by head, before RoPE."""

    @property
    def normalises_heads(self) -> bool:
        return self.model_type == "qwen3"


def rotation(shape: ModelShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE, each [..., tokens, head_dim] in fp32, in transformers' half-split order."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to x [..., tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query causal attention. A QK-norm has one set of weights for all heads of the layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        width = shape.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=shape.rms_norm_eps) if shape.normalises_heads else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [batch, tokens, width]; cos and sin [batch or 1, 1, tokens, head_dim]; mask [tokens, tokens] is
        added to the scores."""
        batch, tokens, _ = x.shape
        group = self.heads // self.kv_heads
        q = self.q_norm(self.q_proj(x).view(batch, tokens, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        # Queries are scaled instead of scores, which are many times as many numbers.
        q = rotate(q, cos, sin) * (1.0 / math.sqrt(self.head_dim))
        q = q.reshape(batch * self.kv_heads, group * tokens, self.head_dim)
        k = rotate(k, cos, sin).reshape(batch * self.kv_heads, tokens, self.head_dim)
        v = v.reshape(batch * self.kv_heads, tokens, self.head_dim)
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch * self.kv_heads, group, tokens, tokens) + mask
        weights = torch.softmax(scores, dim=-1).view(batch * self.kv_heads, group * tokens, tokens)
        mixed = torch.bmm(weights, v).view(batch, self.heads, tokens, self.head_dim)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_dim))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer, normalised before each part."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class TinyModel(nn.Module):
    """The whole model; its state dict is that of transformers' LlamaForCausalLM or Qwen3ForCausalLM."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def decoder_layers(self) -> list[Layer]:
        """The decoder layers, in order."""
        return cast(list[Layer], list(self.model.layers))

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of token ids [batch, tokens]: after `READING_LAYERS` layers, and after the last.

        Both [batch, tokens, width] and normalised, the first without a gain.
        """
        x = self.model.embed_tokens(tokens)
        read = x
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, mask)
            if index + 1 == READING_LAYERS:
                read = functional.rms_norm(x, (self.shape.hidden_size,))
        return read, self.model.norm(x)


def causal_mask(tokens: int) -> Tensor:
    """[tokens, tokens]: 0 where a query may look, a large negative number above the diagonal."""
    return torch.full((tokens, tokens), -1e4).triu(1)


CONSTANT_CHANNEL = 0
CONSTANT_VALUE = 4.0
LOCAL_HEADS = ((0, 1), (1, 2), (2, 3), (3, 4))
"""(query head, how many tokens back) in layer 0."""
COMMON_SHARE = 1.6
OWN_SHARE = 2.5
"""How strongly a local head writes which words stand nearby, and which stands how far back."""
ALIKE_SHARE = 0.6
SLOWEST_TURN = 0.004
"""Radians a token; slower frequencies turn little over a few hundred tokens."""
MATCH_GAIN = 1.9
COPY_GAIN = 2.0
"""How strongly the heads of one key head together pass on what they attend to."""
NORM_GAIN = 1.75
"""Weight of a QK-norm in the channels that matching heads compare. The norm takes away how long queries and
keys are; with this weight a match scores as in a model without the norm."""
HEAD_GAIN = 0.05
RESOLVING = ((1, (0, 1)), (2, (0, 1)))
"""(layer, key heads) that start by attending from a word to what followed an earlier mention of it."""
RETRIEVE_GAIN = 2.5
RETRIEVING = ((4, (0, 1)), (5, (0, 1)))
"""(layer, key heads) that start by attending after an earlier mention of what stands one token back; the
second key head of each layer, of what stands two back.

They lie after `READING_LAYERS`: a question that finds its fact while references are still being resolved
reads an unresolved one, and a model left to itself settles there, because that is enough for
self-contained facts."""
READING_LAYERS = 4
"""Training asks the hidden states after this many layers what each reference stands for."""


@torch.no_grad()
def initialise(model: TinyModel, seed: int) -> None:
    """Unit-scale embeddings, orthogonal-ish projections, silent outputs, and local heads."""
    torch.manual_seed(seed)
    shape = model.shape
    embeddings = model.model.embed_tokens.weight
    nn.init.normal_(embeddings, std=1.0)
    embeddings[:, CONSTANT_CHANNEL] = CONSTANT_VALUE
    # What a head copies can be said at once: the first gradients already favour copying the right word.
    model.lm_head.weight.copy_(HEAD_GAIN * embeddings)
    for layer in model.decoder_layers():
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            nn.init.orthogonal_(linear.weight)
        prefer_alike(layer.self_attn)
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            nn.init.normal_(linear.weight, std=shape.hidden_size**-0.5)
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    layers = model.decoder_layers()
    copied, common, own = seed_local_heads(layers[0].self_attn, shape)
    for index, kv_heads in RESOLVING:
        for kv_head in kv_heads:
            seed_matching_head(layers[index].self_attn, shape, copied, common.T, kv_head, MATCH_GAIN)
    for index, kv_heads in RETRIEVING:
        for back, kv_head in enumerate(kv_heads):
            sought, found = own[back].T, own[back + 1].T
            seed_matching_head(layers[index].self_attn, shape, sought, found, kv_head, RETRIEVE_GAIN)


@torch.no_grad()
def prefer_alike(attention: Attention) -> None:
    """Starts the first query head of each group close to its key head, so that it leans to like content.

    Finding a fact by two of its words is then a matter of sharpening, not of aligning two random maps.
    """
    group, dim = attention.heads // attention.kv_heads, attention.head_dim
    for kv_head in range(attention.kv_heads):
        rows = slice(kv_head * group * dim, (kv_head * group + 1) * dim)
        keys = attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim]
        attention.q_proj.weight[rows] = ALIKE_SHARE * keys + (1 - ALIKE_SHARE) * attention.q_proj.weight[rows]


@torch.no_grad()
def seed_local_heads(attention: Attention, shape: ModelShape) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Makes some heads attend a fixed number of tokens back, copying what stands there.

    Query and key read one channel that is the same in every token, so that the score depends on distance
    alone: sum over frequencies f of a_f cos(f (distance - back)), which peaks at `back`.
    What the heads copy lands half in a subspace they share (which words stand nearby) and half in one of
    their own (which word stands how far back).

    Returns:
        (what is copied of a word [head_dim, width], where the shared half lands [width, head_dim], where the
        own halves land, nearest token first).
    """
    half, dim = shape.head_dim // 2, shape.head_dim
    norm = math.sqrt(1.0 + (CONSTANT_VALUE**2 - 1.0) / shape.hidden_size)
    constant = CONSTANT_VALUE / norm
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    amplitude = torch.where(torch.arange(half) < 6, 6.0, 0.0)
    group = shape.num_attention_heads // shape.num_key_value_heads
    kv_heads = sorted({head // group for head, _ in LOCAL_HEADS})
    for kv_head in kv_heads[1:]:
        attention.v_proj.weight[kv_head * dim : (kv_head + 1) * dim] = attention.v_proj.weight[:dim]
    landing = nn.init.orthogonal_(torch.empty(shape.hidden_size, shape.hidden_size))
    common, *own = torch.split(landing[:, : dim * (1 + len(LOCAL_HEADS))], dim, dim=1)
    strong = torch.nonzero(amplitude.repeat(2)).flatten()
    weigh_heads(attention, strong, float(amplitude.square().sum() / dim) ** 0.5)
    for index, (head, back) in enumerate(LOCAL_HEADS):
        kv_head = head // group
        key_rows = slice(kv_head * dim, kv_head * dim + half)
        attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim] = 0.0
        attention.k_proj.weight[key_rows, CONSTANT_CHANNEL] = amplitude / constant
        rows = slice(head * dim, (head + 1) * dim)
        query = torch.cat((amplitude * (back * frequencies).cos(), -amplitude * (back * frequencies).sin()))
        attention.q_proj.weight[rows] = 0.0
        attention.q_proj.weight[rows, CONSTANT_CHANNEL] = query / constant
        attention.o_proj.weight[:, rows] = COMMON_SHARE * common + OWN_SHARE * own[index]
    return attention.v_proj.weight[:dim].clone(), common, own


@torch.no_grad()
def weigh_heads(attention: Attention, channels: Tensor, weight: float) -> None:
    """Sets what a QK-norm multiplies these channels of every query and key by; nothing without the norm."""
    for norm in (attention.q_norm, attention.k_norm):
        if isinstance(norm, nn.RMSNorm):
            norm.weight[channels] = weight


@torch.no_grad()
def seed_matching_head(
    attention: Attention, shape: ModelShape, sought: Tensor, found: Tensor, kv_head: int, gain: float
) -> None:
    """Makes the heads of a key head attend to tokens in which `found` reads the same value as `sought` reads
    in the query.

    Both [head_dim, width]. Only RoPE's slow frequencies are used: a match must count alike at any distance of
    a prompt. What such a head attends to is passed on as it is, so that a resolved reference looks like the
    word it stands for.
    """
    half, dim = shape.head_dim // 2, shape.head_dim
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    slow = torch.nonzero(frequencies < SLOWEST_TURN).flatten()
    group = shape.num_attention_heads // shape.num_key_value_heads
    mixing = nn.init.orthogonal_(torch.empty(2 * len(slow), dim))
    rows = torch.cat((slow, slow + half))
    values = attention.v_proj.weight[kv_head * dim : (kv_head + 1) * dim]
    weigh_heads(attention, rows, NORM_GAIN)
    attention.k_proj.weight[kv_head * dim + rows] = gain * mixing @ found
    for head in range(kv_head * group, (kv_head + 1) * group):
        attention.q_proj.weight[head * dim + rows] = gain * mixing @ sought
        attention.o_proj.weight[:, head * dim : (head + 1) * dim] = COPY_GAIN / group * values.T
