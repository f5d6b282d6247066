"""The engines as a gateway sees them, and the values that the two exchange.

Plain values, so that they pass through Ray, through one process, or through a test alike. A gateway sends
constraints (`KintsugiParams`), never a plan; tokens, never tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kintsugi.core.errors import NotFound
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey
from kintsugi.core.tokens import TokenIds


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, tokenised by whoever sends it."""

    request_id: str
    prompt_token_ids: TokenIds
    params: KintsugiParams
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's `SamplingParams` by name; the engine refuses what it does not know with `InvalidField`."""
    priority: int = 0
    """vLLM's: lower goes first. A gateway says who may ask for less than 0."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context headers (`traceparent`, `tracestate`)."""
    fingerprint: str = ""
    """Hexadecimal, of the model that the tokens are for: while one replaces another, engines of both answer.
    Empty where the engine asks itself."""
    measurement: str = ""
    """Not empty: the request finds nothing in the engine's prefix cache but what requests of the same
    namespace and measurement have left there, so that its time is that of a prompt that comes first."""
    scored_token: int | None = None
    """A token whose logprob as the answer's first token is reported; the answer is sampled as always."""


@dataclass(frozen=True)
class Usage:
    """Tokens, as OpenAI counts them."""

    prompt_tokens: int
    """Length of the prompt."""
    completion_tokens: int
    """Length of the answer."""
    cached_tokens: int
    """Prompt tokens that the engine did not compute itself: prefix cache and chunks."""


@dataclass(frozen=True)
class ErasedPlace:
    """A place where something erased was."""

    place: str
    """Such as `shard 6f1c…/ssd0`, `known texts`, `ledger`, `caches`."""
    items: int
    """Copies of chunks that were there; 0 where nothing was, or where nobody counts."""
    size_bytes: int
    """0 where nobody counts."""
    gone_at_s: float
    """Unix seconds."""


@dataclass(frozen=True)
class EngineDelta:
    """A piece of an answer. Only the last carries what follows `text`."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    accounting: Mapping[str, Any] | None = None
    """`core.accounting.Accounting.to_mapping`."""
    usage: Usage | None = None
    logprob: float | None = None
    """The logprob of `EngineRequest.scored_token`; None where none was asked for."""


class SaveState(StrEnum):
    """What became of a chunk that was to be stored."""

    SAVED = "saved"
    FAILED = "failed"


@dataclass(frozen=True)
class SaveOutcome:
    """What became of one chunk, and why."""

    state: SaveState
    reason: str = ""


CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"


@dataclass(frozen=True)
class OpenAICall:
    """A request to an OpenAI endpoint, authenticated and looked through by the gateway."""

    request_id: str
    path: str
    """`CHAT_PATH`, `COMPLETIONS_PATH` or `RESPONSES_PATH`."""
    body: Mapping[str, Any]
    """The request's JSON, with what is ours (`kintsugi`, `documents` marked as chunks) taken out."""
    params: KintsugiParams
    """Without spans: only the engine knows where chunks lie once the template has been rendered."""
    chunk_texts: tuple[str, ...] = ()
    """Texts that are tokenised alone wherever the rendered prompt holds them."""
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenAIHead:
    """First item of an answer to an `OpenAICall`; pieces of the body follow."""

    status: int
    content_type: str


@dataclass(frozen=True)
class MatchedChunk:
    """A stored chunk that a prompt holds."""

    namespace: str
    """The namespace that it is stored in: the request's, or the one that it shares."""
    key: ChunkKey
    """The key that it is stored under."""
    num_tokens: int
    """Its length."""


@dataclass(frozen=True)
class PromptMatch:
    """What an engine finds of the store in the prompts of a request, by their content."""

    prompt_tokens: int
    """All prompts together."""
    chunks: tuple[MatchedChunk, ...]
    """In the order of the prompts, each once."""


@dataclass(frozen=True)
class EngineInfo:
    """What a gateway has to know about the engines behind it."""

    model: str
    """Name that clients use."""
    fingerprint: str
    """Hexadecimal."""
    prefix_token_ids: tuple[int, ...]
    portable: bool
    max_model_len: int
    blending: str
    """`on`, or why not: the gate's reason."""
    tokenizer: str = ""
    """Hexadecimal, `models.checkpoint.tokenizer_digest`; empty: it does not matter."""
    form: str = ""
    """Name of the form that prompts are written in (`core.prompt.FormName`); empty: not known."""
    question_foot: str = ""
    """What the form writes behind a question of text."""
    context_token_ids: tuple[int, ...] = ()
    """The context between the prefix and each chunk while the chunk is prefilled."""
    plain_copies: bool = True
    """With a context: whether a plain copy of each chunk is stored, too."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for the model: its folder, and its name on the hub."""
    selector: str = ""
    """The selector of a request that names none; empty where the gate is closed."""
    ratio: float | None = None
    """The ratio of a request that names none; None where the gate is closed."""
    ratios_min: Mapping[str, float] | None = None
    """By selector, the least ratio that the gate allows; None: any selector with any ratio."""
    version: str = ""
    """Version of Kintsugi that the engine runs; empty: not known."""
    vllm: str = ""
    """Version of vLLM; empty: not known."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the model answers to, `model` first."""
        return self.model, *self.aliases

    def check_name(self, name: str) -> None:
        """Raises `NotFound` unless the model answers to ``name``."""
        if name not in self.names:
            raise NotFound(f"model {name!r} is not served here; ask for one of {', '.join(self.names)}")


class EngineBackend(ABC):
    """Answers prompts and stores chunks. For one event loop.

    Implementations: an engine in this process (`engine.asynchronous`), and the engines behind Ray Serve's
    handle (`serving.ray_backend`). Both, and the tests' stub, pass the same contract tests.

    Errors, raised by a call or by the first item of its answer: `InvalidField` for what a caller can mend,
    `Unavailable` where no engine answers (a request that has not yielded anything yet may be sent again),
    `ResourceExhausted` where queues are full.
    """

    @abstractmethod
    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """The answer, piece by piece. Closing the generator ends the work in the engine. A request for
        another model is `Unavailable` before anything is computed."""

    @abstractmethod
    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        tier: str = "auto",
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        """Prefill chunks in isolation and store them; returns once each is committed or has failed.

        With a context a chunk is saved once all its copies are, and the reason of a failure is the first
        copy's that failed.

        ``tier`` is where the store keeps them: `ram`, the name of one of its SSD tiers, or `auto`: as the
        engine's configuration of the store says. A tier that the store lacks fails the chunk. ``ttl_s``: how
        long the store keeps them at most, in seconds; None: as its configuration says. ``asked_at_s``: as in
        `ChunkManifest`.
        """

    @abstractmethod
    def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        """vLLM's own handling of an OpenAI request. Closing the generator ends the work in the engine."""

    @abstractmethod
    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        """The stored chunks that `openai` would find by their content in the call's prompts, however they got
        into the store; nothing is computed. For calls without chunk texts, which are found by those alone.
        Raises `NotFound` for another model's name."""

    @abstractmethod
    async def info(self) -> EngineInfo:
        """Describe any one engine: they are alike."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent. A closed backend answers every call with `Unavailable`."""
