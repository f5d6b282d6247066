"""Arguments and results of the SDK: plain values. Importing them needs neither torch nor the gRPC stubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.exchange import ErasedPlace as ErasedPlace
from kintsugi.core.exchange import Usage as Usage


@dataclass(frozen=True)
class Plain:
    """Prompt text that is not a chunk: instructions, a date, anything that no other prompt repeats."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A chunk as token ids."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Key:
    """A chunk that was put before, named by its key."""

    hex: str


@dataclass(frozen=True)
class DocumentChunk:
    """A chunk of a precomputed corpus."""

    corpus: str
    document_id: str
    index: int
    version: str | None = None
    """None means the current version."""


@dataclass(frozen=True)
class PutChunk:
    """The result of putting a chunk. Can be used as a segment of a prompt."""

    key: str
    """Hexadecimal."""
    num_tokens: int
    new: bool
    """Whether the store did not have it before."""
    state: str
    """`present`, `stored`, `accepted` or `failed`."""
    reason: str = ""
    """Why it failed; empty otherwise."""


Segment = str | Plain | Tokens | Key | DocumentChunk | PutChunk
"""A part of a prompt. A string is the text of a chunk; `Plain` marks text that is not one."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk that the store holds."""

    key: str
    num_tokens: int
    size_bytes: int
    codec: str
    model: str
    """Fingerprint, hexadecimal."""
    tier: str
    """Fastest tier that holds it; empty for chunks that were listed rather than looked up."""
    known: bool
    """Whether the gateway can build a prompt from the key alone."""


@dataclass(frozen=True)
class ErasureReceipt:
    """Where something erased was, and when it was gone there."""

    namespace: str
    deleted: bool
    """Whether it was there."""
    asked_at_s: float
    """Unix seconds."""
    gone_at_s: float
    """When the last place was gone."""
    places: tuple[ErasedPlace, ...]


@dataclass(frozen=True)
class Prefetched:
    """The result of a prefetch."""

    keys: tuple[str, ...]
    """One key per segment; empty for `Plain`."""
    accepted: int
    """Number of chunks that are in RAM or on their way there."""


@dataclass(frozen=True)
class TokenizedText:
    """The token ids of a text tokenised by itself, and the key of the chunk that these ids make."""

    token_ids: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class PlacedSegment:
    """Where a segment lies in the prompt."""

    start: int
    end: int
    key: str
    """Empty for `Plain`."""


@dataclass(frozen=True)
class Delta:
    """A piece of an answer."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """A complete answer, and what it cost."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    outcome: str
    """How the prompt was prefilled: `blended`, `prefix_hit`, `declined`, `failed`."""
    reason: str
    """Why it was declined or failed; empty otherwise."""
    usage: Usage
    ttft_ms: float
    """Time to first token, measured by the gateway."""
    request_id: str
    segments: tuple[PlacedSegment, ...]
    accounting: Mapping[str, Any] = field(default_factory=dict)
    """Everything that the engine counted, by the names of `kintsugi.core.accounting.Accounting`."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. None keeps vLLM's default."""

    max_tokens: int = 16
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's `SamplingParams`, by name."""
