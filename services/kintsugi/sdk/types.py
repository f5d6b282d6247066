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
    """The text itself."""


@dataclass(frozen=True)
class Tokens:
    """A chunk as token ids."""

    ids: Sequence[int]
    """Token ids of the model that is served."""


@dataclass(frozen=True)
class Key:
    """A chunk that was put before, named by its key."""

    hex: str
    """The key, hexadecimal."""


@dataclass(frozen=True)
class DocumentChunk:
    """A chunk of a precomputed corpus."""

    corpus: str
    """Name of the corpus."""
    document_id: str
    """The document's id in the corpus."""
    index: int
    """Which of the document's chunks, from 0."""
    version: str | None = None
    """None means the current version."""


@dataclass(frozen=True)
class PutChunk:
    """The result of putting a chunk. Can be used as a segment of a prompt."""

    key: str
    """Hexadecimal."""
    num_tokens: int
    """Length of the chunk."""
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
    """The chunk's key, hexadecimal."""
    num_tokens: int
    """Length of the chunk."""
    size_bytes: int
    """Bytes that it takes in the store."""
    codec: str
    """How its KV is encoded."""
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
class ServedModel:
    """A model that the gateway's engines answer with."""

    id: str
    """The name that the operator gave it."""
    aliases: tuple[str, ...]
    """The other names that requests may use: its folder, and its name on the hub."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    fingerprint: str
    """Hexadecimal."""
    blending: str
    """`on`, or why nothing is blended."""


@dataclass(frozen=True)
class TokenizedText:
    """The token ids of a text tokenised by itself, and the key of the chunk that these ids make."""

    token_ids: tuple[int, ...]
    """Token ids of the text alone."""
    key: str
    """Key of the chunk that these ids make, hexadecimal."""


@dataclass(frozen=True)
class PlacedSegment:
    """Where a segment lies in the prompt."""

    start: int
    """Its first token's position in the prompt."""
    end: int
    """The position behind its last token."""
    key: str
    """Empty for `Plain`."""


@dataclass(frozen=True)
class Delta:
    """A piece of an answer."""

    text: str
    """The text that is new."""
    token_ids: tuple[int, ...]
    """Its token ids."""


@dataclass(frozen=True)
class Answer:
    """A complete answer, and what it cost."""

    text: str
    """The whole answer."""
    token_ids: tuple[int, ...]
    """Its token ids."""
    finish_reason: str
    """Why it ended, as vLLM says it: `stop` or `length`."""
    outcome: str
    """How the prompt was prefilled: `blended`, `prefix_hit`, `declined`, `failed`."""
    reason: str
    """Why it was declined or failed; empty otherwise."""
    usage: Usage
    """How many tokens were read, written and loaded."""
    ttft_ms: float
    """Time to first token, measured by the gateway."""
    request_id: str
    """The id under which gateway and engine log the request."""
    segments: tuple[PlacedSegment, ...]
    """Where each segment lies in the prompt, in order."""
    accounting: Mapping[str, Any] = field(default_factory=dict)
    """Everything that the engine counted, by the names of `kintsugi.core.accounting.Accounting`."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. None keeps vLLM's default."""

    max_tokens: int = 16
    """Longest answer, in tokens."""
    temperature: float | None = None
    """0 always takes the most likely token."""
    top_p: float | None = None
    """Choose among the most likely tokens that together have this probability."""
    top_k: int | None = None
    """Choose among so many of the most likely tokens."""
    min_p: float | None = None
    """Leave out tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Seed of the random choice."""
    stop: Sequence[str] = ()
    """Texts that end the answer."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer."""
    presence_penalty: float | None = None
    """Above 0: tokens that are in the answer already become less likely."""
    frequency_penalty: float | None = None
    """Above 0: tokens become less likely with each time they are in the answer."""
    repetition_penalty: float | None = None
    """Above 1: tokens of prompt and answer become less likely."""
    ignore_eos: bool | None = None
    """Go on behind the token that ends a text."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's `SamplingParams`, by name."""
