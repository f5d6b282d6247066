"""The trained hybrids: what they are converted to, their scans, and what is written of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.testbed.delta_net import DeltaNetKind
from benchmarks.testbed.evaluate import Bundle
from benchmarks.testbed.hybrid import KINDS, inputs_of
from benchmarks.testbed.hybrid_kind import ATTENDING, constant_of, places_back
from benchmarks.testbed.model import TinyModel, causal_mask, rotation
from benchmarks.testbed.tokenizer import build_vocabulary
from kintsugi.models.bundled import bundled_checkpoint


@pytest.fixture
def model() -> TinyModel:
    torch.manual_seed(0)
    return Bundle(bundled_checkpoint()).model


@pytest.fixture
def inputs(model: TinyModel) -> list[Tensor]:
    return [one[:300] for one in inputs_of(model, build_vocabulary())]


def turned(model: TinyModel, count: int) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = (part[None, None] for part in rotation(model.shape, torch.arange(count)))
    return cos, sin, causal_mask(count)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mamba2", "GraniteMoeHybridForCausalLM"), ("delta_net", "Qwen3_5ForCausalLM")],
)
@torch.no_grad()
def test_transformers_computes_what_was_trained(
    model: TinyModel, inputs: list[Tensor], tmp_path: Path, name: str, expected: str
) -> None:
    kind = KINDS[name]
    for index, layer in enumerate(model.decoder_layers()):
        if index in ATTENDING:
            mixer = kind.keep(layer.self_attn, inputs[index], model.shape)
        else:
            mixer = kind.make_mixer(model.shape)
            torch.nn.init.normal_(mixer.get_parameter("out_proj.weight"), std=0.05)
            if index == 0:
                kind.look_back(mixer, layer.self_attn, inputs[index])
        layer.self_attn = mixer  # type: ignore[assignment]
    kind.write_checkpoint(model, tmp_path)
    token_ids = torch.arange(3, 180)
    _, hidden = model(token_ids[None], *turned(model, len(token_ids)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded).__name__ == expected
    torch.testing.assert_close(
        loaded(token_ids[None]).logits[0], model.lm_head(hidden[0]), atol=1e-3, rtol=1e-3
    )


@torch.no_grad()
def test_a_kept_attention_gives_about_what_it_gave(model: TinyModel, inputs: list[Tensor]) -> None:
    """The QK-norm divides by what is nearly the same in every token."""
    for index in ATTENDING:
        attention, x = model.decoder_layers()[index].self_attn, inputs[index][None]
        made = DeltaNetKind().keep(attention, inputs[index], model.shape)
        expected = attention(x, *turned(model, x.shape[1]))
        missing = made(x, *turned(model, x.shape[1])) - expected
        assert missing.square().mean() < 0.1 * expected.square().mean()


@torch.no_grad()
def test_a_scan_begins_as_the_local_heads_that_it_reaches(model: TinyModel, inputs: list[Tensor]) -> None:
    attention, x = model.decoder_layers()[0].self_attn, inputs[0]
    kind, dim = DeltaNetKind(), attention.head_dim
    mixer = kind.make_mixer(model.shape)
    kind.look_back(mixer, attention, x)
    expected = torch.zeros_like(x)
    for _, head, back in places_back():
        kv_head = head // (attention.heads // attention.kv_heads)
        values = x[: len(x) - back] @ attention.v_proj.weight[kv_head * dim : (kv_head + 1) * dim].T
        expected[back:] += values @ attention.o_proj.weight[:, head * dim : (head + 1) * dim].T
    missing = mixer(x[None], *turned(model, len(x)))[0] - expected
    assert missing[8:].square().mean() < 0.02 * expected[8:].square().mean()


@torch.no_grad()
def test_a_constant_is_read_from_every_input(inputs: list[Tensor]) -> None:
    for one in inputs:
        assert (one @ constant_of(one) - 1).square().mean() < 0.02
