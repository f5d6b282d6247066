"""Tiny configs of model families that the named shapes do not have: each differs from Llama in one way."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
WINDOW = 200
"""Not a multiple of any block size, so that windows end inside blocks."""
ATTENTION_CHUNK = 512
"""Llama 4's layers see positions from the last multiple of this on."""
_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_FACTORS = [1.0 + 0.25 * pair for pair in range(12)]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": _FACTORS,
    "long_factor": [2 * factor for factor in _FACTORS],
    "original_max_position_embeddings": 2048,
    "partial_rotary_factor": 0.75,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

_MULTI_HEAD = ("gptj", "gpt_neox")
"""Model types with as many KV heads as query heads, whatever a config says."""

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
"""Latent attention. The config's own latent of 512 and rotary key of 64 are what vLLM's CPU kernels know, and
for AMX they want heads in multiples of 32."""

_LFM2: dict[str, Any] = {
    "block_auto_adjust_ff_dim": False,
    # What published configs say beside transformers' fields; vLLM reads them.
    "conv_dim": 128,
    "block_dim": 128,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    # vLLM knows no head beside the embeddings.
    "tie_word_embeddings": True,
}
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # vLLM's CPU kernel wants keys and values of one width that it knows.
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_SPARSE: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {"embedding_multiplier": 1.5, "residual_multiplier": 0.8, "logits_scaling": 0.7}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "gptj": ("gptj", {"n_positions": 8192, "rotary_dim": 16}),
    "cohere2": (
        "cohere2",
        # vLLM knows no head beside the embeddings, which are small here and would leave logits alike.
        {"sliding_window": WINDOW, "layer_types": _WINDOWS, "tie_word_embeddings": True, "logit_scale": 2.0},
    ),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": _WINDOWS}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}),
    "phi4-mini": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 2048}),
    "olmo2": ("olmo2", {}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "phi2": ("phi", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": _YARN,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 32,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": ATTENTION_CHUNK,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "layer_types": _WINDOWS,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": _WINDOWS}),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": 96, "n_group": 1, "topk_group": 1}),
    "deepseek-v2-lite": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 96,
            "n_group": 2,
            "topk_group": 1,
            # What the published config says beside transformers' fields; vLLM assumes otherwise.
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, **_LFM2}),
    "qwen3-next": ("qwen3_next", {**_DELTA_NET, "num_experts": 4, "num_experts_per_tok": 4, **_SPARSE}),
    "qwen3.5": ("qwen3_5_text", _DELTA_NET),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {**_DELTA_NET, "num_experts": 4, "num_experts_per_tok": 4, **_SPARSE},
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            **_LFM2,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "full_attention",
                "linear_attention",
                "mlp",
                "mlp",
            ],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 2,
            "chunk_size": 64,
        },
    ),
    "granite-4": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
            **_MAMBA2,
        },
    ),
    "falcon-alibi": ("falcon", {"alibi": True, "parallel_attn": False, "num_kv_heads": 1}),
}
"""transformers' model type, and what differs from the tiny Llama."""

DECLINED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_positions": 8192, "tie_word_embeddings": True}),
    "opt": ("opt", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 32}),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 32,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": 1024,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "smollm3-dynamic": (
        "smollm3",
        {"use_sliding_window": False, "rope_parameters": _DYNAMIC, "max_position_embeddings": 2048},
    ),
    "llama-dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 2048}),
    "olmo2-longrope": (
        "olmo2",
        {
            "rope_parameters": {
                **_LONGROPE,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0 + 0.25 * pair for pair in range(16)],
                "long_factor": [2.0 + 0.5 * pair for pair in range(16)],
            },
            "original_max_position_embeddings": 2048,
        },
    ),
}
"""The same for what no stored key can be turned for, at `max_model_len` 4096."""

SEEDS = {"smollm3": 1, "gpt-neox": 1, "phi2": 1, "falcon-alibi": 4}
"""Seeds of weights where the first one's model repeats one token."""


def config_of(name: str) -> PretrainedConfig:
    """The config of a family of either table."""
    model_type, fields = (FAMILIES | DECLINED)[name]
    fields = {**_TINY, **fields}
    if model_type in _MULTI_HEAD:
        del fields["num_key_value_heads"]
    config: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    return config
