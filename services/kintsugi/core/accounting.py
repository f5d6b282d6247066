"""The accounting of a request, which every response reports under `kv_transfer_params["kintsugi"]`: at the
top level of a whole response and of a stream's last event."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kintsugi.core.errors import InvalidField, NotBlendable

ACCOUNTING_KEY = "kv_transfer_params"
"""Field of a response that holds the accounting, in its entry `core.request.PARAMS_KEY`."""
_LABEL = re.compile(r"[A-Za-z_]+")
WEIGHTS_CHANGED = "weights_changed"
"""Reason why nothing is blended or saved after a worker has found that its weights changed."""
NO_CHUNK = "no_chunk_cached"
"""Reason of a prefill: the store holds none of the prompt's chunks, and none will be saved automatically."""
NOT_SAVED_YET = "not_saved_yet"
"""Reason of a prefill where passages are discovered: none of the prompt's passages is saved yet. A passage is
saved when it recurs."""
CACHE_RESET = "cache_reset"
"""Reason why a blend or save ended: vLLM emptied its KV cache, for `/pause`, `/sleep` or a weight update."""
TICKET = "kintsugi_ticket"
"""Name of an extra argument of a request. At the first token, the scheduler reports the accounting under the
argument's value, because vLLM loses the request's own report if a stop string aborts it."""
TOLD = "told"
"""Key under which the connector's statistics hold the accountings of running requests, by ticket."""


class Outcome(StrEnum):
    """The outcome of a request."""

    BLENDED = "blended"
    SAVED = "saved"
    AUDITED = "audited"
    """A stored chunk was prefilled again and compared; `audit` holds the differences."""
    PREFIX_HIT = "prefix_hit"
    """The engine's own prefix cache already held everything that would have been blended."""
    DECLINED = "declined"
    """The prompt was prefilled in full; `reason` says why."""
    FAILED = "failed"
    """No chunk of the prompt could be loaded, so the engine computed the whole prompt; or a chunk was
    computed but not stored. `reason` says what failed."""
    MIXED = "mixed"
    """The request's prompts had different outcomes; `reason` counts them."""


def label_of_reason(reason: str | None) -> str:
    """Return the first word of a reason, such as `no_chunk_cached` or `InvalidSpan`; `none` without a
    reason."""
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
    """The difference between a stored chunk and the KV that the engine computes for it, by layer.

    An error is the L2 norm of the difference, divided by that of the computed KV; 0 where both are zero.
    """

    codec: str
    """Name of the stored chunk's codec."""
    key_errors: list[float]
    """Errors of keys, which are stored before RoPE."""
    value_errors: list[float]


