"""The prior: one score per token of a chunk, computed when the chunk is saved and stored with it.

A selector that ranks tokens by the prior needs no pass of the question and no layer at full width. The score
is a token's **deviation**: how far its K (before RoPE) and V lie from those that it gets behind other text.
What depends on the text before it is what loading gets wrong. The chunk is prefilled twice for it when it is
saved (`fusor.save`).

On disk a score is one byte on a logarithmic scale, in the chunk's prior frame (docs/adr/0009). Deviations are
relative to the chunk's own K and V, so that tokens of different chunks compare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kintsugi.core.layout import ChunkManifest

PRIOR = "deviation"
"""Name of the prior's row in a manifest. A prior that is computed in another way gets another name."""
STEPS_PER_OCTAVE = 8
MIDDLE = 128
"""The byte of a score of 1. Scores from 2⁻¹⁶ to 2¹⁵ are told apart; the others are stored as the nearest."""


def relative_deviation(stored: Tensor, other: Tensor) -> Tensor:
    """The squared distance of a chunk's K or V at one layer from those behind other text, both `[tokens,
    heads, head_dim]`, ÷ the mean squared norm of a token: fp32 `[tokens]`."""
    mine, theirs = stored.float(), other.float()
    return (mine - theirs).square().sum((1, 2)) / mine.square().sum((1, 2)).mean()


def encode_scores(scores: Tensor) -> Tensor:
    """Encode scores that are not negative, fp32 `[tokens]`, as uint8 `[tokens]`."""
    steps = (STEPS_PER_OCTAVE * scores.log2()).round().nan_to_num(0.0, 255.0, -255.0)
    return (steps + MIDDLE).clamp(0, 255).to(torch.uint8)


def read_scores(frame: memoryview, manifest: ChunkManifest) -> Tensor:
    """The encoded scores of a chunk with a prior, uint8 `[tokens]`; they rank as the scores do. `frame`, the
    chunk's prior frame, may be overwritten afterwards."""
    first = manifest.priors.index(PRIOR) * manifest.num_tokens
    return torch.frombuffer(bytearray(frame[first : first + manifest.num_tokens]), dtype=torch.uint8)


def has_prior(manifest: ChunkManifest) -> bool:
    """Whether the chunk was saved with the prior that `PRIOR` names."""
    return PRIOR in manifest.priors
