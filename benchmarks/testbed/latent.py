"""Turns the bundled model into one with multi-head latent attention, and trains it on until it reads again.

    python -m benchmarks.testbed.latent --out runs/latent [--steps N]

A model with latents that reads across chunks would take as long to train as the bundled one did. So it starts
from that one's weights. A layer's latent is its whole normalised input, from which every head's V and
unrotated K follow exactly. What cannot follow is rotation: latent attention has one rotary key for all heads,
and the bundled model one for each of three. Per frequency the strongest head's is kept and the others are
expressed by it, as far as they can be; slow frequencies, which turn little within a prompt, are left
unrotated. Training, which is `benchmarks.testbed.train`'s at a lower rate, mends the rest.

The same code, steps and torch give the same weights on one kind of processor with one thread.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.testbed.converted import bundled_fields, digest_of, run, write_files
from benchmarks.testbed.evaluate import Bundle
from benchmarks.testbed.model import Attention, ModelShape, TinyModel, rotate
from benchmarks.testbed.recipes import CURRICULUM, Rates
from benchmarks.testbed.tokenizer import build_vocabulary
from benchmarks.testbed.train import Muon, forward_loss, learning_scale, make_batch
from kintsugi.models.bundled import bundled_checkpoint

VERSION = 1
"""Increase this when the same steps give other weights."""
RANK, ROTARY = 512, 64
"""Widths of the latent and of the rotary key: those that vLLM's CPU kernels know."""
STEPS = 240
STAGES = (CURRICULUM[3], CURRICULUM[4])
"""Steps take turns."""
RATES = Rates(muon=0.004, adam=4e-4, warmup_steps=20, decay_share=0.6)
SEED = 7
SLOWEST_TURN = 0.004
"""Radians a token: slower pairs are left unrotated."""
NORM_EPS = 1e-6
"""What the classes of transformers and vLLM use for a latent's norm."""


