"""Descriptions of a model's decoder layers: what each layer stores per token, and whether it can be blended.

Layout, costs, rotation and attention follow from one `ModelLayers`. `describe_layers` builds it from a
checkpoint's config, by the field names of transformers and vLLM. The engine's `learn_model` builds the same
type from the loaded model and measures its rotations; if the two differ, the loaded model is right. Pure: no
torch, no vLLM.

A layer that cannot be blended has a `Decline`: a reason from a fixed list, the layer, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kintsugi.core.errors import NotBlendable
from kintsugi.core.layout import KVLayout, LayerGroup, Part, PartKind


class LayerKind(StrEnum):
    """How a layer mixes tokens."""

    ATTENTION = "attention"
    """Softmax attention over K and V; multi-head, grouped-query or multi-query."""
    LATENT = "latent"
    """Multi-head latent attention: one latent and one rotary key for all heads."""
    RECURRENT = "recurrent"
    """A state instead of KV per token (Mamba, Gated DeltaNet, linear attention, a short convolution), alone
    or beside attention."""
    INDEXED = "indexed"
    """Attention to the tokens that an index chooses, or over compressed KV."""
    NONE = "none"
    """An MLP alone."""
    UNKNOWN = "unknown"


class DeclineReason(StrEnum):
    """Why a model is not blended. The value is the label in responses and metrics: add, never rename."""

    MLA = "mla"
    RECURRENT = "recurrent"
    INDEXED = "indexed_attention"
    ATTENTION = "attention"
    BACKEND = "attention_backend"
    ROPE = "rope"
    ROPE_LENGTH = "rope_length"
    LEARNED_POSITIONS = "learned_positions"
    LAYER_CALLS = "layer_calls"
    SHARED_KV = "shared_kv"
    MULTIMODAL = "multimodal"
    ENCODER = "encoder"
    ARCHITECTURE = "architecture"


PLAIN = "every prompt is prefilled in full, prefix caching works as before"
"""The consequence of every reason."""
ADVICE: Mapping[DeclineReason, str] = {
    DeclineReason.MLA: f"{PLAIN}; to blend, serve a model whose latents have a rotary key beside them",
    DeclineReason.RECURRENT: f"{PLAIN}; to blend, serve a model whose layers are all attention",
    DeclineReason.INDEXED: f"{PLAIN}; to blend, serve a model that attends to every token",
    DeclineReason.ATTENTION: f"{PLAIN}; to blend, serve a model with plain causal attention",
    DeclineReason.BACKEND: f"{PLAIN}; to blend, start vLLM with attention_backend FLASH_ATTN or TRITON_ATTN",
    DeclineReason.ROPE: f"{PLAIN}; to blend, serve a model whose keys rotate by their position alone",
    DeclineReason.ROPE_LENGTH: (
        f"{PLAIN}; to blend, set max_model_len to at most the length that the model was trained for, or "
        "choose a scaling that does not depend on the prompt's length (yarn, linear, llama3)"
    ),
    DeclineReason.LEARNED_POSITIONS: f"{PLAIN}; to blend, serve a model with rotary positions or none",
    DeclineReason.LAYER_CALLS: f"{PLAIN}; to blend, serve a model whose layers run one after the other",
    DeclineReason.SHARED_KV: f"{PLAIN}; to blend, serve a model whose layers all have KV of their own",
    DeclineReason.MULTIMODAL: f"{PLAIN}; to blend, serve the text model of the family",
    DeclineReason.ENCODER: f"{PLAIN}; to blend, serve a decoder-only model",
    DeclineReason.ARCHITECTURE: f"{PLAIN}; to blend, serve a decoder of attention layers",
}
"""What to do about each reason."""


@dataclass(frozen=True)
class Decline:
    """One property that rules blending out."""

    reason: DeclineReason
    layer: int | None
    """None: the property belongs to the whole model."""
    feature: str
    """The property, as a noun phrase after "has"."""

    @property
    def detail(self) -> str:
        """Feature, layer and what to do, without the reason's label."""
        place = "the model" if self.layer is None else f"layer {self.layer}"
        return f"{place} has {self.feature}; {ADVICE[self.reason]}"

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"

    def error(self) -> NotBlendable:
        """Return the error to raise. Its text is `str` of this object."""
        return NotBlendable(self.reason.value, self.detail)


