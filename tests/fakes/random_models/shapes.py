"""Shapes of random checkpoints: architectures, sizes, and the named shapes of tests and benchmarks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from kintsugi.core.errors import InvalidField

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that vLLM's CPU attention supports."""


class Architecture(StrEnum):
    """Decoder families, by transformers' model type."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    MIXTRAL = "mixtral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    GEMMA3 = "gemma3_text"


@dataclass(frozen=True)
class ModelShape:
    """Everything that determines a checkpoint's tensors and config, except the values of the weights."""

    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    vocab: int
    """Number of rows of the embedding, which is also the size of the tokenizer's vocabulary."""
    max_positions: int = 8192
    rope: MappingProxyType[str, Any] = field(
        default_factory=lambda: MappingProxyType({"rope_type": "default", "rope_theta": 10_000.0})
    )
    """transformers' `rope_parameters` of full-attention layers."""
    local_rope_theta: float | None = None
    """RoPE base of sliding-window layers, if it differs."""
    sliding_window: int | None = None
    full_attention_every: int = 1
    """Every n-th layer attends to all tokens, the others to `sliding_window` tokens; 1: all layers are
    equal."""
    experts: int = 0
    experts_per_token: int = 0
    dtype: str = "float32"
    """Element type of the stored weights; vLLM's `dtype` may cast them."""

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise InvalidField("head_dim", f"{self.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
        if self.heads % self.kv_heads:
            raise InvalidField("kv_heads", f"{self.kv_heads} does not divide the {self.heads} heads")
        if self.layers < 1:
            raise InvalidField("layers", f"{self.layers} is not positive")

    @property
    def layer_types(self) -> list[str]:
        """The attention type of each layer, by transformers' names."""
        every = self.full_attention_every
        return [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
            for layer in range(self.layers)
        ]

    def config(self, bos_token_id: int, eos_token_id: int) -> PretrainedConfig:
        """Return the transformers config. Embeddings are never tied: with random weights, a model with a tied
        head repeats its last token."""
        values: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": dict(self.rope),
            "tie_word_embeddings": False,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": eos_token_id,
            "dtype": self.dtype,
        }
        values |= self._architecture_fields()
        config: PretrainedConfig = AutoConfig.for_model(self.architecture.value, **values)
        return config

    def _architecture_fields(self) -> dict[str, Any]:
        """Return the config fields of this architecture."""
        match self.architecture:
            case Architecture.MISTRAL:
                return {"sliding_window": self.sliding_window}
            case Architecture.MIXTRAL:
                return {
                    "sliding_window": self.sliding_window,
                    "num_local_experts": self.experts,
                    "num_experts_per_tok": self.experts_per_token,
                }
            case Architecture.QWEN3_MOE:
                return {
                    "num_experts": self.experts,
                    "num_experts_per_tok": self.experts_per_token,
                    "moe_intermediate_size": self.intermediate,
                    "norm_topk_prob": True,
                }
            case Architecture.GEMMA3:
                local = {"rope_type": "default", "rope_theta": self.local_rope_theta}
                return {
                    "sliding_window": self.sliding_window,
                    "layer_types": self.layer_types,
                    "query_pre_attn_scalar": self.head_dim,
                    "rope_parameters": {"full_attention": dict(self.rope), "sliding_attention": local},
                }
            case _:
                return {}


def _rope(rope_type: str, theta: float = 10_000.0, **values: float | int) -> MappingProxyType[str, Any]:
    return MappingProxyType({"rope_type": rope_type, "rope_theta": theta, **values})


_TINY = ModelShape(
    Architecture.LLAMA,
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=256,
    vocab=1024,
)

_LLAMA3_ROPE = _rope(
    "llama3",
    theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=1024,
)


def _tiny(architecture: Architecture, **changes: Any) -> ModelShape:
    return dataclasses.replace(_TINY, architecture=architecture, **changes)


TINY_SHAPES: dict[str, ModelShape] = {
    "tiny-llama": _TINY,
    "tiny-llama3-rope": _tiny(Architecture.LLAMA, rope=_LLAMA3_ROPE),
    "tiny-yarn": _tiny(
        Architecture.LLAMA, rope=_rope("yarn", factor=4.0, original_max_position_embeddings=2048)
    ),
    "tiny-linear-rope": _tiny(Architecture.LLAMA, rope=_rope("linear", factor=2.0)),
    # 200 is not a multiple of a backend's block of 16, 64 or 128 tokens, so windows end inside blocks.
    "tiny-mistral-window": _tiny(Architecture.MISTRAL, sliding_window=200),
    "tiny-mixtral": _tiny(Architecture.MIXTRAL, experts=4, experts_per_token=2),
    "tiny-qwen2": _tiny(Architecture.QWEN2, rope=_rope("default", 1_000_000.0)),
    "tiny-qwen3": _tiny(Architecture.QWEN3, rope=_rope("default", 1_000_000.0)),
    "tiny-qwen3-moe": _tiny(Architecture.QWEN3_MOE, intermediate=128, experts=8, experts_per_token=2),
    "tiny-gemma3": _tiny(
        Architecture.GEMMA3,
        layers=6,
        rope=_rope("linear", 1_000_000.0, factor=8.0),
        local_rope_theta=10_000.0,
        sliding_window=200,
        full_attention_every=3,
    ),
}
"""Shapes that are small enough for a test. Each covers one difference between decoders."""

SHAPES: dict[str, ModelShape] = {
    **TINY_SHAPES,
    "llama-18m": ModelShape(
        Architecture.LLAMA,
        layers=8,
        hidden=384,
        heads=6,
        kv_heads=2,
        head_dim=64,
        intermediate=1536,
        vocab=1024,
        dtype="bfloat16",
    ),
    "llama-210m": ModelShape(
        Architecture.LLAMA,
        layers=16,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=64,
        intermediate=3072,
        vocab=4096,
        max_positions=16_384,
        rope=_rope("default", 500_000.0),
        dtype="bfloat16",
    ),
    "mistral-7b-layers": ModelShape(
        Architecture.MISTRAL,
        layers=2,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14_336,
        vocab=4096,
        max_positions=32_768,
        rope=_rope("default", 1_000_000.0),
        dtype="bfloat16",
    ),
    "llama-70b-layers": ModelShape(
        Architecture.LLAMA,
        layers=1,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=28_672,
        vocab=4096,
        max_positions=32_768,
        rope=_rope("default", 500_000.0),
        dtype="bfloat16",
    ),
}
"""Every named shape. The two large ones have the layers of real models, but fewer of them."""


def find_shape(name: str) -> ModelShape:
    """Return the shape called `name`. Raises `InvalidField` with the valid names."""
    if name not in SHAPES:
        raise InvalidField("shape", f"{name!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]