class LatentAttention(nn.Module):
    """Multi-head latent attention without a low rank for queries, by DeepSeek-V2's names.

    Rotary pairs are halves here, as in `model.rotate`; `checkpoint_weights` puts them side by side, as the
    checkpoint has them.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.width, hidden = shape.num_attention_heads, shape.head_dim, shape.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * (self.width + ROTARY), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, RANK + ROTARY, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(RANK, eps=NORM_EPS)
        self.kv_b_proj = nn.Linear(RANK, 2 * self.heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """As `model.Attention.forward`; cos and sin `[batch or 1, 1, tokens, ROTARY]`."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        latent, rotary = self.kv_a_proj_with_mqa(x).split((RANK, ROTARY), -1)
        raised = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, tokens, self.heads, -1)
        key, value = raised.transpose(1, 2).split(self.width, -1)
        rotary = rotate(rotary[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        q = torch.cat((q[..., : self.width], rotate(q[..., self.width :], cos, sin)), -1)
        key = torch.cat((key, rotary.to(key.dtype)), -1)
        scores = (q * (self.width + ROTARY) ** -0.5) @ key.transpose(2, 3) + mask
        mixed = scores.softmax(-1).to(value.dtype) @ value
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


def rotary_shape(shape: ModelShape) -> ModelShape:
    """The shape whose `rotation` is that of the rotary key: every other frequency is the model's own."""
    return replace(shape, head_dim=ROTARY)


@torch.no_grad()
def as_latent(attention: Attention, gain: Tensor, shape: ModelShape) -> LatentAttention:
    """The attention over latents. `gain` `[hidden]` is the weight of the norm before the layer."""
    made, hidden = LatentAttention(shape), shape.hidden_size
    heads, dim, half = attention.heads, attention.head_dim, attention.head_dim // 2
    group = heads // attention.kv_heads
    # Without its norm's gain every input is of one length, so the latent's norm only multiplies it.
    made.kv_a_proj_with_mqa.weight.zero_()
    made.kv_a_proj_with_mqa.weight[:hidden] = torch.diag(1 / gain)
    unscale = math.sqrt(hidden / RANK) * gain
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    slow = torch.nonzero(frequencies < SLOWEST_TURN).flatten()
    still = torch.cat((slow, slow + half))
    queries = attention.q_proj.weight.view(heads, dim, hidden)
    keys = attention.k_proj.weight.view(-1, dim, hidden)
    values = attention.v_proj.weight.view(-1, dim, hidden)
    raised = torch.zeros(heads, 2 * dim, RANK)
    asked = torch.zeros(heads, dim + ROTARY, hidden)
    for head in range(heads):
        raised[head, still, :hidden] = keys[head // group, still] * unscale
        raised[head, dim:, :hidden] = values[head // group] * unscale
        asked[head, still] = queries[head, still]
    for pair in torch.nonzero(frequencies >= SLOWEST_TURN).flatten().tolist():
        # As complex numbers: a rotation multiplies them, and a key is `share` times the one that is kept.
        own = torch.complex(keys[:, pair], keys[:, pair + half])
        asking = torch.complex(queries[:, pair], queries[:, pair + half])
        strength = own.norm(dim=1) * asking.norm(dim=1).view(-1, group).amax(1)
        kept = own[int(strength.argmax())]
        rows = torch.tensor([2 * pair, 2 * pair + ROTARY // 2])
        made.kv_a_proj_with_mqa.weight[RANK + rows] = torch.stack((kept.real, kept.imag))
        for head in range(heads):
            share = (kept.conj() @ own[head // group]) / (kept.conj() @ kept)
            turned = asking[head] * share.conj()
            asked[head, dim + rows] = torch.stack((turned.real, turned.imag))
    made.kv_b_proj.weight.copy_(raised.flatten(0, 1))
    made.q_proj.weight.copy_(asked.flatten(0, 1) * math.sqrt((dim + ROTARY) / dim))
    made.o_proj.weight.copy_(attention.o_proj.weight)
    return made


def convert(model: TinyModel) -> TinyModel:
    """Put `as_latent` in the place of every layer's attention."""
    for layer in model.decoder_layers():
        layer.self_attn = as_latent(layer.self_attn, layer.input_layernorm.weight, model.shape)  # type: ignore[assignment]
    return model


def train(model: TinyModel, steps: int, log: Path) -> None:
    """Train on in place; writes a line of `log` every 20 steps."""
    vocabulary, shape = build_vocabulary(), rotary_shape(model.shape)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n or "lm_head" in n]
    muon = Muon(matrices, RATES.momentum, [], RATES.writer_decay)
    adam = torch.optim.AdamW(others, lr=RATES.adam, betas=(0.9, 0.98), weight_decay=0.0)
    next_seed, totals = SEED * 100_000_000, Counter[str]()
    for step in range(steps):
        stage = STAGES[step % len(STAGES)]
        batch = make_batch(stage, next_seed, vocabulary)
        next_seed += stage.batch
        done = forward_loss(model, model.lm_head, batch, shape)
        done.loss.backward()  # type: ignore[no-untyped-call]
        scale = learning_scale(step, step / steps, RATES)
        nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = RATES.adam * scale
        muon.step(RATES.muon * scale)
        adam.step()
        model.zero_grad(set_to_none=True)
        totals.update(done.count_right(batch))
        if (step + 1) % 20 == 0:
            line = {"step": step + 1, "loss": round(done.loss.item(), 4), **totals}
            with log.open("a") as file:
                print(json.dumps(line), file=file)
            totals.clear()


def config_of(shape: ModelShape) -> dict[str, object]:
    """The checkpoint's config."""
    return {
        **bundled_fields(),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": shape.num_attention_heads,
        "kv_lora_rank": RANK,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROTARY,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "first_k_dense_replace": shape.num_hidden_layers,  # no layer has experts
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        # YaRN by a factor of 1 is the plain rotation.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": shape.rope_theta,
            "factor": 1.0,
            "original_max_position_embeddings": shape.max_position_embeddings,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }


def checkpoint_weights(model: TinyModel) -> dict[str, Tensor]:
    """The state dict with rotary pairs side by side."""
    pairs = torch.arange(ROTARY).view(2, -1).T.flatten()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensor[RANK:] = tensor[RANK:][pairs]
        if name.endswith("q_proj.weight"):
            by_head = tensor.view(model.shape.num_attention_heads, -1, model.shape.hidden_size)
            by_head[:, -ROTARY:] = by_head[:, -ROTARY:][:, pairs]
    return {name: tensor.float().contiguous() for name, tensor in weights.items()}


def write_checkpoint(model: TinyModel, folder: Path) -> None:
    """Everything that transformers and vLLM load."""
    write_files(folder, config_of(model.shape), checkpoint_weights(model))


def recipe_digest(steps: int = STEPS) -> str:
    """Names the recipe: 12 hexadecimal digits."""
    return digest_of(f"{VERSION} {steps} {SEED} {RATES}")


def make_latent_model(folder: Path, steps: int = STEPS) -> None:
    """Convert, train and write the checkpoint."""
    torch.manual_seed(SEED)
    model = convert(Bundle(bundled_checkpoint()).model).train()
    folder.mkdir(parents=True, exist_ok=True)
    train(model, steps, folder / "log.jsonl")
    write_checkpoint(model.eval(), folder)


if __name__ == "__main__":
    run(__doc__, {"latent": make_latent_model}, STEPS)
