"""A request's parameters for the engine, `kv_transfer_params["kintsugi"]`, typed and checked.

A gateway or client sends constraints; only the connector plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator

from kintsugi.core.errors import InvalidField, InvalidSpan
from kintsugi.core.plugins import SELECTORS, plugin_names
from kintsugi.core.schema import STRICT, check_number, load
from kintsugi.core.spaces import ChunkKey, Span, check_namespace

PARAMS_KEY = "kintsugi"
PARAMS_VERSION = 1
SPANS_MAX = 4096
TTL_S_MAX = 10 * 365 * 86_400.0
"""Ten years."""
FOUND_CHARS_MIN = 32
"""Minimum number of characters of a text that is found as a chunk anywhere in a prompt. A shorter text is a
chunk only where it is marked; otherwise every "the" would be tokenised separately. The engine's minimum, for
search by tokens, is `spaces.ANCHOR_TOKENS`."""


def check_priority(priority: int) -> int:
    """Return vLLM's priority, where lower runs first. Raises `InvalidField` for a priority below 0, which
    would run before all requests that name none."""
    if priority < 0:
        raise InvalidField(
            "priority", f"{priority} is below 0; leave it out, or send a number above 0 to run after others"
        )
    return priority


def check_ttl(ttl_s: float | None) -> float | None:
    """Return the lifetime in seconds; None: no limit. Raises `InvalidField`."""
    if ttl_s is not None and not 0.0 < check_number(ttl_s, "ttl_s") <= TTL_S_MAX:
        raise InvalidField(
            "ttl_s",
            f"{ttl_s} must be above 0 and at most {TTL_S_MAX:.0f} seconds (ten years); leave it out to keep "
            "chunks until they are evicted",
        )
    return ttl_s


def longest_ttl(one: float | None, other: float | None) -> float | None:
    """Return the longer of two lifetimes; None is unlimited, and so the longest."""
    return None if one is None or other is None else max(one, other)


class Op(StrEnum):
    """The operation that a request performs with its prompt."""

    BLEND = "blend"
    SAVE = "save"
    AUDIT = "audit"
    """Prefill a stored chunk again, like a save, and report the difference from the stored KV. Only the
    engine itself may request it, not callers of a service."""
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
    """The paper's gradual filtering: a slightly larger set, filtered again at every layer."""
    CHUNK_HEAD = "chunk_head"
    """The first tokens of each chunk, which were an attention sink when it was prefilled (EPIC)."""
    QUERY = "query"
    """Tokens that the question attends to, in a pass of the question alone over the loaded KV."""
    HYBRID = "hybrid"
    """Chunk heads, and tokens that the question attends to and that deviate at the check layer."""
    RANDOM = "random"
    """Random tokens, as a control."""


_OWN_SELECTORS = frozenset(SelectorName)


