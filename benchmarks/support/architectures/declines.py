"""Decides whether a model's decline is clear, and derives the decline from the config if vLLM does not
start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kintsugi.models.declines import RECURRENT_STATE, Decline, DeclineReason

REASONS = frozenset(reason.value for reason in DeclineReason)
"""Reasons that come from the model. A failed self-test is not one of them, because the model was expected to
blend."""

WITHOUT_KV = frozenset({DeclineReason.RECURRENT.value, DeclineReason.INDEXED.value})
"""Reasons whose text must say that prefix caching works as before."""

_RAW_ERROR = re.compile(
    r"\b(?!NotBlendable)[A-Z]\w*(Error|Exception)\b|\bforward\(\)|Traceback|size of tensor"
)


def is_clear(reason: str) -> bool:
    """Whether ``reason``, a response's `reason: detail`, is from the list and shows no error of Python's."""
    label, _, detail = reason.partition(": ")
    if label not in REASONS or not detail.strip() or _RAW_ERROR.search(detail):
        return False
    return label not in WITHOUT_KV or "prefix caching" in detail


def decide_without_engine(folder: Path) -> str | None:
    """Return why the model in ``folder`` is not blended, according to its config; None if the config gives no
    reason.

    For classes that vLLM alone does not start, or gives no answer of, on this machine.
    """
    decline = find_decline(json.loads((folder / "config.json").read_text()))
    return str(decline) if decline else None


_LABELS: tuple[tuple[str, DeclineReason | None, str], ...] = (
    (
        r"linear|mamba|recurrent|rwkv|conv|delta|kda|lightning|ssm|hybrid|\bm\b",
        DeclineReason.RECURRENT,
        RECURRENT_STATE,
    ),
    (
        r"sparse|compressed|index|csa|hca|msa",
        DeclineReason.INDEXED,
        "attention to tokens that an index chooses",
    ),
    (r"attention|attn|sliding|full|global|local|\*", None, ""),
    (r"mlp|moe|ffn|\be\b|-", DeclineReason.ARCHITECTURE, "no attention"),
    ("", DeclineReason.ATTENTION, "an attention that is not known"),
)
"""Patterns of layers' names in configs, with the reason to decline such a layer; the first match counts."""
_LAYER_LISTS = (
    "layer_types",
    "layers_block_type",
    "layer_block_types",
    "block_types",
    "hybrid_override_pattern",
)
_RECURRENT_FIELD = re.compile(
    r"mamba_|ssm_|ssm_cfg|linear_(key|value|num)|state_size|conv_L_cache|rwkv|lru_width"
)
_INDEX_FIELD = re.compile(r"index_topk|index_n_heads|sparse_attention_config|compress_ratios?$")
_BLENDED_RECURRENCES = frozenset(
    {
        "lfm2",
        "lfm2_moe",
        "granitemoehybrid",
        "nemotron_h",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    }
)
"""Model types whose recurrent layers are blended, as are models with MLPs for layers."""
_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "opt", "xglm", "biogpt", "gpt_neo", "ctrl"})
"""Model types that add a learned embedding of the absolute position."""


def find_decline(config: Mapping[str, Any]) -> Decline | None:
    """The first property in a ``config.json`` that rules blending out."""
    inner = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    text = next((one for one in inner if isinstance(one, Mapping)), config)
    lists = next((text[name] for name in _LAYER_LISTS if text.get(name) is not None), None)
    labels = [str(label) for label in lists] if isinstance(lists, (str, list, tuple)) else []
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    count = next((text[name] for name in names if text.get(name) is not None), len(labels))
    if not isinstance(count, int) or count < 1:
        return Decline(DeclineReason.ARCHITECTURE, None, "no decoder layers in its config")
    if config.get("is_encoder_decoder"):
        return Decline(DeclineReason.ENCODER, None, "an encoder")
    used = [name for name, value in text.items() if value]
    if len(labels) < count:
        labels = ["hybrid" if any(map(_RECURRENT_FIELD.match, used)) else "attention"] * count
    if any(map(_INDEX_FIELD.match, used)):
        labels = ["index"] * count
    judged = [] if text.get("model_type") in _BLENDED_RECURRENCES else labels[:count]
    for layer, label in enumerate(judged):
        reason, feature = next(
            (reason, feature) for pattern, reason, feature in _LABELS if re.search(pattern, label.lower())
        )
        if reason is not None:
            return Decline(reason, layer, feature if lists is None else f"{feature} ({label})")
    shared = text.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared:
        return Decline(DeclineReason.SHARED_KV, count - shared, "the KV of an earlier layer")
    if text.get("kv_lora_rank") and not text.get("qk_rope_head_dim"):
        return Decline(DeclineReason.MLA, 0, "a latent without a rotary key")
    if text.get("model_type") in _LEARNED_POSITIONS:
        return Decline(DeclineReason.LEARNED_POSITIONS, None, "learned embeddings of absolute positions")
    return None
