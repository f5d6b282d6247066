"""Computes the stored bytes per token of hybrid models with their published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kintsugi.core.layout import Codec
from kintsugi.core.sizing import model_size

CODECS = (Codec.RAW, Codec.INT8)
CHUNK_TOKENS = 256
"""Length of the chunk over which scales are shared."""

_DELTA_NET = {
    "head_dim": 256,
    "num_attention_heads": 16,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
}


def _layers(recurrent: str, attending: int, others: int) -> list[str]:
    """Layers in any order, which changes no size."""
    return [*[recurrent] * others, *["full_attention"] * attending]


PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Lfm2ForCausalLM": (
        "LFM2-1.2B",
        {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 16, "layer_types": _layers("conv", 6, 10)},
    ),
    "Lfm2MoeForCausalLM": (
        "LFM2-8B-A1B",
        {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 24, "layer_types": _layers("conv", 6, 18)},
    ),
    "GraniteMoeHybridForCausalLM": (
        "Granite-4.0-H-Small",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 40, "layer_types": _layers("mamba", 4, 36)}
        | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
    ),
    "NemotronHForCausalLM": (
        "Nemotron-H-8B",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_hidden_layers": 52, "layers_block_type": [*_layers("mamba", 4, 24), *["mlp"] * 24]}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3-Next-80B-A3B",
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 2, **_DELTA_NET},
    ),
    "Qwen3_5ForCausalLM": (
        "32 layers, hidden size 4,096",
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, **_DELTA_NET},
    ),
    "Qwen3_5MoeForCausalLM": (
        "Qwen3.5-35B-A3B",
        {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, **_DELTA_NET},
    ),
}
"""A model of each class, with the fields of its configuration that sizes depend on."""


def bytes_per_token(name: str) -> dict[str, int]:
    """Bytes per token that the published model of a class stores, by codec, with 16-bit KV."""
    layout = model_size(PUBLISHED[name][1], "bfloat16").layout
    return {codec.name.lower(): layout.chunk_bytes(codec, CHUNK_TOKENS) // CHUNK_TOKENS for codec in CODECS}