RECURRENT_STATE = "a recurrent state, which no stored chunk can be put into"


@dataclass(frozen=True)
class RotarySpec:
    """How a layer's keys rotate with their position."""

    share: float = 1.0
    """Share of a head's elements that rotate, leading ones first."""
    base: float = 10_000.0
    scaling: str = "default"
    """The config's `rope_type`: default, linear, llama3, yarn, longrope, ntk, dynamic, proportional, …"""
    mscale: float = 1.0
    """Factor of the rotated keys (YaRN's and LongRoPE's attention factor)."""
    sections: tuple[int, ...] = ()
    """M-RoPE: pairs that rotate by each axis. Text has equal axes, so it rotates like any other."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer, over all tensor-parallel ranks."""

    kind: LayerKind
    kv_heads: int = 0
    """1 for a latent, 0 where nothing is stored per token."""
    key_width: int = 0
    """Number of elements of one head's K; for a latent, of the rotary key."""
    value_width: int = 0
    """Number of elements of one head's V; for a latent, of the latent itself."""
    rotation: RotarySpec | None = None
    """None: keys do not depend on their position (NoPE)."""
    window: int | None = None
    """Positions that a token sees, including its own; None: all."""
    local_chunk: int | None = None
    """A token sees positions from the last multiple of this on (Llama 4); None: all."""
    has_sinks: bool = False
    """Whether each head has a learned logit that takes probability and contributes no value (gpt-oss)."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logit / softcap)`."""
    shares_kv_with: int | None = None
    """The earlier layer whose KV this one reads; it stores none."""
    value_is_key: bool = False
    """Whether V is computed from the same tensor as K before RoPE. That tensor is stored once."""
    label: str = ""
    """The layer's name in the config."""

    @property
    def has_frame(self) -> bool:
        """Whether a stored chunk has bytes for this layer."""
        return self.shares_kv_with is None and self.kv_heads > 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors that are stored for each head."""
        if self.kind is LayerKind.LATENT:
            return (Part(PartKind.LATENT, self.value_width), Part(PartKind.ROTARY, self.key_width))
        if self.value_is_key:
            return (Part(PartKind.KV, self.key_width),)
        return (Part(PartKind.K, self.key_width), Part(PartKind.V, self.value_width))


@dataclass(frozen=True)
class ModelLayers:
    """The decoder layers of a model in order."""

    layers: tuple[LayerSpec, ...]
    declines: tuple[Decline, ...] = ()
    """The properties that rule blending out, as far as a config shows them."""

    def layout(self, dtype: str) -> KVLayout:
        """Return the layout of the stored KV over all ranks, in elements of `dtype`. Layers without a frame
        are left out. Raises `InvalidField` for shapes that no chunk can have."""
        groups = [LayerGroup(1, layer.kv_heads, layer.parts) for layer in self.layers if layer.has_frame]
        return KVLayout.of_groups(groups, dtype)


def describe_layers(config: Mapping[str, Any]) -> ModelLayers:
    """Return the layers of a checkpoint, from its ``config.json`` (or `PretrainedConfig.to_dict()`).

    An unknown model raises no error: properties that are not understood become declines.
    """
    text = _text_config(config)
    count = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is None:
        count = len(_first(text, *_LAYER_LISTS) or ())
    if not isinstance(count, int) or count < 1:
        missing = Decline(DeclineReason.ARCHITECTURE, None, "no decoder layers in its config")
        return ModelLayers((), (missing,))
    if config.get("is_encoder_decoder"):
        return ModelLayers((), (Decline(DeclineReason.ENCODER, None, "an encoder"),))
    kinds = _kinds(text, count)
    layers = tuple(_describe_layer(text, index, *kinds[index]) for index in range(count))
    return ModelLayers(layers, tuple(_declines(text, layers)))


_LABELS: tuple[tuple[str, LayerKind], ...] = (
    (r"linear|mamba|recurrent|rwkv|conv|delta|kda|lightning|ssm|hybrid|\bm\b", LayerKind.RECURRENT),
    (r"sparse|compressed|index|csa|hca|msa", LayerKind.INDEXED),
    (r"attention|attn|sliding|full|global|local|\*", LayerKind.ATTENTION),
    (r"mlp|moe|ffn|\be\b|-", LayerKind.NONE),
)
"""Patterns of layers' names in configs; the first match counts."""
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
_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "opt", "xglm", "biogpt", "gpt_neo", "ctrl"})
"""Model types that add a learned embedding of the absolute position."""
_ROTATES_WINDOWS_ALONE = frozenset({"cohere2", "cohere2_moe", "exaone4", "exaone_moe"})
"""Model types in which only layers with windows rotate, if some layers have windows."""


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return inner
    return config


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first field that exists and is not None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _kinds(config: Mapping[str, Any], count: int) -> list[tuple[LayerKind, str]]:
    """Return kind and label of each layer."""
    labels = _first(config, *_LAYER_LISTS)
    if isinstance(labels, (str, list, tuple)) and len(labels) >= count:
        named = [(_kind_called(str(label)), str(label)) for label in labels[:count]]
    else:
        recurrent = any(_RECURRENT_FIELD.match(name) for name, value in config.items() if value)
        named = [(LayerKind.RECURRENT if recurrent else LayerKind.ATTENTION, "")] * count
    if any(_INDEX_FIELD.match(name) for name, value in config.items() if value):
        return [(LayerKind.INDEXED, label) for _, label in named]
    if config.get("kv_lora_rank"):
        is_latent = LayerKind.ATTENTION
        return [(LayerKind.LATENT if kind is is_latent else kind, label) for kind, label in named]
    return named


