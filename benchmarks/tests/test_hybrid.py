"""The trained hybrid: its scan, and what is written of it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.testbed.evaluate import Bundle
from benchmarks.testbed.hybrid import ATTENDING, make_mixer, write_checkpoint
from benchmarks.testbed.model import causal_mask, rotation
from kintsugi.models.bundled import bundled_checkpoint


@torch.no_grad()
def test_transformers_computes_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Bundle(bundled_checkpoint()).model
    for index, layer in enumerate(model.decoder_layers()):
        if index not in ATTENDING:
            mixer = make_mixer(model.shape)
            torch.nn.init.normal_(mixer.out_proj.weight, std=0.05)
            layer.self_attn = mixer  # type: ignore[assignment]
    write_checkpoint(model, tmp_path)
    token_ids = torch.arange(3, 90)
    cos, sin = (part[None, None] for part in rotation(model.shape, torch.arange(len(token_ids))))
    _, hidden = model(token_ids[None], cos, sin, causal_mask(len(token_ids)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded).__name__ == "GraniteMoeHybridForCausalLM"
    torch.testing.assert_close(
        loaded(token_ids[None]).logits[0], model.lm_head(hidden[0]), atol=1e-3, rtol=1e-3
    )
