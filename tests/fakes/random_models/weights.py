"""Fills a transformer with random weights, such that it behaves similarly to a trained one.

With the usual small initialisation attention scores are nearly equal: attention averages everything, KV
deviation measures nothing, and greedy decoding repeats one token. With large weights the network is chaotic:
it amplifies rounding until two exact ways to compute the same prompt produce different answers. So every
projection is scaled by its fan-in to a chosen gain (standard deviations, for inputs of unit RMS):

* query·key scores have a spread of 2, so that a few dozen of a few thousand tokens get most of the attention;
  if the model normalises queries and keys, the norm's weights have that gain;
* the output of attention is an average and similar at all positions: its gain is smaller than the MLP's,
  because otherwise the hidden states of a deep model all point in the same direction;
* embeddings have a spread of the square root of the number of layers, so that all layers together have about
  the same weight as the token itself. Measured at 16 layers, bfloat16 against float32: the best token's
  logprob changes by 0.03 on average, and a chunk that is read alone predicts the same next token as after
  another chunk at 43 % of positions; with spreads of 1 for embeddings and 3 for scores, the values are 0.30
  and 3 %;
* logits have a spread of about 2, so that the best token leads by a few tenths;
* the end-of-sequence row of the head is zero, so that greedy decoding does not stop by chance.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import blake3
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tests.fakes.random_models.shapes import Architecture, ModelShape
from tests.fakes.random_models.vocabulary import EOS_ID

_QK_GAIN = math.sqrt(2.0)
_GAINS = {
    "q_proj": _QK_GAIN,
    "k_proj": _QK_GAIN,
    "down_proj": 1.5,
    "lm_head": 2.0,
    # Routers: the best experts must lead clearly, so that rounding does not switch them.
    "gate": 2.0,
    "router": 2.0,
}
_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.3


_NORM = re.compile(r"norm$|(^|_)ln_[a-z0-9]+$|layer_?norm|layer_scalar$")
_EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "wte", "word_embeddings"})
_ADDS_ONE = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
"""Model types whose norms multiply by one plus the weight."""
_TIED_SPREAD = 0.1
"""Spread of embeddings that are tied to the head. It is small, so that the layers determine the next token
and the model does not repeat its last token."""


@dataclass(frozen=True)
class WeightTraits:
    """Properties of a model that determine the size of its weights."""

    layers: int
    embeddings_scaled_by: float = 1.0
    """Factor by which the model multiplies embeddings."""
    norms_add_one: bool = False
    """Whether norms multiply by one plus the weight, as Gemma's do."""
    is_tied: bool = False
    """Whether the embeddings are tied to the head."""

    @staticmethod
    def of_shape(shape: ModelShape) -> WeightTraits:
        is_gemma = shape.architecture is Architecture.GEMMA3
        return WeightTraits(shape.layers, math.sqrt(shape.hidden) if is_gemma else 1.0, is_gemma)

    @staticmethod
    def of_config(config: PretrainedConfig) -> WeightTraits:
        text = config.get_text_config()
        is_gemma = text.model_type.startswith("gemma")
        return WeightTraits(
            text.num_hidden_layers,
            math.sqrt(text.hidden_size) if is_gemma else 1.0,
            text.model_type in _ADDS_ONE,
            bool(config.tie_word_embeddings),
        )


@torch.no_grad()
def fill_weights(model: nn.Module, traits: WeightTraits, seed: int) -> None:
    """Overwrite every parameter of `model` in place, and every buffer that its checkpoint holds.

    Each parameter has its own generator, seeded by `seed` and the parameter's name, so a decoder layer's
    weights do not depend on the number of layers.
    """
    stored = model.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in (*model.named_parameters(), *buffers):
        generator = torch.Generator().manual_seed(_seed_of(name, seed))
        tensor.copy_(_values(name, tensor.shape, traits, generator))
    if not traits.is_tied:
        head = model.get_parameter("lm_head.weight")
        head[EOS_ID].zero_()


def _seed_of(name: str, seed: int) -> int:
    digest = blake3.blake3(f"{seed}\0{name}".encode()).digest(8)
    return int.from_bytes(digest, "little") >> 1


def _values(name: str, size: torch.Size, traits: WeightTraits, generator: torch.Generator) -> Tensor:
    noise = torch.randn(size, generator=generator)
    module = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
    if name.endswith("bias") or module == "sinks" or not size:
        return noise.mul_(_BIAS_SPREAD)
    if _NORM.search(module):
        return noise.mul_(_NORM_SPREAD).add_(_norm_centre(module, traits))
    if module in _EMBEDDINGS:
        spread = _TIED_SPREAD if traits.is_tied else math.sqrt(traits.layers)
        return noise.mul_(spread / traits.embeddings_scaled_by)
    return noise.mul_(_GAINS.get(module, 1.0) / math.sqrt(size[-1]))


def _norm_centre(module: str, traits: WeightTraits) -> float:
    """Return the mean of a norm's weights."""
    scale = _QK_GAIN if module in ("q_norm", "k_norm") else 1.0
    return scale - 1.0 if traits.norms_add_one else scale