def _kind_called(label: str) -> LayerKind:
    return next((kind for pattern, kind in _LABELS if re.search(pattern, label.lower())), LayerKind.UNKNOWN)


def _describe_layer(config: Mapping[str, Any], index: int, kind: LayerKind, label: str) -> LayerSpec:
    if kind is LayerKind.LATENT:
        rotary, latent = config.get("qk_rope_head_dim") or 0, config["kv_lora_rank"]
        rotation = _rotation(config, label, None)
        return LayerSpec(kind, 1, rotary, latent, rotation if rotary else None, label=label)
    if kind is not LayerKind.ATTENTION:
        return LayerSpec(kind, label=label)
    heads, width = _head_shape(config, label)
    windowed = _is_windowed(config, index, label)
    window = _first(config, "sliding_window", "sliding_window_size", "window_size") if windowed else None
    rotates = _rotates(config, index, windowed)
    value_width = _first(config, "v_head_dim") or width
    return LayerSpec(
        kind,
        heads,
        width,
        value_width,
        _rotation(config, label, width) if rotates else None,
        window if isinstance(window, int) else None,
        config.get("attention_chunk_size") if rotates else None,
        config.get("model_type") == "gpt_oss",
        _first(config, "attn_logit_softcapping"),
        _shared_with(config, index, label),
        bool(config.get("attention_k_eq_v")) and not windowed,
        label,
    )


def _head_shape(config: Mapping[str, Any], label: str) -> tuple[int, int]:
    """Return the number of KV heads and the width of a head."""
    queries = _first(config, "num_attention_heads", "n_head", "n_heads") or 1
    hidden = _first(config, "hidden_size", "n_embd", "d_model") or queries
    heads = _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        heads = 1
    width = _first(config, "head_dim", "kv_channels", "attention_head_dim") or hidden // queries
    if label == "full_attention":
        width = _first(config, "global_head_dim") or width
        heads = _first(config, "num_global_key_value_heads") or heads
    return (heads if isinstance(heads, int) else queries), width


def _is_windowed(config: Mapping[str, Any], index: int, label: str) -> bool:
    """Whether the layer has a sliding window."""
    if not _first(config, "sliding_window", "sliding_window_size", "window_size"):
        return False
    if label:
        return "sliding" in label or "local" in label
    if config.get("use_sliding_window") is False:
        return False
    pattern = _first(config, "sliding_window_pattern")
    return (index + 1) % pattern != 0 if isinstance(pattern, int) and pattern > 0 else True


def _rotates(config: Mapping[str, Any], index: int, windowed: bool) -> bool:
    """Whether the layer's keys rotate."""
    flags = config.get("no_rope_layers")
    if isinstance(flags, (list, tuple)) and index < len(flags):
        return bool(flags[index])  # 1 means that the layer rotates, despite the field's name
    interval = config.get("no_rope_layer_interval")
    if isinstance(interval, int) and interval > 0:
        return (index + 1) % interval != 0
    if config.get("model_type") in _ROTATES_WINDOWS_ALONE and _first(config, "sliding_window"):
        labels = config.get("layer_types") or ()
        return windowed or "sliding_attention" not in labels
    if config.get("alibi") or config.get("model_type") in ("bloom", "mpt", *_LEARNED_POSITIONS):
        return False
    return config.get("position_embedding_type") not in ("learned", "absolute", "alibi", "nope")


