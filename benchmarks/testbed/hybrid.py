"""Turns the bundled model into a hybrid, and trains it on until it reads again.

    python -m benchmarks.testbed.hybrid --kind delta_net --out runs/hybrid [--steps N]

Two of eight layers keep their attention: that which looks references up and that which finds facts. The
others mix tokens by a recurrence: Mamba-2 (`mamba2`) or Gated DeltaNet (`delta_net`). The bundled model's
first layer looks a few tokens back, as a convolution does: there the recurrence begins as that convolution
and is first trained to give what the attention gave. In the other layers it begins silent. Then the whole
model trains on, on the bundled model's own texts.

The same code, steps and torch give the same weights on one kind of processor with one thread.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.testbed.converted import digest_of, run
from benchmarks.testbed.delta_net import DeltaNetKind
from benchmarks.testbed.evaluate import Bundle
from benchmarks.testbed.hybrid_kind import ATTENDING, Kind
from benchmarks.testbed.mamba2 import Mamba2Kind
from benchmarks.testbed.model import TinyModel, causal_mask, rotation
from benchmarks.testbed.recipes import CURRICULUM
from benchmarks.testbed.tokenizer import build_vocabulary
from benchmarks.testbed.train import forward_loss, make_batch
from kintsugi.models.bundled import bundled_checkpoint

VERSION = 1
"""Increase this when the same steps give other weights."""
FIRST_STEPS, FIRST_RATE = 150, 3e-3
"""Steps in which the first layer alone learns what its attention gave."""
STEPS, MIXER_RATE, RATE, WARMUP = 60, 1.5e-3, 3e-4, 5
STAGE = CURRICULUM[4]
SEED = 11


KINDS: dict[str, Kind] = {"mamba2": Mamba2Kind(), "delta_net": DeltaNetKind()}


@torch.no_grad()
def inputs_of(model: TinyModel, vocabulary: dict[str, int]) -> list[Tensor]:
    """Return the input of each layer's attention `[tokens, hidden]`, after its norm, for some texts."""
    batch = make_batch(STAGE, SEED * 10_000_000, vocabulary)
    cos, sin = (part[:, None] for part in rotation(model.shape, batch.positions))
    x, mask, found = model.model.embed_tokens(batch.tokens), causal_mask(batch.tokens.shape[1]), []
    for layer in model.decoder_layers():
        found.append(layer.input_layernorm(x).flatten(0, 1))
        x = layer(x, cos, sin, mask)
    return found


def train_first(kind: Kind, mixer: nn.Module, model: TinyModel, vocabulary: dict[str, int]) -> float:
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
                kind.look_back(mixer, layer.self_attn, inputs.flatten(0, 1))
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


def convert(kind: Kind, model: TinyModel) -> None:
    """Put mixers in the place of attention in the layers that do not keep it."""
    vocabulary, shape = build_vocabulary(), model.shape
    mixers = [kind.make_mixer(shape) for _ in range(shape.num_hidden_layers)]
    train_first(kind, mixers[0], model, vocabulary)
    inputs = inputs_of(model, vocabulary)
    for index, layer in enumerate(model.decoder_layers()):
        kept = kind.keep(layer.self_attn, inputs[index], shape) if index in ATTENDING else mixers[index]
        layer.self_attn = kept  # type: ignore[assignment]


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


def recipe_digest(steps: int = STEPS) -> str:
    """Names the recipe of every kind: 12 hexadecimal digits."""
    return digest_of(f"{VERSION} {FIRST_STEPS} {FIRST_RATE} {steps} {MIXER_RATE} {RATE} {SEED}")


def make_hybrid_model(name: str, folder: Path, steps: int = STEPS) -> None:
    """Convert, train and write the checkpoint."""
    torch.manual_seed(SEED)
    model, kind = Bundle(bundled_checkpoint()).model.train(), KINDS[name]
    convert(kind, model)
    train(model, steps)
    kind.write_checkpoint(model.eval(), folder)


if __name__ == "__main__":
    run(__doc__, {name: partial(make_hybrid_model, name) for name in KINDS}, STEPS)
