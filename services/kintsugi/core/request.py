"""A request's parameters for the engine, `kv_transfer_params["kintsugi"]`, typed and checked.

A gateway or client sends constraints; only the connector plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import StrictBool, StrictFloat, StrictInt

from kintsugi.core.errors import InvalidField, InvalidSpan
from kintsugi.core.plugins import SELECTORS, plugin_names
from kintsugi.core.schema import STRICT, load
from kintsugi.core.spaces import ChunkKey, Span, check_namespace

PARAMS_KEY = "kintsugi"
PARAMS_VERSION = 1
SPANS_MAX = 4096
TIER_CHARS_MAX = 64
TTL_S_MAX = 10 * 365 * 86_400.0
"""Ten years."""
FOUND_CHARS_MIN = 32
"""Minimum characters of a text that is found as a chunk anywhere in a prompt. A shorter text is a chunk only
where it is marked: otherwise every "the" would be tokenised separately. The engine's own minimum, for search
by tokens, is `spaces.ANCHOR_TOKENS`."""


def check_priority(priority: int, allow_negative_priority: bool) -> int:
    """Return vLLM's priority, where lower runs first. Raises `InvalidField` for a negative priority if these
    are not allowed."""
    if priority < 0 and not allow_negative_priority:
        raise InvalidField(
            "priority",
            f"{priority} goes before everybody else's: leave it out, or send 0 or more to give way; whoever "
            "runs the gateway may allow it with gateway.expert.allow_negative_priority",
        )
    return priority


def check_ttl(ttl_s: float | None) -> float | None:
    """Return the lifetime in seconds; None: no limit. Raises `InvalidField`."""
    if ttl_s is not None and not 0.0 < ttl_s <= TTL_S_MAX:
        raise InvalidField(
            "ttl_s",
            f"{ttl_s} is not above 0 and at most {TTL_S_MAX:.0f} seconds (ten years); leave it out to keep "
            "chunks until the store needs their room",
        )
    return ttl_s


def longest_ttl(one: float | None, other: float | None) -> float | None:
    """Return the longer of two lifetimes; None is unlimited, and so the longest."""
    return None if one is None or other is None else max(one, other)


class Op(StrEnum):
    """What to do with the prompt."""

    BLEND = "blend"
    SAVE = "save"
    AUDIT = "audit"
    """Prefill a stored chunk again, as a save would, and report how far the stored KV differs. Only shadowing
    requests it; callers of a service cannot."""
    OFF = "off"

    @property
    def prefills_chunk(self) -> bool:
        """Whether the prompt is one chunk after its prefix and context, plus one more token."""
        return self in (Op.SAVE, Op.AUDIT)


class SelectorName(StrEnum):
    """Kintsugi's own selectors. Other distributions add theirs by entry points (`core.plugins`)."""

    HKVD = "hkvd"
    """High KV deviation at the check layer; one set for every deeper layer."""
    HKVD_GRADUAL = "hkvd_gradual"
    """The paper's gradual filtering: a set a little too large, filtered again at every layer."""
    CHUNK_HEAD = "chunk_head"
    """The first tokens of each chunk (EPIC), which acted as an attention sink."""
    QUERY = "query"
    """Tokens that the question attends to, seen in a pass of the question alone over the loaded KV."""
    HYBRID = "hybrid"
    """Chunk heads, and tokens that the question attends to and that deviate at the check layer."""
    RANDOM = "random"
    """Random tokens, as a control."""


_OWN_SELECTORS = frozenset(SelectorName)


