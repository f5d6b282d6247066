"""The architectures to test: one tiny model for each class of vLLM's registry that has a config here.

Every entry says only how its config differs from `checkpoints.TINY`. Entries come in three lists: `BLENDED`
should blend and get every check; `OTHERS` and `STAND_INS` are tested once each, because a class must either
be exact or be declined with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One tiny model."""

    name: str
    """The row's name: the class, or the class and what is special, such as `LlamaForCausalLM/yarn`."""
    model_type: str
    """transformers' name of the config class."""
    changes: Changes = field(default_factory=dict)
    """Config fields that differ from `checkpoints.TINY`."""
    shows: frozenset[str] = frozenset()
    """The property that it represents: sinks, mla, nope, partial, longrope, backend, vision, geometry,
    window, moe, or hybrid."""
    ranks: bool = True
    """Whether two tensor-parallel ranks can share its heads."""
    pretrained: str = ""
    """A model with real weights, by its name in `kintsugi.models.reference`; empty: random ones."""
    referred: Changes = field(default_factory=dict)
    """Config fields that need another value in transformers' class, so that it computes the same as
    vLLM's."""
    zeroed: str = ""
    """Parts of the names of parameters that stay zero, because vLLM leaves them out on a CPU."""
    dtype: str = "float32"
    """The dtype in which vLLM computes all checks except that of bfloat16."""
    arguments: Changes = field(default_factory=dict)
    """Arguments that vLLM needs to compute this class on a CPU."""
    stand_in: bool = False
    """Whether transformers has no such model, or a different one: vLLM's class gets random weights and is not
    compared with a reference."""

    @property
    def model_class(self) -> str:
        """vLLM's name of the model class."""
        return self.name.partition("/")[0]


def _one(name: str, model_type: str, shows: str = "", ranks: bool = True, **changes: Any) -> Architecture:
    return Architecture(name, model_type, changes, frozenset(shows.split()), ranks)


def _hybrid(name: str, model_type: str, changes: Changes, **more: Any) -> Architecture:
    return Architecture(name, model_type, changes, frozenset({"hybrid"}), ranks=False, **more)


def _rope(rope_type: str = "default", theta: float = 10_000.0, **values: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **values}


# In vLLM's class, a token in such a layer attends to one token more than in transformers'.
_COHERE_WINDOW = {"sliding_window": 201}
_LONG_FACTORS: dict[str, Any] = {
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + 0.25 * index for index in range(12)],
}
# Where transformers reads the scaling of queries by position, and where vLLM's class does.
_QUERY_SCALING = _rope("default", llama_4_scaling_beta=0.1, original_max_position_embeddings=256)
_AFMOE: dict[str, Any] = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
_HY_V3: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "route_norm": True,
    "expert_hidden_dim": 128,
    "qk_norm": True,
}
_MIMO_V2: dict[str, Any] = {
    # vLLM's class reads these beside each other, transformers' in `rope_parameters`, by its own defaults.
    "rope_theta": 5_000_000.0,
    "swa_rope_theta": 10_000.0,
    "partial_rotary_factor": 0.334,
    "add_swa_attention_sink_bias": True,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_layer_freq": [0, 1, 1, 1],
    "sliding_window_size": 200,
    "layernorm_epsilon": 1e-5,
    "v_head_dim": 32,
    "swa_num_attention_heads": 4,
    # Twice those of the other layers: transformers' class allows no other number.
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
}
"""Fields that checkpoints have and transformers' config classes do not."""
_VISION = {
    "hidden_size": 64,
    "depth": 1,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 128,
    "patch_size": 14,
    "deepstack_visual_indexes": [],
}
# Published checkpoints of DeepSeek rotate so, too. With the default rotation, vLLM's CPU kernel rotates
# elements outside the rotary key, because it treats the tensor's strides as those of two dimensions.
_LATENT_ROPE = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=2048,
    beta_fast=32,
    beta_slow=1,
    mscale=0.707,
    mscale_all_dim=0.707,
)
_LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    # All experts: vLLM rounds a decoded token differently from a prefilled one, which can select other
    # experts.
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": _LATENT_ROPE,
}
# What published configs say beside transformers' fields; vLLM assumes otherwise.
_SIGMOID_ROUTER: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# With other weights, vLLM's two best tokens tie in bfloat16 at the second token; with these, longer answers
# can be compared.
_UNTIED: dict[str, Any] = {"n_shared_experts": 2}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}

