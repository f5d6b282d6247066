"""Trains a small model on the testbed: ordinary causal full attention, a curriculum, one CPU core.

    python -m benchmarks.testbed.train --out runs/a [--recipe qwen3] [--resume runs/a/state.pt]

Nothing here knows about blending: a training row is a whole document under plain causal attention, followed
by questions and answers. Beside the next word, training asks for what a reference stands for, of the hidden
states a few layers deep (`REFERENCE_WEIGHT`): models of this size otherwise look references up only when a
question is asked. Matrices train with Muon, embeddings, head and norms with AdamW.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.testbed.generator import ANSWER_WEIGHT, make_training_text
from benchmarks.testbed.model import ModelShape, TinyModel, causal_mask, initialise, rotation
from benchmarks.testbed.recipes import CURRICULUM, RECIPES, Rates, Recipe, Stage
from benchmarks.testbed.tokenizer import BOS, PAD, build_vocabulary, piece_ids

REFERENCE_WEIGHT = 0.5
NO_REFERENCE = -100


def learning_scale(step: int, share: float, rates: Rates) -> float:
    """What the peak rates are multiplied by: a short rise, a plateau, a linear fall to nearly zero."""
    rising = min(1.0, (step + 1) / rates.warmup_steps)
    falling = min(1.0, (1.0 - share) / rates.decay_share)
    return min(rising, max(0.02, falling))


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz iteration (Muon) on a stack of matrices [count, rows, columns], in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2).contiguous()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    out: Tensor = (x.transpose(1, 2) if tall else x).to(update.dtype)
    return out


class Muon:
    """Momentum followed by orthogonalisation, for all matrices of one shape at a time."""

    def __init__(
        self, parameters: list[nn.Parameter], momentum: float, writers: list[nn.Parameter], decay: float
    ) -> None:
        self.momentum = momentum
        self.writers = writers
        self.decay = decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault((parameter.shape[0], parameter.shape[1]), []).append(parameter)
        self.buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at a learning rate; gradients must have been computed."""
        for writer in self.writers:
            writer.mul_(1.0 - rate * self.decay)
        for shape, group in self.groups.items():
            gradient = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.add_(change, alpha=-scale)


@dataclass(frozen=True)
class Batch:
    """Token ids [batch, tokens]; targets and their weights, likewise; whether a target is an answer.

    `references` [batch, tokens] is what each token stands for, `NO_REFERENCE` where it stands for nothing;
    `positions` [batch, tokens] are RoPE's.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    answers: Tensor
    references: Tensor
    positions: Tensor


def stretched(tokens: Tensor, chunk_end: int, most: int, generator: torch.Generator) -> Tensor:
    """Positions [batch, rows] that jump after tokens `chunk_end`, by at most `most` in all; each third row's
    do not."""
    gaps = torch.rand(tokens.shape, generator=generator) * (tokens == chunk_end)
    gaps[2::3] = 0.0
    scale = most * torch.rand(len(tokens), 1, generator=generator) / gaps.sum(1, keepdim=True).clamp_min(1.0)
    before = (gaps * scale).cumsum(1) - gaps * scale
    return torch.arange(tokens.shape[1]) + before.long()


def make_batch(stage: Stage, first_seed: int, vocabulary: dict[str, int]) -> Batch:
    """Rows made from `stage.batch` consecutive training seeds, padded to `stage.tokens`."""
    ids = torch.full((stage.batch, stage.tokens + 1), vocabulary[PAD])
    weights = torch.zeros(stage.batch, stage.tokens + 1)
    references = torch.full((stage.batch, stage.tokens + 1), NO_REFERENCE)
    ids[:, 0] = vocabulary[BOS]
    for row in range(stage.batch):
        text = make_training_text(first_seed + row, stage.shape, stage.tokens)
        count = len(text.pieces)
        ids[row, 1 : count + 1] = torch.tensor(piece_ids(text.pieces, vocabulary))
        weights[row, 1 : count + 1] = torch.tensor(text.weights)
        for column, word in enumerate(text.stands_for, start=1):
            if word is not None:
                references[row, column] = piece_ids([f" {word}"], vocabulary)[0]
    weights = weights[:, 1:].contiguous()
    inputs = ids[:, :-1].contiguous()
    (chunk_end,) = piece_ids(["\n"], vocabulary)
    generator = torch.Generator().manual_seed(first_seed)
    return Batch(
        tokens=inputs,
        targets=ids[:, 1:].contiguous(),
        weights=weights,
        answers=weights == ANSWER_WEIGHT,
        references=references[:, :-1].contiguous(),
        positions=stretched(inputs, chunk_end, stage.stretch, generator),
    )


@dataclass(frozen=True)
class Forward:
    """The result of one forward pass: the loss, and the number of right answers and references."""

    loss: Tensor
    answers_right: int
    references_right: int

    def count_right(self, batch: Batch) -> dict[str, int]:
        """The batch's answers and references, and how many of each were right."""
        return {
            "answers": int(batch.answers.sum()),
            "answers_right": self.answers_right,
            "references": int((batch.references != NO_REFERENCE).sum()),
            "references_right": self.references_right,
        }