@dataclass(frozen=True)
class BlendOptions:
    """The blend options of a request; None leaves the choice to the engine's calibration.

    The same value passes from the wire to the planner, and every step between converts it by field name. A
    new option is a field here with its check, and a field of the same name in `KintsugiParams`, `_Wire`,
    `core.plan.Selection` and the wire protocol's `GenerateRequest`.
    """

    ratio: float | None = None
    selector: str | None = None
    adaptive_mass: float | None = None
    """Makes the ratio a ceiling: see `core.plan.Selection`. 1 recomputes up to the ceiling."""

    def __post_init__(self) -> None:
        if self.ratio is not None and not (math.isfinite(self.ratio) and 0.0 <= self.ratio <= 1.0):
            raise InvalidField("ratio", f"{self.ratio} is outside [0, 1]")
        if self.adaptive_mass is not None and not 0.0 < self.adaptive_mass <= 1.0:
            raise InvalidField("adaptive_mass", f"{self.adaptive_mass} is outside (0, 1]")

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> BlendOptions:
        """Return the options in `values` by field name; other names are ignored. Raises `InvalidField`."""
        chosen = {name: values.get(name) for name in OPTION_NAMES}
        if chosen["selector"] is not None:
            chosen["selector"] = parse_selector(chosen["selector"])
        return BlendOptions(**chosen)

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are not None, by field name."""
        return {name: value for name, value in vars(self).items() if value is not None}


OPTION_NAMES = tuple(field.name for field in fields(BlendOptions))


@dataclass(frozen=True)
class _Wire:
    """The JSON form of `KintsugiParams`. JSON has types: `true` is no ratio, and `"yes"` no flag."""

    __pydantic_config__ = STRICT

    namespace: str
    """The tenant whose chunks may be used."""
    version: StrictInt = PARAMS_VERSION
    """Version of this form."""
    op: Op = Op.BLEND
    """`blend` answers from stored chunks, `save` stores the one chunk that `spans` names, `audit` compares
    it."""
    spans: list[list[Any]] | None = None
    """Where chunks stand in the prompt, as `[start, end]` in tokens, or `[start, end, key]`. Null: known
    chunks are found by their content."""
    ratio: StrictFloat | None = None
    """Share of the hit tokens to recompute, 0 to 1. Null: the report's."""
    selector: str | None = None
    """Which tokens to recompute. Null: the report's."""
    adaptive_mass: StrictFloat | None = None
    """Makes the ratio a ceiling: no more tokens are recomputed than hold this share of the selector's
    signal."""
    explain: StrictBool = False
    """Report which positions each layer computed, and what `timeline` reports."""
    timeline: StrictBool = False
    """Report when each layer was loaded and computed."""
    tier: str = ""
    """Where a save keeps its chunk: `auto`, `ram` or the name of an SSD tier. Empty: as the store's client
    is configured."""
    ttl_s: StrictFloat | None = None
    """How long what is stored on behalf of the request is kept at most, in seconds: the chunk of a save,
    chunks that the request misses and a gateway fills, and segments that it discovers. Null: no bound, and
    for discovered segments that of the engine."""
    asked_at_s: StrictFloat = 0.0
    """When a save was requested (`ChunkManifest.asked_at_s`). 0: when the engine puts the chunk."""
    shared: str = ""
    """A namespace whose chunks are used where the request's own has none. Only a gateway sets it."""
    chunk_tokens_multiple: StrictInt = 1
    """Chunks that are found by their texts end at a multiple of this many tokens. A gateway sets it."""
    discover: StrictBool = False
    """Count this prompt's segments as seen, save those that recur, and use saved ones."""
    no_store: StrictBool = False
    """Remember nothing of this prompt: none of its texts is counted as seen or saved, whether it is declared
    as a chunk or not. What is stored is used; beside declared chunks no others are."""