@dataclass(frozen=True)
class Accounting:
    """The accounting of one request."""

    outcome: Outcome
    reason: str | None = None
    selector: str | None = None
    ratio: float | None = None
    chunks_hit: int = 0
    chunks_missed: int = 0
    tokens_hit: int = 0
    tokens_missed: int = 0
    tokens_prefix_cached: int = 0
    """Tokens that the engine's own prefix cache held. They are exact, so they are not blended."""
    tokens_question: int = 0
    """Tokens that the blend pass computed and that belong to no chunk."""
    tokens_recomputed: int = 0
    """Tokens of hit chunks that the selector chose at the deepest layer."""
    token_layers_computed: float = 0.0
    token_layers_total: int = 0
    """Computed ÷ total is the cost. A K/V projection counts as its share of a layer."""
    bytes_loaded: int = 0
    transport: str | None = None
    """Name of the path over which the bytes were loaded, such as `ram` or `grpc`."""
    load_wait_ms: float = 0.0
    compute_ms: float = 0.0
    blend_ms: float = 0.0
    """Wall time from the first slice to the last, including the engine steps between them."""
    chunks_recomputed: int = 0
    """Hit chunks that were recomputed because loading them was predicted to be slower."""
    ttft_ms: float | None = None
    """From when the scheduler first considers the request, after its wait in the queue, to the end of the
    engine step that produced the first token."""
    predicted_ttft_ms: float | None = None
    """The `ttft_ms` predicted when the prompt was planned; None if no prediction was possible."""
    restarts: int = 0
    recomputed_positions: dict[int, list[int]] | None = None
    """Layer -> positions computed, with `explain`."""
    timeline: list[LayerTiming] | None = None
    """Per layer, with `explain` or `timeline`."""
    began_unix_s: float | None = None
    """Start of the pass by the clock of the engine's host; `timeline` counts from it."""
    audit: ChunkAudit | None = None
    tokens_discovered: int = 0
    """The part of `tokens_hit` in chunks that the request did not declare: they were found by content."""
    segments_counted: int = 0
    """Segments of the prompt that were counted because no stored chunk covers them and they may recur."""
    segments_queued: int = 0
    """Segments among `segments_counted` that recurred and were queued to be saved."""

    @property
    def cost(self) -> float:
        """Share of a full prefill's token-layers that was computed. In a blend, tokens that the prefix cache
        held are left out."""
        return _share(self.token_layers_computed, self.token_layers_total)

    def to_mapping(self) -> dict[str, Any]:
        """Return the JSON form. It leaves out fields whose value is None."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        if self.timeline is not None:
            values["timeline"] = [dict(vars(layer)) for layer in self.timeline]
        if self.audit is not None:
            values["audit"] = dict(vars(self.audit))
        return {**values, "outcome": self.outcome.value, "cost": round(self.cost, 4)}


def decline(error: Exception) -> Accounting:
    """Return the accounting of a request that is not blended because of `error`."""
    reason = str(error) if isinstance(error, NotBlendable) else f"{type(error).__name__}: {error}"
    is_defect = not isinstance(error, InvalidField | NotBlendable)
    return Accounting(Outcome.DECLINED, reason=f"defect: {reason}" if is_defect else reason)


def _share(computed: float, total: float) -> float:
    return computed / total if total else 1.0


_TIMES = ("ttft_ms", "predicted_ttft_ms")
"""Times of which a request of several prompts reports the longest."""
_OF_ONE_PROMPT = ("recomputed_positions", "timeline", "began_unix_s", "audit")


def add_up(accountings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the accountings of a request's prompts, in their JSON form and in any order.

    Counts and durations are sums, as in OpenAI's `usage`; times to the first token are the longest; `cost` is
    computed from the summed work. Selector, ratio and transport are left out if they differ.
    """
    if len(accountings) == 1:
        return dict(accountings[0])
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in accountings for name in one if name not in _OF_ONE_PROMPT):
        values = [one[name] for one in accountings if name in one]
        if name in _TIMES:
            total[name] = max(values)
        elif name != "ratio" and all(type(value) in (int, float) for value in values):
            total[name] = sum(values)
        elif all(value == values[0] for value in values):
            total[name] = values[0]
    outcomes = Counter(_describe_outcome(one) for one in accountings)
    if len(outcomes) > 1:
        total["outcome"] = total.get("outcome", Outcome.MIXED.value)
        total["reason"] = "several_prompts: " + ", ".join(
            f"{count} {outcome}" for outcome, count in sorted(outcomes.items())
        )
    elif reasons := [str(one["reason"]) for one in accountings if "reason" in one]:
        total["reason"] = min(reasons)  # the reasons differ only in numbers
    total["cost"] = round(_share(total["token_layers_computed"], total["token_layers_total"]), 4)
    return total


def _describe_outcome(accounting: Mapping[str, Any]) -> str:
    outcome, reason = str(accounting["outcome"]), accounting.get("reason")
    return outcome if reason is None else f"{outcome} ({label_of_reason(reason)})"


def count_cached(reported: int, accounting: Mapping[str, Any]) -> int:
    """Return the number of a prompt's tokens that came from vLLM's prefix cache or from stored chunks.

    vLLM reports all tokens that it did not compute itself. In a blended prompt these are all tokens but the
    last, including the question and missed chunks, which the blend computed.
    """
    if accounting.get("outcome") != Outcome.BLENDED.value:
        return reported
    found = (accounting.get(name, 0) for name in ("tokens_prefix_cached", "tokens_hit"))
    return min(reported, sum(count for count in found if isinstance(count, int)))
