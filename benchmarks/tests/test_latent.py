"""The model with latents: what it takes over from the bundled one, and what is written of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.testbed.evaluate import Bundle
from benchmarks.testbed.latent import as_latent, convert, rotary_shape, write_checkpoint
from benchmarks.testbed.model import Attention, ModelShape, TinyModel, causal_mask, rotation
from kintsugi.models.bundled import bundled_checkpoint


def turned(shape: ModelShape, tokens: int) -> tuple[Tensor, Tensor]:
    cos, sin = rotation(shape, torch.arange(tokens))
    return cos[None, None], sin[None, None]


def logits(model: TinyModel, shape: ModelShape, token_ids: Tensor) -> Tensor:
    """`[tokens, vocabulary]`."""
    count = len(token_ids)
    _, hidden = model(token_ids[None], *turned(shape, count), causal_mask(count))
    out: Tensor = model.lm_head(hidden[0])
    return out


@torch.no_grad()
def test_one_key_head_whose_pairs_all_turn_is_kept_as_it_is() -> None:
    torch.manual_seed(0)
    shape = ModelShape(8, num_attention_heads=4, num_key_value_heads=1, rope_theta=10.0)
    attention, gain = Attention(shape), 1 + 0.3 * torch.randn(shape.hidden_size)
    x = functional.rms_norm(torch.randn(1, 20, shape.hidden_size), (shape.hidden_size,)) * gain
    expected = attention(x, *turned(shape, 20), causal_mask(20))
    made = as_latent(attention, gain, shape)
    torch.testing.assert_close(
        made(x, *turned(rotary_shape(shape), 20), causal_mask(20)), expected, atol=1e-4, rtol=1e-3
    )


@torch.no_grad()
def test_transformers_computes_what_was_trained(tmp_path: Path) -> None:
    model = convert(Bundle(bundled_checkpoint()).model)
    write_checkpoint(model, tmp_path)
    token_ids = torch.arange(3, 40)
    expected = logits(model, rotary_shape(model.shape), token_ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded).__name__ == "DeepseekV2ForCausalLM"
    torch.testing.assert_close(loaded(token_ids[None]).logits[0], expected, atol=1e-3, rtol=1e-3)
