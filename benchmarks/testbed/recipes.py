"""Everything that determines a trained model: architecture, curriculum, learning rates and seed.

The same recipe, code and torch give the same weights on one kind of processor with one thread. Training for a
given time (`--minutes`) does not, and `--compile` rounds differently.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from benchmarks.testbed.generator import Shape
from benchmarks.testbed.model import ModelShape
from benchmarks.testbed.tokenizer import build_vocabulary


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        steps: optimiser steps.
        tokens: length of a row in tokens; batch: rows per step.
        shape: the documents.
        stretch: position ids grow by up to this much in all at the ends of chunks, so that a short row
            teaches the distances of a long document; two rows of three are stretched, the third keeps what
            short documents need. 0 numbers tokens as vLLM does.
    """

    steps: int
    tokens: int
    batch: int
    shape: Shape
    stretch: int = 0


CURRICULUM = (
    Stage(500, 112, 20, Shape((2, 3), (2, 4), (0, 1), (1, 1), 0.5, (1, 2), (1, 1), 0.5)),
    Stage(500, 176, 14, Shape((3, 4), (2, 5), (0, 1), (1, 2), 0.4, (1, 2), (1, 1), 0.4)),
    Stage(600, 224, 11, Shape((3, 5), (2, 5), (0, 2), (1, 2), 0.25, (1, 2), (1, 2), 0.3)),
    Stage(1200, 304, 8, Shape((4, 6), (2, 5), (0, 3), (1, 2), 0.15, (1, 2), (1, 3), 0.25)),
    Stage(900, 336, 7, Shape((4, 6), (1, 4), (2, 4), (1, 2), 0.1, (1, 2), (1, 3), 0.2)),
    Stage(150, 768, 3, Shape((6, 12), (1, 4), (2, 5), (1, 2), 0.1, (1, 2), (2, 3), 0.2)),
    Stage(1500, 336, 7, Shape((4, 6), (2, 4), (1, 4), (1, 2), 0.1, (1, 2), (1, 3), 0.2), stretch=3600),
    Stage(500, 768, 3, Shape((6, 12), (1, 4), (2, 5), (1, 2), 0.1, (1, 2), (2, 3), 0.2), stretch=2400),
)
"""The last two teach long distances to a model that knows the rest; the bundled model did without."""


@dataclass(frozen=True)
class Rates:
    """Learning rates at their peak, and the part of training spent rising and falling.

    Attributes:
        writer_decay: weight decay of what writes into the residual stream. Without it the stream grows
            to tens of times the embeddings' scale, and late layers no longer see which word is which.
    """

    muon: float = 0.02
    adam: float = 2e-3
    momentum: float = 0.95
    warmup_steps: int = 150
    decay_share: float = 0.35
    writer_decay: float = 0.3


VERSION = 1
"""Increase this when the same recipe gives other weights, so that older cached models are not used."""


@dataclass(frozen=True)
class Recipe:
    """One model to train."""

    shape: ModelShape
    stages: tuple[Stage, ...]
    rates: Rates = Rates()
    seed: int = 1

    @property
    def digest(self) -> str:
        """Names the recipe: 12 hexadecimal digits."""
        text = json.dumps([VERSION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _with_steps(stages: tuple[Stage, ...], *steps: int) -> tuple[Stage, ...]:
    return tuple(replace(stage, steps=number) for stage, number in zip(stages, steps, strict=True))


WORDS = len(build_vocabulary())
RECIPES = {
    "llama": Recipe(ModelShape(WORDS), CURRICULUM[:6]),
    "qwen3": Recipe(
        ModelShape(
            WORDS,
            num_attention_heads=8,
            num_key_value_heads=2,
            rope_theta=100_000.0,
            rms_norm_eps=1e-6,
            model_type="qwen3",
        ),
        _with_steps(CURRICULUM[:5], 120, 120, 160, 340, 200),
        Rates(muon=0.015, warmup_steps=60),
    ),
}
"""Recipes by name. `llama` is the bundled model's, before the options that its model card adds. `qwen3`
differs in what blending works with: keys are normalised, so that those of all tokens are about equally long;
four query heads share a key head instead of two; and the RoPE base is a tenth."""
