"""Arguments and results of the SDK, as plain values. Importing them needs neither torch nor the gRPC
stubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.exchange import ErasedPlace as ErasedPlace
from kintsugi.core.exchange import Usage as Usage


@dataclass(frozen=True)
class Plain:
    """Prompt text that is not a chunk, such as instructions or a date."""

    text: str
    """The text."""


@dataclass(frozen=True)
class Tokens:
    """A chunk as token ids."""

    ids: Sequence[int]
    """Token ids of the model that is served."""


@dataclass(frozen=True)
class Key:
    """The key of a chunk that was put before."""

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
    """Index of the chunk in the document, from 0."""
    version: str | None = None
    """None means the current version."""


@dataclass(frozen=True)
class PutChunk:
    """The result of putting a chunk. It can be used as a segment of a prompt."""

    key: str
    """Hexadecimal."""
    num_tokens: int
    """Length of the chunk."""
    new: bool
    """Whether the chunk was not stored before."""
    state: str
    """`present`, `stored`, `accepted` or `failed`."""
    reason: str = ""
    """Why it failed; empty otherwise."""


Segment = str | Plain | Tokens | Key | DocumentChunk | PutChunk
"""A part of a prompt. A string is the text of a chunk."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk that the store holds."""

    key: str
    """The chunk's key, hexadecimal."""
    num_tokens: int
    """Length of the chunk."""
    size_bytes: int
    """Size in the store, in bytes."""
    codec: str
    """Codec of its KV."""
    model: str
    """Fingerprint of the model, hexadecimal."""
    tier: str
    """Fastest tier that holds the chunk; empty in the results of `list_chunks`."""
    known: bool
    """Whether the gateway can build a prompt from the key alone."""


@dataclass(frozen=True)
class ErasureReceipt:
    """The places of erased data, and the times of its erasure in Unix seconds."""

    namespace: str
    deleted: bool
    """Whether the data existed."""
    asked_at_s: float
    """Time of the request."""
    gone_at_s: float
    """Time at which the data was erased from the last place."""
    places: tuple[ErasedPlace, ...]


@dataclass(frozen=True)
class Prefetched:
    """The result of a prefetch."""

    keys: tuple[str, ...]
    """One key per segment; empty for `Plain`."""
    accepted: int
    """Number of chunks that are in RAM or being loaded."""


@dataclass(frozen=True)
class ServedModel:
    """A model that the gateway's engines serve."""

    id: str
    """The name that the operator chose."""
    aliases: tuple[str, ...]
    """Other names that requests may use: the folder, and the name on the hub."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""
    fingerprint: str
    """Fingerprint of the model, hexadecimal."""
    blending: str
    """`on`, or the reason why nothing is blended."""


@dataclass(frozen=True)
class TokenizedText:
    """The token ids of a text that is tokenised alone, and the key of their chunk."""

    token_ids: tuple[int, ...]
    """Token ids of the text."""
    key: str
    """Key of the chunk with these ids, hexadecimal."""


@dataclass(frozen=True)
class PlacedSegment:
    """The span of a segment in the prompt."""

    start: int
    """Position of the first token."""
    end: int
    """Position after the last token."""
    key: str
    """Empty for `Plain`."""


@dataclass(frozen=True)
class Delta:
    """A piece of an answer."""

    text: str
    """The new text."""
    token_ids: tuple[int, ...]
    """The new token ids."""


@dataclass(frozen=True)
class Answer:
    """A complete answer and its accounting."""

    text: str
    """The whole answer."""
    token_ids: tuple[int, ...]
    """Token ids of the answer."""
    finish_reason: str
    """vLLM's reason for the end of the answer: `stop` or `length`."""
    outcome: str
    """Outcome of the prefill: `blended`, `prefix_hit`, `declined`, `failed`."""
    reason: str
    """Reason why the blend was declined or failed; empty otherwise."""
    usage: Usage
    """Number of prompt, completion and cached tokens."""
    ttft_ms: float
    """Time to first token, measured by the gateway."""
    request_id: str
    """Id of the request in the logs of gateway and engine."""
    segments: tuple[PlacedSegment, ...]
    """Span of each segment in the prompt, in order."""
    accounting: Mapping[str, Any] = field(default_factory=dict)
    """The engine's accounting, by the names of `kintsugi.core.accounting.Accounting`."""


@dataclass(frozen=True)
class Sampling:
    """vLLM's sampling parameters. None keeps the service's default: the one of the model's
    `generation_config.json`, or vLLM's."""

    max_tokens: int = 16
    """Maximum length of the answer, in tokens, at least 1."""
    temperature: float | None = 0.0
    """Randomness. 0, the default, always chooses the most likely token, so that the same passages give the
    same answer; `top_p`, `top_k`, `min_p` and `seed` have an effect only above 0."""
    top_p: float | None = None
    """Choose among the most likely tokens that together have this probability."""
    top_k: int | None = None
    """Choose among this number of most likely tokens."""
    min_p: float | None = None
    """Minimum probability of a token, relative to the most likely one."""
    seed: int | None = None
    """Seed of the random choice."""
    stop: Sequence[str] = ()
    """Texts that end the answer."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer."""
    presence_penalty: float | None = None
    """Above 0, tokens that already occur in the answer become less likely."""
    frequency_penalty: float | None = None
    """Above 0, tokens become less likely with each occurrence in the answer."""
    repetition_penalty: float | None = None
    """Above 1, tokens of prompt and answer become less likely."""
    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's `SamplingParams`, by name."""
