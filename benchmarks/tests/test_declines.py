"""Declines that a config alone shows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.support.architectures.declines import find_decline
from kintsugi.models.declines import DeclineReason


@pytest.mark.parametrize(
    ("model_type", "fields", "reason", "layer"),
    [
        ("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"]}, "recurrent", 0),
        ("mamba2", {}, "recurrent", 0),
        ("falcon_h1", {}, "recurrent", 0),
        ("jamba", {}, "recurrent", 0),
        ("inkling_text", {"layer_types": ["hybrid_sliding", "hybrid"]}, "recurrent", 0),
        ("gpt2", {}, "learned_positions", None),
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention"] * 2},
            "shared_kv",
            1,
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 0}, "mla", 0),
        ("deepseek_v3", {"index_topk": 2048}, "indexed_attention", 0),
    ],
)
def test_declines_name_reason_and_layer(
    model_type: str, fields: dict[str, Any], reason: str, layer: int | None
) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **fields).to_dict()
    # What transformers fills in for defaults does not count where the test says otherwise.
    decline = find_decline(config | fields)
    assert decline is not None
    assert (decline.reason, decline.layer) == (reason, layer)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}),
    ],
)
def test_models_that_blend_have_no_decline(model_type: str, fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **fields).to_dict()
    assert find_decline(config | fields) is None


def test_a_model_with_inputs_beside_text_is_judged_by_its_language_model() -> None:
    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 64}
    assert find_decline({"text_config": text, "vision_config": {"depth": 1}}) is None
    hybrid = find_decline({"text_config": {**text, "layer_types": ["linear_attention"]}})
    assert hybrid is not None
    assert hybrid.reason is DeclineReason.RECURRENT


def test_a_config_that_only_lists_its_layers_is_judged_by_the_list() -> None:
    decline = find_decline({"layers_block_type": ["attention", "moe", "mamba"]})
    assert decline is not None
    assert (decline.reason, decline.layer) == (DeclineReason.ARCHITECTURE, 1)


def test_a_config_without_layers_is_declined() -> None:
    decline = find_decline({"model_type": "unheard of"})
    assert decline is not None
    assert decline.reason is DeclineReason.ARCHITECTURE