@dataclass(frozen=True)
class BlendOptions:
    """The blend options of a request; None leaves the choice to the engine's calibration.

    They are converted by field name from the wire to the planner. A new option is a field here with its
    check, and a field of the same name in `KintsugiParams`, `core.plan.Selection` and the wire protocol's
    `GenerateRequest`.
    """

    ratio: float | None = None
    selector: str | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and not 0.0 <= self.ratio <= 1.0:
            raise InvalidField("ratio", f"{self.ratio} is outside [0, 1]")
        if self.selector is not None:
            parse_selector(self.selector)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> BlendOptions:
        """Return the options in `values` by field name; other names are ignored. Raises `InvalidField`."""
        return BlendOptions(**{name: values.get(name) for name in OPTION_NAMES})

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are not None, by field name."""
        return {name: value for name, value in vars(self).items() if value is not None}


OPTION_NAMES = tuple(field.name for field in fields(BlendOptions))


def _read_spans(rows: Any) -> tuple[Span, ...] | None:
    """Return the spans of `[start, end]` or `[start, end, key]` rows, with the key in hexadecimal. Raises
    `InvalidField`."""
    if rows is None:
        return None
    if not isinstance(rows, list):
        raise InvalidField("spans", f"must be a list of [start, end], not a {type(rows).__name__}")
    if len(rows) > SPANS_MAX:
        raise InvalidField("spans", f"{len(rows)} spans; at most {SPANS_MAX} are allowed")
    return tuple(_read_span(row, f"spans[{index}]") for index, row in enumerate(rows))


def _read_context(rows: Any) -> tuple[Span, ...]:
    """Return the spans of `[start, end]` rows. Raises `InvalidField`."""
    return _read_spans(rows) or ()


def _read_span(row: Any, where: str) -> Span:
    is_row = isinstance(row, list) and len(row) in (2, 3) and all(type(bound) is int for bound in row[:2])
    if not is_row:
        raise InvalidSpan(where, f"expected [start, end] or [start, end, key], got {row!r}")
    key = row[2] if len(row) == 3 else None
    if key is not None and not isinstance(key, str):
        raise InvalidSpan(where, f"the key must be a hexadecimal string, got {type(key).__name__}")
    try:
        return Span(row[0], row[1], None if key is None else ChunkKey.from_hex(key))
    except InvalidField as error:
        raise InvalidSpan(where, f"the key {error.problem}") from None


@dataclass(frozen=True)
class Trial:
    """Blend with exactly this configuration, whether it passed or not, and share the KV with no other
    request: a twin of a measured answer (`quality.stream`). Callers of a service cannot request one."""

    __pydantic_config__ = STRICT

    ratio: float
    """`core.plan.Selection.ratio`."""
    selector: str
    """`core.plan.Selection.selector`."""
    check_layer: int
    """`core.plan.Selection.check_layer`."""
    query_layers: tuple[int, ...] = ()
    """`core.plan.Selection.query_layers`."""
    answer_tokens: int = 0
    """Number of tokens at the end of the prompt that are not blended, because they belong to an answer. The
    engine computes them after the blend, and reports the logprobs along them."""


@dataclass(frozen=True)
class KintsugiParams:
    """One request's constraints, and their JSON form. JSON has types: `true` is not a ratio.

    ``ratio`` and ``selector`` are those of `BlendOptions`, which `options` returns.
    """

    __pydantic_config__ = STRICT

    namespace: str
    """The tenant whose chunks may be used."""
    op: Op = Op.BLEND
    """`blend` answers from stored chunks, `save` stores the one chunk that `spans` names, `audit` compares
    that chunk with a new prefill, and `off` does none of these."""
    spans: Annotated[tuple[Span, ...] | None, BeforeValidator(_read_spans)] = None
    """Positions of the chunks in the prompt, in JSON `[start, end]` in tokens, or `[start, end, key]`. Null:
    known chunks are found by their content."""
    context: Annotated[tuple[Span, ...], BeforeValidator(_read_context)] = ()
    """In a save: positions of the passages between the prefix and the chunk, in JSON `[start, end]`, if they
    are not the space's context. They belong to the chunk's namespace."""
    ratio: float | None = None
    """Share of the hit tokens to recompute, 0 to 1. Null: the report's."""
    selector: str | None = None
    """Which tokens to recompute. Null: the report's."""
    explain: bool = False
    """Report which positions each layer computed, and what `timeline` reports."""
    timeline: bool = False
    """Report when each layer was loaded and computed."""
    ttl_s: float | None = None
    """Maximum lifetime in seconds of what is stored for the request: the chunk of a save, chunks that the
    request misses and a gateway fills, and segments that it discovers. Null: no limit of its own."""
    asked_at_s: float = 0.0
    """When a save was requested (`ChunkManifest.asked_at_s`). 0: when the engine puts the chunk."""
    shared: str = ""
    """A namespace whose chunks are used where the request's own has none. A gateway sets it, never a caller:
    it decides whose chunks are read."""
    chunk_tokens_multiple: int = 1
    """Chunks that are found by their texts end at a multiple of this many tokens. A gateway sets it."""
    discover: bool = False
    """Count the segments of the prompt outside its `spans`, save those that recur, and use saved ones. A
    gateway sets it from the namespace's rules: other users of a namespace can tell what was saved in it."""
    no_store: bool = False
    """Count and save nothing of this prompt. Stored chunks are used; if the request declares chunks, only
    those."""
    learn: bool = True
    """Whether the engine may measure a blend of this prompt. A gateway sets it from the namespace's rules."""
    trial: Trial | None = None
    """A configuration to blend with, whatever the report allows. Only the engine itself sets it."""
    version: int = PARAMS_VERSION
    """Version of this form."""

    def __post_init__(self) -> None:
        if self.version != PARAMS_VERSION:
            raise InvalidField("version", f"{self.version} is not {PARAMS_VERSION}, which this engine reads")
        check_namespace(self.namespace)
        if self.shared:
            check_namespace(self.shared)
        if self.chunk_tokens_multiple < 1:
            raise InvalidField("chunk_tokens_multiple", f"{self.chunk_tokens_multiple} must be at least 1")
        check_ttl(self.ttl_s)
        if self.op.prefills_chunk and (self.spans is None or len(self.spans) != 1):
            raise InvalidSpan("spans", f"op={self.op} needs exactly one span: the chunk to prefill")
        _ = self.options  # checks its fields

    @property
    def is_discovered(self) -> bool:
        """Whether segments of the prompt are found and saved."""
        return self.op is Op.BLEND and self.discover and not self.no_store and self.spans != ()

    @cached_property
    def options(self) -> BlendOptions:
        """What the request chooses about its blend."""
        return BlendOptions(**{name: getattr(self, name) for name in OPTION_NAMES})

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> KintsugiParams:
        """Parse the JSON form. Raises `InvalidField` and its subclasses."""
        try:
            return load(KintsugiParams, values)
        except InvalidField as error:
            raise error.within(PARAMS_KEY) from None

    def to_mapping(self) -> dict[str, Any]:
        """The JSON form, for a request's `kv_transfer_params`."""
        always = ("version", "op")
        wire = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name in always or getattr(self, one.name) != one.default
        }
        if self.spans is not None:
            wire["spans"] = [[s.start, s.end, *([s.key.hex] if s.key else [])] for s in self.spans]
        if self.context:
            wire["context"] = [[s.start, s.end] for s in self.context]
        if self.trial is not None:
            wire["trial"] = dataclasses.asdict(self.trial)
        return {PARAMS_KEY: {k: v.value if isinstance(v, StrEnum) else v for k, v in wire.items()}}


def trim_spans(spans: Sequence[Span], multiple: int) -> tuple[Span, ...]:
    """Shorten each span at its end to a multiple of ``multiple`` tokens; shorter spans are left out. Keys are
    dropped, because they belong to the whole spans."""
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


def check_foreign(params: KintsugiParams) -> None:
    """Raise `InvalidField` for an audit or a trial: only the engine itself requests them, by another path."""
    if params.op is Op.AUDIT:
        raise InvalidField("op", "audit is for the engine itself; use blend or off")
    if params.trial is not None:
        raise InvalidField("trial", "is for the engine itself; leave it out")


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
