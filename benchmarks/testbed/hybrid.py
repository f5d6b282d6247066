"""Turns the bundled model into a hybrid, in Granite 4's architecture, and trains it on until it reads again.

    python -m benchmarks.testbed.hybrid --out runs/hybrid [--steps N]

Two of eight layers keep their attention: that which looks references up and that which finds facts. The
others mix tokens by Mamba-2. The bundled model's first layer looks a few tokens back, as a convolution does:
there Mamba-2 begins as that convolution and is first trained to give what the attention gave. In the
other layers it begins silent. Then the whole model trains on, on the bundled model's own texts.

The same code, steps and torch give the same weights on one kind of processor with one thread.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.testbed.converted import bundled_fields, digest_of, run, write_files
from benchmarks.testbed.evaluate import Bundle
from benchmarks.testbed.model import LOCAL_HEADS, Attention, ModelShape, TinyModel, causal_mask, rotation
from benchmarks.testbed.recipes import CURRICULUM
from benchmarks.testbed.tokenizer import build_vocabulary
from benchmarks.testbed.train import forward_loss, make_batch
from kintsugi.models.bundled import bundled_checkpoint

VERSION = 1
"""Increase this when the same steps give other weights."""
ATTENDING = (1, 4)
"""Layers that keep their attention. Without it in layer 1 the bundled model resolves no reference, without it
in both no question; the other layers' attention it hardly uses, but the first's, which is local."""
HEADS, WIDTH, STATE, TAPS = 6, 64, 32, 4
"""Sizes of Mamba-2: number of heads, their width, width of the state, taps of the convolution."""
INNER = HEADS * WIDTH
FIRST_STEPS, FIRST_RATE = 150, 3e-3
"""Steps in which the first layer alone learns what its attention gave."""
STEPS, MIXER_RATE, RATE, WARMUP = 60, 1.5e-3, 3e-4, 5
STAGE = CURRICULUM[4]
SEED = 11


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


@torch.no_grad()
def make_mixer(shape: ModelShape) -> Mamba2:
    """A mixer that gives nothing yet."""
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
def look_back(mixer: Mamba2, attention: Attention, inputs: Tensor) -> None:
    """Begin as what the local heads do. `inputs` `[tokens, hidden]` of the layer, after its norm.

    A tap of the convolution is a number of tokens back. SiLU is undone by a second channel of the other sign:
    silu(x) - silu(-x) = x. A head of the mixer is one local head's two signs.
    """
    hidden, dim = inputs.shape[1], attention.head_dim
    gram = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(hidden)
    constant = torch.linalg.solve(gram, inputs.sum(0))
    mixer.in_proj.weight[:INNER] = 4.0 * constant
    mixer.norm.weight.fill_(0.1)
    group = attention.heads // attention.kv_heads
    for place, (head, back) in enumerate(one for one in LOCAL_HEADS if one[1] < TAPS):
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


def train_first(mixer: Mamba2, model: TinyModel, vocabulary: dict[str, int]) -> float:
    """Let the first layer's mixer learn what its attention gives. Return what is left, as a share."""
    layer, left = model.decoder_layers()[0], 1.0
    adam = torch.optim.AdamW(mixer.parameters(), lr=FIRST_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(FIRST_STEPS):
        batch = make_batch(STAGE, SEED * 10_000_000 + step * STAGE.batch, vocabulary)
        tokens = batch.tokens[:4]
        cos, sin = (part[:, None] for part in rotation(model.shape, batch.positions[:4]))
        mask = causal_mask(tokens.shape[1])
        with torch.no_grad():
            inputs = layer.input_layernorm(model.model.embed_tokens(tokens))
            wanted = layer.self_attn(inputs, cos, sin, mask)
            if step == 0:
                look_back(mixer, layer.self_attn, inputs.flatten(0, 1))
        missing = (mixer(inputs, cos, sin, mask) - wanted).square().mean() / wanted.square().mean()
        missing.backward()
        left = missing.item()
        scale = min(1.0, (step + 1) / WARMUP, (FIRST_STEPS - step) / (0.5 * FIRST_STEPS))
        for group in adam.param_groups:
            group["lr"] = FIRST_RATE * scale
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(json.dumps({"first_layer_step": step, "left": round(left, 5)}), flush=True)
    return left


def convert(model: TinyModel) -> None:
    """Put mixers in the place of attention in the layers that do not keep it."""
    mixers = {index: make_mixer(model.shape) for index in range(len(model.model.layers))}
    train_first(mixers[0], model, build_vocabulary())
    for index, layer in enumerate(model.decoder_layers()):
        if index not in ATTENDING:
            layer.self_attn = mixers[index]  # type: ignore[assignment]


def train(model: TinyModel, steps: int) -> None:
    """Train on in place; prints a line every 5 steps."""
    vocabulary = build_vocabulary()
    mixers = [p for layer in model.decoder_layers() for p in layer.self_attn.parameters()]
    known = {id(one) for one in mixers}
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": mixers, "peak": MIXER_RATE}, {"params": others, "peak": RATE}]
    adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    totals = Counter[str]()
    for step in range(steps):
        batch = make_batch(STAGE, SEED * 100_000_000 + step * STAGE.batch, vocabulary)
        done = forward_loss(model, model.lm_head, batch, model.shape, torch.float32)
        done.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / WARMUP, max(0.02, (steps - step) / (0.6 * steps)))
        for group in adam.param_groups:
            group["lr"] = group["peak"] * scale
        adam.step()
        model.zero_grad(set_to_none=True)
        totals.update(done.count_right(batch))
        if (step + 1) % 5 == 0:
            print(json.dumps({"step": step + 1, "loss": round(done.loss.item(), 4), **totals}), flush=True)
            totals.clear()


def config_of(shape: ModelShape) -> dict[str, object]:
    """The checkpoint's config."""
    more = ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "hidden_act", "attention_bias")
    return {
        **bundled_fields(*more),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": [
            "full_attention" if index in ATTENDING else "linear_attention"
            for index in range(shape.num_hidden_layers)
        ],
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


def checkpoint_weights(model: TinyModel) -> dict[str, Tensor]:
    """The state dict by the names of transformers' GraniteMoeHybridForCausalLM."""
    weights = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
    for index in range(model.shape.num_hidden_layers):
        layer = f"model.layers.{index}."
        gate, up, down = (weights.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        weights[f"{layer}shared_mlp.input_linear.weight"] = torch.cat((gate, up))
        weights[f"{layer}shared_mlp.output_linear.weight"] = down
        if index not in ATTENDING:
            for name in [name for name in weights if name.startswith(f"{layer}self_attn.")]:
                weights[name.replace("self_attn", "mamba")] = weights.pop(name)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def write_checkpoint(model: TinyModel, folder: Path) -> None:
    """Everything that transformers and vLLM load."""
    write_files(folder, config_of(model.shape), checkpoint_weights(model))


def recipe_digest(steps: int = STEPS) -> str:
    """Names the recipe: 12 hexadecimal digits."""
    return digest_of(f"{VERSION} {FIRST_STEPS} {FIRST_RATE} {steps} {MIXER_RATE} {RATE} {SEED}")


def make_hybrid_model(folder: Path, steps: int = STEPS) -> None:
    """Convert, train and write the checkpoint."""
    torch.manual_seed(SEED)
    model = Bundle(bundled_checkpoint()).model.train()
    convert(model)
    train(model, steps)
    write_checkpoint(model.eval(), folder)


if __name__ == "__main__":
    run(__doc__, make_hybrid_model, STEPS)
