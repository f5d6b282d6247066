"""A hybrid in Qwen3.5's architecture: Gated DeltaNet in the place of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.testbed.converted import bundled_fields
from benchmarks.testbed.hybrid_kind import ATTENDING, TAPS, Kind, constant_of, layer_types, places_back
from benchmarks.testbed.model import Attention, ModelShape, TinyModel, rotate

HEADS, WIDTH = 3, 128
"""Number of heads, and the width of their keys and values. Values are twice as wide as the model, as in
Qwen3-Next."""
INNER = HEADS * WIDTH
ATTENTION_WIDTH = 64
"""Width of an attention head. Half of it rotates: that half is the bundled model's head."""
GATE = 4.0
"""Input of the output gate where the layer looks back."""
CONSTANT_SHARE = 4.0
"""Length of a constant channel that keeps what a norm divides by about the same ÷ that of all others."""
FIRST_DECAY, FIRST_STEP = 2.0, 5.0
"""A token's state is e^-10 of the one before where the layer looks back as a convolution does."""


class DeltaNet(nn.Module):
    """Gated DeltaNet, by the names of transformers' Qwen3_5GatedDeltaNet."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.in_proj_qkv = nn.Linear(hidden, 3 * INNER, bias=False)
        self.in_proj_z = nn.Linear(hidden, INNER, bias=False)
        self.in_proj_b, self.in_proj_a = (nn.Linear(hidden, HEADS, bias=False) for _ in range(2))
        self.conv1d = nn.Conv1d(3 * INNER, 3 * INNER, TAPS, groups=3 * INNER, padding=TAPS - 1, bias=False)
        self.dt_bias, self.A_log = (nn.Parameter(torch.zeros(HEADS)) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=shape.rms_norm_eps)
        self.out_proj = nn.Linear(INNER, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """As `model.Attention.forward`; reads x alone. What a token writes depends on what those before it
        wrote, so all are found by one triangular system."""
        batch, tokens, _ = x.shape
        mixed = functional.silu(self.conv1d(self.in_proj_qkv(x).transpose(1, 2))[..., :tokens])
        query, key, value = mixed.view(batch, 3, HEADS, WIDTH, tokens).transpose(3, 4).unbind(1)
        query, key = (functional.normalize(one, dim=-1) for one in (query, key))
        strength = self.in_proj_b(x).sigmoid().transpose(1, 2)[..., None]
        step = functional.softplus(self.in_proj_a(x) + self.dt_bias).transpose(1, 2)
        decay = (-self.A_log.exp()[:, None] * step).cumsum(-1)
        kept = ((decay[..., :, None] - decay[..., None, :]).clamp(max=0.0) + mask).exp()
        erased = (key @ key.transpose(2, 3) * kept * strength).tril(-1)
        written = torch.linalg.solve_triangular(erased, strength * value, upper=False, unitriangular=True)
        out = (query @ key.transpose(2, 3) * kept) @ written * WIDTH**-0.5
        gate = self.in_proj_z(x).view(batch, tokens, HEADS, WIDTH)
        out = self.norm(out.transpose(1, 2)) * functional.silu(gate)
        result: Tensor = self.out_proj(out.reshape(batch, tokens, INNER))
        return result


class GatedAttention(nn.Module):
    """Attention with a QK-norm and an output gate, by the names of transformers' Qwen3_5Attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        hidden, width = shape.hidden_size, ATTENTION_WIDTH
        self.q_proj = nn.Linear(hidden, 2 * self.heads * width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, self.kv_heads * width, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * width, hidden, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=shape.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """As `model.Attention.forward`."""
        batch, tokens, _ = x.shape
        width, group = ATTENTION_WIDTH, self.heads // self.kv_heads
        query, gate = self.q_proj(x).view(batch, tokens, self.heads, 2 * width).chunk(2, -1)
        query = self.q_norm(query).transpose(1, 2)
        key, value = (
            proj(x).view(batch, tokens, self.kv_heads, width) for proj in (self.k_proj, self.v_proj)
        )
        key = self.k_norm(key).transpose(1, 2)
        turned = cos.shape[-1]
        query, key = (
            torch.cat((rotate(one[..., :turned], cos, sin), one[..., turned:]), -1) for one in (query, key)
        )
        key, value = (one.repeat_interleave(group, 1) for one in (key, value.transpose(1, 2)))
        weights = ((query * width**-0.5) @ key.transpose(2, 3) + mask).softmax(-1)
        mixed = (weights @ value).transpose(1, 2) * gate.sigmoid()
        out: Tensor = self.o_proj(mixed.reshape(batch, tokens, -1))
        return out


class DeltaNetKind(Kind):
    """Qwen3.5's architecture."""

    @torch.no_grad()
    def make_mixer(self, shape: ModelShape) -> nn.Module:
        """Return a mixer that gives nothing yet."""
        made = DeltaNet(shape)
        for linear in (made.in_proj_qkv, made.in_proj_z):
            nn.init.normal_(linear.weight, std=shape.hidden_size**-0.5)
        for linear in (made.in_proj_b, made.in_proj_a, made.out_proj):
            nn.init.zeros_(linear.weight)
        nn.init.normal_(made.conv1d.weight, std=0.1)
        made.conv1d.weight[:, 0, -1] += 1.0
        made.dt_bias.copy_(torch.logspace(-2, -0.5, HEADS).expm1().log())
        made.A_log.copy_(torch.linspace(1, 8, HEADS).log())
        return made

    @torch.no_grad()
    def look_back(self, mixer: Any, attention: Attention, inputs: Tensor) -> None:
        """Begin as what the local heads do.

        A tap of the convolution is a number of tokens back. Keys and queries are the same in every token, and
        the state forgets at once, so a token reads what it wrote. SiLU is undone by a second channel of the
        other sign: silu(x) - silu(-x) = x. A last channel of each value is the same in every token and large,
        so the norm divides by about the same.
        """
        dim, constant = attention.head_dim, constant_of(inputs)
        projected, convolved = mixer.in_proj_qkv.weight, mixer.conv1d.weight
        projected[: 2 * INNER] = constant
        convolved[: 2 * INNER] = 0.0
        convolved[: 2 * INNER, 0, -1] = 1.0
        mixer.in_proj_b.weight[:] = 6.0 * constant
        mixer.in_proj_z.weight[:] = GATE * constant
        mixer.dt_bias.fill_(FIRST_STEP)
        mixer.A_log.fill_(math.log(FIRST_DECAY))
        opened = functional.silu(torch.tensor(GATE))
        group = attention.heads // attention.kv_heads
        for place, head, back in places_back():
            kv_head, first = head // group, 2 * INNER + place * WIDTH
            values = attention.v_proj.weight[kv_head * dim : (kv_head + 1) * dim]
            both, last = slice(first, first + 2 * dim), first + WIDTH - 1
            projected[both] = torch.cat((values, -values))
            convolved[first : last + 1] = 0.0
            convolved[both, 0, TAPS - 1 - back] = 1.0
            convolved[both.stop : last + 1, 0, -1] = 1.0
            size = length_of(functional.silu(inputs @ projected[both].T))
            projected[both.stop : last] *= 0.1
            projected[last] = CONSTANT_SHARE * size * constant
            divisor = size * math.sqrt((1 + CONSTANT_SHARE**2) / WIDTH)
            written = attention.o_proj.weight[:, head * dim : (head + 1) * dim] * divisor / opened
            columns = slice(place * WIDTH, place * WIDTH + 2 * dim)
            mixer.out_proj.weight[:, columns] = torch.cat((written, -written), 1)

    @torch.no_grad()
    def keep(self, attention: Attention, inputs: Tensor, shape: ModelShape) -> nn.Module:
        """Return the same attention. A last channel of queries and keys is constant and large, and has the
        weight 0: so the QK-norm divides by about the same."""
        made, constant, dim = GatedAttention(shape), constant_of(inputs), attention.head_dim
        for linear in (made.q_proj, made.k_proj, made.v_proj, made.o_proj):
            nn.init.zeros_(linear.weight)
        queries = made.q_proj.weight.view(made.heads, 2, ATTENTION_WIDTH, -1)[:, 0]
        keys, values = (
            one.weight.view(made.kv_heads, ATTENTION_WIDTH, -1) for one in (made.k_proj, made.v_proj)
        )
        for mine, norm, old in (
            (queries, made.q_norm, attention.q_proj),
            (keys, made.k_norm, attention.k_proj),
        ):
            mine[:, :dim] = old.weight.view(len(mine), dim, -1)
            size = length_of(old(inputs).view(-1, dim))
            mine[:, -1] = CONSTANT_SHARE * size * constant
            divisor = size * math.sqrt((1 + CONSTANT_SHARE**2) / ATTENTION_WIDTH)
            # Scores are divided by the root of the width, which is larger here.
            norm.weight[:dim] = divisor * (ATTENTION_WIDTH / dim) ** 0.25
            norm.weight[-1] = 0.0
        values[:, :dim] = attention.v_proj.weight.view(made.kv_heads, dim, -1)
        # A gate of 0 lets half through.
        written = 2.0 * attention.o_proj.weight.view(-1, made.heads, dim)
        made.o_proj.weight.view(-1, made.heads, ATTENTION_WIDTH)[..., :dim] = written
        return made

    def config_of(self, shape: ModelShape) -> dict[str, object]:
        """Return the checkpoint's config."""
        rotation = {"rope_type": "default", "rope_theta": shape.rope_theta}
        return {
            **bundled_fields("num_key_value_heads", "rms_norm_eps", "hidden_act", "attention_bias"),
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "layer_types": layer_types(shape),
            "head_dim": ATTENTION_WIDTH,
            "rope_parameters": {**rotation, "partial_rotary_factor": shape.head_dim / ATTENTION_WIDTH},
            "linear_conv_kernel_dim": TAPS,
            "linear_num_key_heads": HEADS,
            "linear_num_value_heads": HEADS,
            "linear_key_head_dim": WIDTH,
            "linear_value_head_dim": WIDTH,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
        }

    def checkpoint_weights(self, model: TinyModel) -> dict[str, Tensor]:
        """Return the state dict by the names of transformers' Qwen3_5ForCausalLM. Norms add 1 to weights."""
        weights = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
        for name in [name for name in weights if name.endswith("norm.weight")]:
            weights[name] -= 0.0 if "self_attn.norm" in name else 1.0
        for index in set(range(model.shape.num_hidden_layers)) - set(ATTENDING):
            layer = f"model.layers.{index}."
            for name in [name for name in weights if name.startswith(f"{layer}self_attn.")]:
                weights[name.replace("self_attn", "linear_attn")] = weights.pop(name)
        return weights


def length_of(vectors: Tensor) -> Tensor:
    """Return the root of the mean squared length of vectors `[count, width]`."""
    return vectors.square().sum(-1).mean().sqrt()
