"""A hybrid in Granite 4's architecture: Mamba-2 in the place of attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.testbed.converted import bundled_fields
from benchmarks.testbed.hybrid_kind import ATTENDING, TAPS, Kind, constant_of, layer_types, places_back
from benchmarks.testbed.model import Attention, ModelShape, TinyModel

HEADS, WIDTH, STATE = 6, 64, 32
"""Sizes of Mamba-2: number of heads, their width, width of the state."""
INNER = HEADS * WIDTH


class Mamba2(nn.Module):
    """Mamba-2 with one group, by the names of transformers' GraniteMoeHybridMambaLayer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.in_proj = nn.Linear(shape.hidden_size, 2 * INNER + 2 * STATE + HEADS, bias=False)
        channels = INNER + 2 * STATE
        self.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels, padding=TAPS - 1)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.zeros(HEADS)) for _ in range(3))
        self.norm = nn.RMSNorm(INNER, eps=shape.rms_norm_eps)
        self.out_proj = nn.Linear(INNER, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """As `model.Attention.forward`; reads x alone. The scan is written as attention with decays."""
        batch, tokens, _ = x.shape
        projected: Tensor = self.in_proj(x)
        gate, mixed, step = torch.split(projected, [INNER, INNER + 2 * STATE, HEADS], -1)
        mixed = functional.silu(self.conv1d(mixed.transpose(1, 2))[..., :tokens]).transpose(1, 2)
        value, write, read = torch.split(mixed, [INNER, STATE, STATE], -1)
        value = value.view(batch, tokens, HEADS, WIDTH).transpose(1, 2)
        step = functional.softplus(step + self.dt_bias).transpose(1, 2)
        decay = (-self.A_log.exp()[:, None] * step).cumsum(-1)
        kept = (decay[..., :, None] - decay[..., None, :] + mask).exp()
        scores = (read @ write.transpose(1, 2))[:, None] * kept * step[..., None, :]
        out = scores @ value + self.D[:, None, None] * value
        out = out.transpose(1, 2).reshape(batch, tokens, INNER) * functional.silu(gate)
        result: Tensor = self.out_proj(self.norm(out))
        return result


class Mamba2Kind(Kind):
    """Granite 4's architecture."""

    @torch.no_grad()
    def make_mixer(self, shape: ModelShape) -> nn.Module:
        """Return a mixer that gives nothing yet."""
        made = Mamba2(shape)
        nn.init.normal_(made.in_proj.weight, std=shape.hidden_size**-0.5)
        nn.init.normal_(made.conv1d.weight, std=0.1)
        made.conv1d.weight[:, 0, -1] += 1.0
        assert made.conv1d.bias is not None
        nn.init.zeros_(made.conv1d.bias)
        steps = torch.logspace(-2, -0.5, HEADS)
        made.dt_bias.copy_(steps.expm1().log())
        made.A_log.copy_(torch.linspace(1, 8, HEADS).log())
        nn.init.ones_(made.D)
        nn.init.zeros_(made.out_proj.weight)
        return made

    @torch.no_grad()
    def look_back(self, mixer: Any, attention: Attention, inputs: Tensor) -> None:
        """Begin as what the local heads do.

        A tap of the convolution is a number of tokens back. SiLU is undone by a second channel of the other
        sign: silu(x) - silu(-x) = x. A head of the mixer is one local head's two signs.
        """
        dim = attention.head_dim
        constant = constant_of(inputs)
        mixer.in_proj.weight[:INNER] = 4.0 * constant
        mixer.norm.weight.fill_(0.1)
        group = attention.heads // attention.kv_heads
        for place, head, back in places_back():
            rows = slice(place * WIDTH, (place + 1) * WIDTH)
            kv_head = head // group
            values = attention.v_proj.weight[kv_head * dim : (kv_head + 1) * dim]
            mixer.in_proj.weight[INNER:][rows] = torch.cat((values, -values))
            mixer.conv1d.weight[rows] = 0.0
            mixer.conv1d.weight[rows, 0, TAPS - 1 - back] = 1.0
            written = attention.o_proj.weight[:, head * dim : (head + 1) * dim]
            mixer.out_proj.weight[:, rows] = 10.0 * torch.cat((written, -written), 1)
            mixer.dt_bias[place] = -6.0
        # The last head's value is the same in every token and large, so the norm divides by about the same.
        last = slice(INNER - WIDTH, INNER)
        mixer.in_proj.weight[INNER:][last] = 2.0 * constant
        mixer.conv1d.weight[last] = 0.0
        mixer.conv1d.weight[last, 0, -1] = 1.0
        mixer.dt_bias[-1] = -6.0

    def config_of(self, shape: ModelShape) -> dict[str, object]:
        """Return the checkpoint's config."""
        more = ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "hidden_act", "attention_bias")
        return {
            **bundled_fields(*more),
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": layer_types(shape),
            "position_embedding_type": "rope",
            "attention_multiplier": 1.0 / math.sqrt(shape.head_dim),
            "shared_intermediate_size": shape.intermediate_size,
            "num_local_experts": 0,
            "mamba_n_heads": HEADS,
            "mamba_d_head": WIDTH,
            "mamba_d_state": STATE,
            "mamba_d_conv": TAPS,
            "mamba_expand": INNER // shape.hidden_size,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "tie_word_embeddings": False,
        }

    def checkpoint_weights(self, model: TinyModel) -> dict[str, Tensor]:
        """Return the state dict by the names of transformers' GraniteMoeHybridForCausalLM."""
        weights = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
        for index in range(model.shape.num_hidden_layers):
            layer = f"model.layers.{index}."
            gate, up, down = (
                weights.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up", "down")
            )
            weights[f"{layer}shared_mlp.input_linear.weight"] = torch.cat((gate, up))
            weights[f"{layer}shared_mlp.output_linear.weight"] = down
            if index not in ATTENDING:
                for name in [name for name in weights if name.startswith(f"{layer}self_attn.")]:
                    weights[name.replace("self_attn", "mamba")] = weights.pop(name)
        return weights
