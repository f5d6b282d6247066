"""What a request cost, as every response says it under `kv_transfer_params["kintsugi"]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kintsugi.core.errors import InvalidField, NotBlendable

_LABEL = re.compile(r"[A-Za-z_]+")
WEIGHTS_CHANGED = "weights_changed"
"""The reason why nothing is blended or saved once a worker has found other weights than it started with."""
TICKET = "kintsugi_ticket"
"""An extra argument of a request: the scheduler's side reports its accounting under this at the first token.
Where a stop string ends the answer, vLLM aborts the request in its core, whose own report is lost."""
TOLD = "told"
"""An entry of the connector's statistics: accountings of requests that are still running, by ticket."""


class Outcome(StrEnum):
    """How the prompt was prefilled."""

    BLENDED = "blended"
    SAVED = "saved"
    AUDITED = "audited"
    """A stored chunk was prefilled again and compared; `audit` says how far they differ."""
    PREFIX_HIT = "prefix_hit"
    """The engine's own prefix cache already held everything that would have been blended."""
    DECLINED = "declined"
    """An ordinary full prefill; `reason` says why."""
    FAILED = "failed"
    """Nothing of the prompt could be loaded any more, and the engine computed it; or a chunk was computed
    but the store did not take it. `reason` says what failed."""


def label_of_reason(reason: str | None) -> str:
    """The first word of a reason, one of a few: `no_chunk_cached`, `InvalidSpan`; `none` without a reason."""
    if reason is None:
        return "none"
    label = reason.split(":", 1)[0]
    return label if _LABEL.fullmatch(label) else "other"


@dataclass(frozen=True)
class LayerTiming:
    """One layer of a blend pass, in milliseconds since the pass began."""

    load_start_ms: float
    load_end_ms: float
    compute_start_ms: float
    compute_end_ms: float


@dataclass(frozen=True)
class ChunkAudit:
    """How far a stored chunk is from what the engine computes for it, by layer.

    An error is the L2 norm of the difference, relative to that of the engine's own; 0 where both are zero.
    """

    codec: str
    """Name of the codec that the chunk is stored in."""
    key_errors: list[float]
    """Errors of keys before RoPE, as they are stored."""
    value_errors: list[float]


@dataclass(frozen=True)
class Accounting:
    """Counts are tokens of this request's prompt unless a name says otherwise."""

    outcome: Outcome
    reason: str | None = None
    selector: str | None = None
    ratio: float | None = None
    chunks_hit: int = 0
    chunks_missed: int = 0
    tokens_hit: int = 0
    tokens_missed: int = 0
    tokens_prefix_cached: int = 0
    """Exact hits in the engine's own prefix cache; never blended again."""
    tokens_question: int = 0
    """Tokens outside every chunk that the blend pass computed."""
    tokens_recomputed: int = 0
    """Tokens of hit chunks that the selector chose at the deepest layer."""
    token_layers_computed: float = 0.0
    token_layers_total: int = 0
    """Computed ÷ total is the cost that speed is quoted for; a K/V projection counts its share of a layer."""
    bytes_loaded: int = 0
    transport: str | None = None
    """Where the bytes came from: the store's own name of the path."""
    load_wait_ms: float = 0.0
    compute_ms: float = 0.0
    blend_ms: float = 0.0
    """Wall time from the first slice to the last, engine steps between them included."""
    chunks_recomputed: int = 0
    """Hit chunks that were computed because loading them was predicted to be slower."""
    ttft_ms: float | None = None
    """From the scheduler's first look at the request, its queue behind it, to the end of the engine step that
    brought the first token."""
    predicted_ttft_ms: float | None = None
    """The same as it was predicted when the prompt was planned; None where nothing was known yet."""
    restarts: int = 0
    recomputed_positions: dict[int, list[int]] | None = None
    """Layer -> positions computed, with `explain`."""
    timeline: list[LayerTiming] | None = None
    """Per layer, with `explain` or `timeline`."""
    began_unix_s: float | None = None
    """When the pass began by the clock of the engine's host: what `timeline` counts from."""
    audit: ChunkAudit | None = None
    tokens_discovered: int = 0
    """Tokens among `tokens_hit` whose chunks the request did not declare: their content was found, whoever
    stored them. Discovery did, or a put, a save or precompute; a store does not say."""
    segments_counted: int = 0
    """Segments of the prompt that no stored chunk covers and that were counted, because they may recur."""
    segments_queued: int = 0
    """Segments among `segments_counted` that recurred, and now wait to be saved."""

    @property
    def cost(self) -> float:
        """Share of a full prefill's token-layers that was computed."""
        return self.token_layers_computed / self.token_layers_total if self.token_layers_total else 1.0

    def to_mapping(self) -> dict[str, Any]:
        """JSON form: fields that say nothing are left out."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        if self.timeline is not None:
            values["timeline"] = [dict(vars(layer)) for layer in self.timeline]
        if self.audit is not None:
            values["audit"] = dict(vars(self.audit))
        return {**values, "outcome": self.outcome.value, "cost": round(self.cost, 4)}


def decline(error: Exception) -> Accounting:
    """The accounting of a request that `error` keeps from being blended."""
    reason = str(error) if isinstance(error, NotBlendable) else f"{type(error).__name__}: {error}"
    is_defect = not isinstance(error, InvalidField | NotBlendable)
    return Accounting(Outcome.DECLINED, reason=f"defect: {reason}" if is_defect else reason)