# vLLM's CPU rotation kernel treats LFM2's keys, which have a dimension of heads, as keys without heads.
_LFM2: dict[str, Any] = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
_LFM2_FIELDS: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    # Fields that checkpoints have and transformers' config class does not.
    "conv_dim": 128,
    "block_dim": 128,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    # vLLM's class has no head that is separate from the embeddings.
    "tie_word_embeddings": True,
}
# vLLM's Mamba-2 on a CPU fails with prefix caching: its scan does not return states from inside a step.
_MAMBA2: dict[str, Any] = {"enable_prefix_caching": False}
_NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
}
# transformers' class clamps time steps, vLLM's does not.
_UNCLAMPED: dict[str, Any] = {"time_step_min": 0.0}
# vLLM's CPU kernel requires keys and values of the same, supported width.
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

BLENDED: tuple[Architecture, ...] = (
    _one("LlamaForCausalLM", "llama"),
    Architecture("LlamaForCausalLM/smollm2-135m", "llama", ranks=False, pretrained="smollm2-135m"),
    _one("LlamaForCausalLM/biases", "llama", attention_bias=True, mlp_bias=True),
    _one(
        "LlamaForCausalLM/llama3-rope",
        "llama",
        rope_parameters=_rope(
            "llama3",
            500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=1024,
        ),
    ),
    _one(
        "LlamaForCausalLM/yarn",
        "llama",
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=2048),
    ),
    _one("LlamaForCausalLM/linear-rope", "llama", rope_parameters=_rope("linear", factor=2.0)),
    _one("LlamaForCausalLM/dynamic-ntk", "llama", rope_parameters=_rope("dynamic", factor=2.0)),
    _one("MistralForCausalLM", "mistral", "window"),
    _one(
        "Ministral3ForCausalLM",
        "ministral3",
        rope_parameters=_QUERY_SCALING,
        llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": 256},
    ),
    _one("MixtralForCausalLM", "mixtral", "moe"),
    _one("Qwen2ForCausalLM", "qwen2"),
    _one("Qwen2MoeForCausalLM", "qwen2_moe", "moe"),
    _one("Qwen3ForCausalLM", "qwen3"),
    _one("Qwen3MoeForCausalLM", "qwen3_moe", "moe"),
    _one("GemmaForCausalLM", "gemma", tie_word_embeddings=True),
    _one("Gemma2ForCausalLM", "gemma2", "window", tie_word_embeddings=True, query_pre_attn_scalar=32),
    _one(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "window",
        num_hidden_layers=6,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    _one(
        "Gemma4ForCausalLM",
        "gemma4_text",
        "geometry window partial",
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        global_head_dim=64,
        vocab_size_per_layer_input=1024,
        hidden_size_per_layer_input=32,
    ),
    _one("Phi3ForCausalLM", "phi3"),
    # Half of each head: in bfloat16, vLLM's rotation on a CPU stores 16 aligned bytes at a time, and the
    # process ends where half of what is rotated is more than 8 numbers and no multiple of 8.
    _one("Phi3ForCausalLM/partial", "phi3", "partial", rope_parameters=_rope(partial_rotary_factor=0.5)),
    _one(
        "Phi3ForCausalLM/longrope",
        "phi3",
        "longrope partial",
        rope_parameters=_rope("longrope", partial_rotary_factor=0.75, **_LONG_FACTORS),
        original_max_position_embeddings=256,
    ),
    # vLLM's class has these biases, which hold arbitrary memory if a checkpoint lacks them, and never
    # adds the head's.
    Architecture(
        "PhiMoEForCausalLM",
        "phimoe",
        {"attention_bias": True, "lm_head_bias": True},
        frozenset({"moe"}),
        zeroed="lm_head.bias",
    ),
    _one("GlmForCausalLM", "glm", "backend partial"),
    _one("Glm4ForCausalLM", "glm4", "partial"),
    _one("Glm4MoeForCausalLM", "glm4_moe", "moe partial"),
    _one("NemotronForCausalLM", "nemotron", "partial"),
    _one("OlmoeForCausalLM", "olmoe", "moe"),
    _one("CohereForCausalLM", "cohere", logit_scale=0.2, tie_word_embeddings=True),
    Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        {"logit_scale": 0.2, "tie_word_embeddings": True},
        frozenset({"nope", "window"}),
        referred=_COHERE_WINDOW,
    ),
    _one("GraniteForCausalLM", "granite", attention_multiplier=0.18, residual_multiplier=0.8),
    _one("GraniteSWAForCausalLM", "granite_swa", "window", attention_multiplier=0.18),
    _one("GraniteMoeForCausalLM", "granitemoe", "moe", attention_multiplier=0.18),
    _one("GraniteMoeSharedForCausalLM", "granitemoeshared", "moe", attention_multiplier=0.18),
    _one("StableLmForCausalLM", "stablelm", "partial"),
    _one("GPTJForCausalLM", "gptj", "partial", rotary_dim=16),
    _one("GptOssForCausalLM", "gpt_oss", "sinks window moe"),
    _one("Exaone4ForCausalLM", "exaone4", "nope window"),
    _one("ExaoneMoeForCausalLM", "exaone_moe", "nope window moe"),
    _one("Ernie4_5ForCausalLM", "ernie4_5"),
    # On a CPU, vLLM 0.32 routes by softmax without the bias that corrects the scores.
    Architecture(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", shows=frozenset({"moe"}), zeroed="e_score_correction_bias"
    ),
    _one("ApertusForCausalLM", "apertus"),
    _one("AfmoeForCausalLM", "afmoe", "nope window moe", **_AFMOE),
    _one("HyperCLOVAXForCausalLM", "hyperclovax"),
    _one("HYV3ForCausalLM", "hy_v3", "moe", **_HY_V3),
    _one("DeepseekV2ForCausalLM", "deepseek_v2", "mla moe", **_LATENT),
    _one("DeepseekV3ForCausalLM", "deepseek_v3", "mla moe", **_LATENT, **_SIGMOID_ROUTER, **_UNTIED),
    _one("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "mla moe", **_LATENT, **_SIGMOID_ROUTER),
    # vLLM wants a norm after every MLP, and checkpoints have one after experts alone.
    _one("AXK1ForCausalLM", "axk1", "mla moe", **{**_LATENT, "first_k_dense_replace": 0}, **_SIGMOID_ROUTER),
    _one("MiniCPM3ForCausalLM", "minicpm3", qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64),
    _one("Llama4ForCausalLM", "llama4_text", "nope moe", attention_chunk_size=1024, num_experts_per_tok=1),
    _one("FalconForCausalLM", "falcon", ranks=False, head_dim=None, alibi=False, ffn_hidden_size=512),
    _one("BloomForCausalLM", "bloom", tie_word_embeddings=True),
    _one("GPTNeoXForCausalLM", "gpt_neox", "backend partial"),
    _one("OlmoForCausalLM", "olmo", "backend"),
    _one("Olmo2ForCausalLM", "olmo2", "backend"),
    _one("Olmo3ForCausalLM", "olmo3", "backend window"),
    _one("FlexOlmoForCausalLM", "flex_olmo", "backend moe"),
    _one("PhiForCausalLM", "phi", "backend partial"),
    _one("SmolLM3ForCausalLM", "smollm3", "backend nope"),
    _one("Starcoder2ForCausalLM", "starcoder2", "backend"),
    _one("SeedOssForCausalLM", "seed_oss", "backend"),
    _one("ArceeForCausalLM", "arcee", "backend"),
    _one("CwmForCausalLM", "cwm", "backend window", rope_parameters=_rope()),
    _one("VaultGemmaForCausalLM", "vaultgemma", "backend window", query_pre_attn_scalar=32),
    _one("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", "backend"),
    _one("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", "backend moe"),
    _one("Jais2ForCausalLM", "jais2", "backend"),
    _one("MellumForCausalLM", "mellum", "backend moe"),
    _one(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        "vision",
        text_config={"model_type": "qwen3_vl_text", "rope_parameters": _MROPE},
        vision_config=_VISION,
    ),
    _one(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        "vision",
        text_config={"model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE},
        vision_config=_VISION,
    ),
    _hybrid("Lfm2ForCausalLM", "lfm2", _LFM2_FIELDS, arguments=_LFM2),
    _hybrid("Lfm2MoeForCausalLM", "lfm2_moe", _LFM2_FIELDS, arguments=_LFM2),
    _hybrid(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "layer_types": ["mamba", "attention"] * 2,
            "position_embedding_type": "rope",
        },
        arguments=_MAMBA2,
    ),
    _hybrid("NemotronHForCausalLM", "nemotron_h", _NEMOTRON_H, arguments=_MAMBA2, referred=_UNCLAMPED),
    # vLLM computes their states on a CPU in bfloat16 alone.
    _hybrid("Qwen3NextForCausalLM", "qwen3_next", _DELTA_NET, dtype="bfloat16"),
    _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA_NET, dtype="bfloat16"),
    Architecture(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {"text_config": {"model_type": "qwen3_5_text", **_DELTA_NET}, "vision_config": _VISION},
        frozenset({"vision", "hybrid"}),
        ranks=False,
        dtype="bfloat16",
    ),
    _hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _DELTA_NET, dtype="bfloat16"),
)
"""Rows of the matrix. Models that the engine does not decline get every check."""

_HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

OTHERS: tuple[Architecture, ...] = (
    # Other names of classes above.
    _one("InternLM3ForCausalLM", "llama"),
    _one("IQuestCoderForCausalLM", "llama"),
    _one("LLaMAForCausalLM", "llama"),
    _one("TeleChat3ForCausalLM", "llama"),
    _one("ExaoneMoEForCausalLM", "exaone_moe"),
    _hybrid("NemotronHPuzzleForCausalLM", "nemotron_h", _NEMOTRON_H, arguments=_MAMBA2, referred=_UNCLAMPED),
    Architecture(
        "Cohere2MoeForCausalLM", "cohere2_moe", {"tie_word_embeddings": True}, referred=_COHERE_WINDOW
    ),
    _one("DeepseekV32ForCausalLM", "deepseek_v32"),
    _one("DeepseekV4ForCausalLM", "deepseek_v4"),
    _one("FalconMambaForCausalLM", "falcon_mamba"),
    _one("FalconH1ForCausalLM", "falcon_h1", mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32),
    _one("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    _one("GPT2LMHeadModel", "gpt2"),
    _one("GPTBigCodeForCausalLM", "gpt_bigcode", num_key_value_heads=None),
    _one("GraniteMoeSWAForCausalLM", "granitemoe_swa"),
    _one("HrmTextForCausalLM", "hrm_text"),
    _one("HYV4ForCausalLM", "hy_v4"),
    _one("InklingForCausalLM", "inkling_text"),
    _one("JambaForCausalLM", "jamba", attn_layer_period=2, attn_layer_offset=1),
    _one("KimiLinearForCausalLM", "kimi_linear", layer_types=_HYBRID),
    # Its experts are chosen by sigmoid, without groups: vLLM 0.32 refuses that on a CPU.
    _one("LagunaForCausalLM", "laguna", mlp_layer_types=["dense"] * 4),
    _one("MambaForCausalLM", "mamba"),
    _one("Mamba2ForCausalLM", "mamba2", num_heads=8, head_dim=32, expand=2, state_size=16),
    _one("MiMoV2FlashForCausalLM", "mimo_v2_flash", **_MIMO_V2),
    _one("OlmoHybridForCausalLM", "olmo_hybrid"),
    _one("OPTForCausalLM", "opt"),
    _one(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        tie_word_embeddings=True,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    _one("Zamba2ForCausalLM", "zamba2", head_dim=None, layer_types=["mamba", "hybrid"] * 2, n_mamba_heads=8),
)
"""Classes for which only one check runs: whether they blend."""


def _stand_in(name: str, model_type: str, shows: str = "", **changes: Any) -> Architecture:
    return Architecture(name, model_type, changes, frozenset(shows.split()), ranks=False, stand_in=True)


_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_STEP3P5: dict[str, Any] = {
    "num_attention_groups": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 200,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 8,
        "num_attention_groups": 2,
        "head_dim": 32,
    },
    # transformers' class would write the differences between layers here, and vLLM's class does not
    # read them here.
    "per_layer_config": {},
    "rope_theta": 10_000.0,
    "rope_parameters": _rope(),
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_router_activation": "softmax",
    "share_expert_dim": 128,
}
"""As its checkpoints write it, except for the experts, which are chosen as in MiniMax M2."""

STAND_INS: tuple[Architecture, ...] = (
    _stand_in(
        "BailingMoeForCausalLM",
        "llama",
        **_EXPERTS,
        use_bias=False,
        use_qkv_bias=False,
        embedding_dropout=0.0,
    ),
    _stand_in(
        "BailingMoeV2ForCausalLM",
        "llama",
        **_EXPERTS,
        use_bias=False,
        use_qkv_bias=False,
        embedding_dropout=0.0,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        n_group=1,
        topk_group=1,
        partial_rotary_factor=0.5,
    ),
    _stand_in("ExaoneForCausalLM", "llama", layer_norm_epsilon=1e-5, activation_function="silu"),
    _stand_in("Glm5NextForCausalLM", "glm5_next_text", num_key_value_heads=4),
    _stand_in("InternLM2ForCausalLM", "llama", bias=False),
    _stand_in("IQuestLoopCoderForCausalLM", "llama", loop_num=2, loop_window_size=64),
    _stand_in("MiMoForCausalLM", "qwen2", num_nextn_predict_layers=0),
    _stand_in("MiMoV2ForCausalLM", "mimo_v2_flash", **_MIMO_V2),
    _stand_in("MiniCPMForCausalLM", "llama", scale_depth=1.4, scale_emb=12, dim_model_base=64),
    # Checkpoints choose experts by sigmoid, without groups, as transformers always does: vLLM 0.32 refuses
    # that on a CPU. Its class reads how from the config.
    _stand_in("MiniMaxM2ForCausalLM", "minimax_m2", rotary_dim=16, scoring_func="softmax"),
    _stand_in("MiniMaxM3SparseForCausalLM", "minimax_m3_vl_text"),
    _stand_in("MistralLarge3ForCausalLM", "deepseek_v3", "mla", **_LATENT, **_SIGMOID_ROUTER, **_UNTIED),
    _stand_in("OrionForCausalLM", "llama"),
    _stand_in("PanguEmbeddedForCausalLM", "llama", bias=False),
    _stand_in("Qwen4ExpForCausalLM", "qwen4_exp_text"),
    _stand_in(
        "SolarForCausalLM",
        "llama",
        bskcn_1=[1],
        bskcn_2=[1],
        bskcn_3=[2],
        bskcn_4=[3],
        bskcn_tv=[0.9, 0.8],
    ),
    _stand_in("Step3p5ForCausalLM", "step3p5", **_STEP3P5),
    # vLLM reads these names in place of Llama's.
    _stand_in(
        "TeleChat2ForCausalLM", "llama", n_head=4, n_layer=4, ffn_hidden_size=256, layer_norm_epsilon=1e-5
    ),
    _stand_in(
        "TeleFLMForCausalLM", "llama", use_mup=True, input_mult=1.0, output_mult=1.0, mup_scale_factor=1.0
    ),
)
"""Classes whose checkpoints contain code, or choose experts in a way that vLLM does not support here. Their
vLLM class runs on the config of a related class; fields given here are written to the file unchanged."""

ALL: Mapping[str, Architecture] = {one.name: one for one in (*BLENDED, *OTHERS, *STAND_INS)}
"""Every entry by name."""

QUICK = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""The entries that `--quick` runs."""