def forward_loss(
    model: Callable[..., tuple[Tensor, Tensor]],
    head: nn.Linear,
    batch: Batch,
    shape: ModelShape,
    dtype: torch.dtype = torch.bfloat16,
) -> Forward:
    """Cross entropy of the weighted targets, plus that of the references after `READING_LAYERS`.

    Products are computed in ``dtype``: float32 is faster on processors without bfloat16.
    """
    tokens = batch.tokens.shape[1]
    cos, sin = (part[:, None] for part in rotation(shape, batch.positions))
    counted = batch.weights > 0
    referring = batch.references != NO_REFERENCE
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        read, hidden = model(batch.tokens, cos.to(dtype), sin.to(dtype), causal_mask(tokens).to(dtype))
        logits = head(hidden[counted]).float()
        read_logits = head(read[referring]).float()
    targets, weights = batch.targets[counted], batch.weights[counted]
    losses = functional.cross_entropy(logits, targets, reduction="none")
    references = batch.references[referring]
    resolving = functional.cross_entropy(read_logits, references)
    loss = (losses * weights).sum() / weights.sum() + REFERENCE_WEIGHT * resolving
    right = (logits.argmax(-1) == targets) & batch.answers[counted]
    return Forward(loss, int(right.sum()), int((read_logits.argmax(-1) == references).sum()))


def scheduled(stages: Sequence[Stage], minutes_max: float | None) -> Iterator[tuple[Stage, float]]:
    """The stage of each step and the share of training done before it, in [0, 1).

    Without `minutes_max` the share counts tokens; with it, wall-clock time, each stage keeping its share:
    a run on a shared machine then ends when it must, with its learning rate fallen.
    """
    sizes = [stage.steps * stage.tokens * stage.batch for stage in stages]
    total, done, started = sum(sizes), 0, time.monotonic()
    while True:
        share = done / total
        if minutes_max is not None:
            share = (time.monotonic() - started) / 60 / minutes_max
        if share >= 1.0:
            return
        index, passed = 0, sizes[0]
        while passed <= share * total and index + 1 < len(stages):
            index += 1
            passed += sizes[index]
        yield stages[index], share
        done += stages[index].tokens * stages[index].batch


def save(path: Path, model: TinyModel, muon: Muon, adam: torch.optim.Optimizer, step: int, seed: int) -> None:
    """Writes everything that a later run needs to continue."""
    state = {
        "model": model.state_dict(),
        "shape": asdict(model.shape),
        "muon": muon.buffers,
        "adam": adam.state_dict(),
        "step": step,
        "next_seed": seed,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(
    out: Path,
    recipe: Recipe,
    resume: Path | None = None,
    compiled: bool = False,
    minutes_max: float | None = None,
) -> None:
    """Runs the recipe's stages; writes `state.pt` and `log.jsonl` under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    vocabulary, rates = build_vocabulary(), recipe.rates
    model = TinyModel(recipe.shape)
    initialise(model, recipe.seed)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n or "lm_head" in n]
    writers = [p for n, p in model.named_parameters() if "o_proj" in n or "down_proj" in n]
    muon = Muon(matrices, rates.momentum, writers, rates.writer_decay)
    adam = torch.optim.AdamW(others, lr=rates.adam, betas=(0.9, 0.98), weight_decay=0.0)
    next_seed = recipe.seed * 100_000_000
    if resume is not None:
        state = torch.load(resume, weights_only=True)
        model.load_state_dict(state["model"])
        muon.buffers = state["muon"]
        adam.load_state_dict(state["adam"])
        next_seed = state["next_seed"]
    run = torch.compile(model, dynamic=False) if compiled else model
    started = saved = time.monotonic()
    totals = Counter[str]()
    seen = 0
    for step, (stage, share) in enumerate(scheduled(recipe.stages, minutes_max)):
        batch = make_batch(stage, next_seed, vocabulary)
        next_seed += stage.batch
        done = forward_loss(run, model.lm_head, batch, model.shape)
        done.loss.backward()  # type: ignore[no-untyped-call]
        scale = learning_scale(step, share, rates)
        nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = rates.adam * scale
        muon.step(rates.muon * scale)
        adam.step()
        model.zero_grad(set_to_none=True)
        seen += batch.tokens.numel()
        totals.update(done.count_right(batch))
        if (step + 1) % 25 == 0:
            line = {
                "step": step + 1,
                "tokens": stage.tokens,
                "minutes": round((time.monotonic() - started) / 60, 2),
                "loss": round(done.loss.item(), 4),
                "answers": round(totals["answers_right"] / max(1, totals["answers"]), 4),
                "references": round(totals["references_right"] / max(1, totals["references"]), 4),
                "seen": seen,
            }
            with (out / "log.jsonl").open("a") as log:
                print(json.dumps(line), file=log)
            print(json.dumps(line), flush=True)
            totals.clear()
        if time.monotonic() - saved > 120:
            save(out / "state.pt", model, muon, adam, step + 1, next_seed)
            saved = time.monotonic()
    save(out / "state.pt", model, muon, adam, -1, next_seed)


def with_options(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe with what the command line gives in its place."""
    given = {
        "muon": options.muon_rate,
        "decay_share": options.decay_share,
        "writer_decay": options.writer_decay,
    }
    rates = replace(recipe.rates, **{name: rate for name, rate in given.items() if rate is not None})
    stages = recipe.stages
    if options.stages is not None:
        stages = tuple(CURRICULUM[int(index)] for index in options.stages.split(","))
    seed = recipe.seed if options.seed is None else options.seed
    return replace(recipe, stages=stages, rates=rates, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="llama", help="default: %(default)s")
    parser.add_argument("--stages", help="indices into CURRICULUM, comma-separated, instead of the recipe's")
    parser.add_argument("--seed", type=int, help="instead of the recipe's, like the rates below")
    parser.add_argument("--muon-rate", type=float)
    parser.add_argument("--decay-share", type=float)
    parser.add_argument("--writer-decay", type=float)
    parser.add_argument("--minutes", type=float, help="fit the curriculum into this much time")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = with_options(RECIPES[arguments.recipe], arguments)
    train(arguments.out, recipe, arguments.resume, arguments.compile, arguments.minutes)


if __name__ == "__main__":
    main()