@dataclass(frozen=True)
class KintsugiParams:
    """One request's constraints.

    If ``spans`` is None, known chunks are found by content. ``ratio``, ``selector`` and ``adaptive_mass`` are
    those of `BlendOptions`, which `options` returns.
    """

    namespace: str
    """The tenant whose chunks may be used."""
    op: Op = Op.BLEND
    """What the request does."""
    spans: tuple[Span, ...] | None = None
    """Positions of the chunks in the prompt; None: they are found by their content."""
    ratio: float | None = None
    """Share of the hit tokens to recompute, 0 to 1; None: the report's."""
    selector: str | None = None
    """Which tokens to recompute; None: the report's."""
    adaptive_mass: float | None = None
    """Makes the ratio a ceiling: see `core.plan.Selection`."""
    explain: bool = False
    """Report which positions each layer computed, and what `timeline` reports."""
    timeline: bool = False
    """Report when each layer was loaded and computed."""
    tier: str = ""
    """Where a save keeps its chunk: `auto`, `ram` or the name of one of the store's SSD tiers. Empty: as the
    store's client is configured."""
    ttl_s: float | None = None
    """Maximum lifetime in seconds of what is stored for the request; None: no limit of its own."""
    asked_at_s: float = 0.0
    """When a save was requested (`ChunkManifest.asked_at_s`). 0: when the engine puts the chunk."""
    shared: str = ""
    """A namespace whose chunks are used where the request's own has none; empty: none. A gateway sets it,
    never a caller: it decides whose chunks are read."""
    chunk_tokens_multiple: int = 1
    """Chunks that are found by their texts end at a multiple of this many tokens. A gateway sets it."""
    discover: bool = False
    """Count the segments of the prompt outside its `spans`, and save those that recur. A gateway sets it from
    the namespace's rules: other users of a namespace can tell what was saved in it."""
    no_store: bool = False
    """Count and save nothing of this prompt."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if self.shared:
            check_namespace(self.shared)
        if self.chunk_tokens_multiple < 1:
            raise InvalidField("chunk_tokens_multiple", f"{self.chunk_tokens_multiple} must be at least 1")
        if self.tier and (self.op is not Op.SAVE or len(self.tier) > TIER_CHARS_MAX):
            raise InvalidField("tier", f"is for op=save alone and has at most {TIER_CHARS_MAX} characters")
        check_ttl(self.ttl_s)
        if self.op.prefills_chunk and (self.spans is None or len(self.spans) != 1):
            raise InvalidSpan("spans", f"op={self.op} needs exactly one span: the chunk to prefill")
        _ = self.options  # checks its fields

    @cached_property
    def options(self) -> BlendOptions:
        """What the request chooses about its blend."""
        return BlendOptions(**{name: getattr(self, name) for name in OPTION_NAMES})

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> KintsugiParams:
        """Parse the JSON form. Raises `InvalidField` and its subclasses."""
        wire = load(_Wire, values, where=PARAMS_KEY)
        if wire.version != PARAMS_VERSION:
            raise InvalidField(
                "version", f"{wire.version} is not {PARAMS_VERSION}, the one this engine speaks"
            )
        return KintsugiParams(
            namespace=wire.namespace,
            op=wire.op,
            spans=None if wire.spans is None else parse_spans(wire.spans),
            explain=wire.explain,
            timeline=wire.timeline,
            tier=wire.tier,
            ttl_s=wire.ttl_s,
            asked_at_s=wire.asked_at_s,
            shared=wire.shared,
            chunk_tokens_multiple=wire.chunk_tokens_multiple,
            discover=wire.discover,
            no_store=wire.no_store,
            **BlendOptions.from_mapping(vars(wire)).chosen,
        )

    def to_mapping(self) -> dict[str, Any]:
        """The JSON form, for a request's `kv_transfer_params`."""
        wire: dict[str, Any] = {"version": PARAMS_VERSION, "op": self.op.value, "namespace": self.namespace}
        if self.spans is not None:
            wire["spans"] = [[s.start, s.end, *([s.key.hex] if s.key else [])] for s in self.spans]
        for name, value in self.options.chosen.items():
            wire[name] = value.value if isinstance(value, StrEnum) else value
        names = ("explain", "timeline", "tier", "asked_at_s", "shared", "discover", "no_store")
        wire |= {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.ttl_s is not None:
            wire["ttl_s"] = self.ttl_s
        if self.chunk_tokens_multiple != 1:
            wire["chunk_tokens_multiple"] = self.chunk_tokens_multiple
        return {PARAMS_KEY: wire}


def trim_spans(spans: Sequence[Span], multiple: int) -> tuple[Span, ...]:
    """Cut each span at its end to a multiple of ``multiple`` tokens; shorter spans are left out. Their keys
    are dropped, because they belong to the whole spans."""
    if multiple == 1:
        return tuple(spans)
    cut = (Span(one.start, one.end - one.num_tokens % multiple) for one in spans)
    return tuple(span for span in cut if span.num_tokens)


def parse_selector(name: str) -> str:
    """Return the name. Raises `InvalidField` if no selector has it."""
    if name in _OWN_SELECTORS:
        return name
    added = plugin_names(SELECTORS)
    if name not in added:
        raise InvalidField("selector", f"{name!r} is not one of {', '.join((*SelectorName, *added))}")
    return name


def parse_spans(rows: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    """Spans from `[start, end]` or `[start, end, key-hex]` rows."""
    if len(rows) > SPANS_MAX:
        raise InvalidField("spans", f"{len(rows)} spans; at most {SPANS_MAX} are allowed")
    return tuple(_parse_span(row, f"spans[{index}]") for index, row in enumerate(rows))


def _parse_span(row: Sequence[Any], where: str) -> Span:
    bounds = row[:2]
    if len(row) not in (2, 3) or not all(type(bound) is int for bound in bounds):
        raise InvalidSpan(where, f"expected [start, end] or [start, end, key], got {list(row)!r}")
    key = row[2] if len(row) == 3 else None
    if key is not None and not isinstance(key, str):
        raise InvalidSpan(where, f"the key must be a hexadecimal string, got {type(key).__name__}")
    try:
        return Span(bounds[0], bounds[1], None if key is None else ChunkKey.from_hex(key))
    except InvalidField as error:
        raise InvalidSpan(where, f"the key {error.problem}") from None


def check_no_audit(params: KintsugiParams) -> None:
    """Raise `InvalidField` for an audit: only shadowing may request one, and by another path."""
    if params.op is Op.AUDIT:
        raise InvalidField("op", "audit belongs to shadowing; use blend or off")


def check_spans(spans: Sequence[Span], num_tokens: int) -> None:
    """Raise `InvalidSpan` unless spans are non-empty, inside the prompt, in order and disjoint."""
    previous_end = 0
    for index, span in enumerate(spans):
        where = f"spans[{index}]"
        if span.end <= span.start:
            raise InvalidSpan(where, f"[{span.start}, {span.end}) is empty")
        if span.start < 0 or span.end > num_tokens:
            raise InvalidSpan(where, f"[{span.start}, {span.end}) leaves the prompt of {num_tokens} tokens")
        if span.start < previous_end:
            raise InvalidSpan(
                where, f"starts at {span.start}, before the previous span ends at {previous_end}"
            )
        previous_end = span.end