def _rotation(config: Mapping[str, Any], label: str, width: int | None) -> RotarySpec:
    fields = _first(config, "rope_parameters", "rope_scaling") or {}
    if isinstance(fields.get(label), Mapping):
        fields = fields[label]
    share = _first({**config, **fields}, "partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_pct")
    rotary = _first(config, "rotary_dim")
    if share is None:
        share = rotary / width if rotary and width else 1.0
    return RotarySpec(
        float(share),
        float(_first({**config, **fields}, "rope_theta", "rotary_emb_base", "rotary_base") or 10_000.0),
        _rope_type(fields),
        float(_first(fields, "attention_factor") or 1.0),
        tuple(fields.get("mrope_section") or ()),
    )


def longrope_factors(config: Mapping[str, Any], max_model_len: int | None) -> str | None:
    """Return which of LongRoPE's two lists of factors vLLM uses for all prompts: ``short`` or ``long``; None
    for another rotation. vLLM uses ``long`` if `max_model_len` exceeds the length that the model was trained
    for. A `max_model_len` of None or -1 means vLLM's default."""
    text = _text_config(config)
    fields = _first(text, "rope_parameters", "rope_scaling") or {}
    of_layers = [one for one in fields.values() if isinstance(one, Mapping)]
    found = next((one for one in (fields, *of_layers) if _rope_type(one) in ("longrope", "su")), None)
    if found is None:
        return None
    trained = _first({**text, **found}, "original_max_position_embeddings")
    if max_model_len is None or max_model_len < 0:
        max_model_len = _first(text, "original_max_position_embeddings", "max_position_embeddings")
    if not isinstance(trained, int) or not isinstance(max_model_len, int):
        return "long"
    return "long" if max_model_len > trained else "short"


def _rope_type(fields: Mapping[str, Any]) -> str:
    return str(_first(fields, "rope_type", "type") or "default")


def _shared_with(config: Mapping[str, Any], index: int, label: str) -> int | None:
    """Return the last layer of the same type that has its own KV, for layers that share KV; otherwise
    None."""
    count, shared = _first(config, "num_hidden_layers", "n_layer"), config.get("num_kv_shared_layers")
    if not isinstance(shared, int) or not shared or index < count - shared:
        return None
    labels: Sequence[str] = config.get("layer_types") or ()
    own = [earlier for earlier in range(count - shared) if earlier < len(labels) and labels[earlier] == label]
    return own[-1] if own else None


_FEATURES = {
    LayerKind.RECURRENT: (DeclineReason.RECURRENT, RECURRENT_STATE),
    LayerKind.INDEXED: (DeclineReason.INDEXED, "attention to tokens that an index chooses"),
    LayerKind.NONE: (DeclineReason.ARCHITECTURE, "no attention"),
    LayerKind.UNKNOWN: (DeclineReason.ATTENTION, "an attention that is not known"),
}


def _declines(config: Mapping[str, Any], layers: Sequence[LayerSpec]) -> Iterator[Decline]:
    """Yield a decline for the first layer of each kind that is not plain attention, then those of the whole
    model."""
    seen: set[LayerKind] = set()
    for index, layer in enumerate(layers):
        if layer.kind in _FEATURES and layer.kind not in seen:
            seen.add(layer.kind)
            reason, feature = _FEATURES[layer.kind]
            yield Decline(reason, index, f"{feature} ({layer.label})" if layer.label else feature)
    shared = next((index for index, layer in enumerate(layers) if layer.shares_kv_with is not None), None)
    if shared is not None:
        yield Decline(DeclineReason.SHARED_KV, shared, f"the KV of layer {layers[shared].shares_kv_with}")
    bare = [i for i, layer in enumerate(layers) if layer.kind is LayerKind.LATENT and not layer.key_width]
    if bare:
        yield Decline(DeclineReason.MLA, bare[0], "a latent without a rotary key")
    if config.get("model_type") in _LEARNED_POSITIONS:
        yield Decline(DeclineReason.LEARNED_POSITIONS, None, "learned embeddings of absolute positions")
