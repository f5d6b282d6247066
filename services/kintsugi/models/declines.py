"""Reasons why a model is not blended, each with what the user can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import NotBlendable


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
    DeclineReason.MLA: f"{PLAIN}; to blend, serve a model whose latent attention has a rotary key",
    DeclineReason.RECURRENT: (
        f"{PLAIN}; to blend, serve a model that combines attention with short convolutions, Gated DeltaNet "
        "or Mamba-2"
    ),
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
    DeclineReason.SHARED_KV: f"{PLAIN}; to blend, serve a model in which every layer has its own KV",
    DeclineReason.MULTIMODAL: f"{PLAIN}; to blend, serve the text model of the family",
    DeclineReason.ENCODER: f"{PLAIN}; to blend, serve a decoder-only model",
    DeclineReason.ARCHITECTURE: f"{PLAIN}; to blend, serve a model of decoder layers with one attention each",
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


RECURRENT_STATE = "a recurrent layer of a kind that is not blended"
