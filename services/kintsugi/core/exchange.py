"""A gateway's interface to engines, and the values that gateways, engines and stores exchange.

The values are plain, so that they can pass through Ray, within one process or in a test. A gateway sends
constraints (`KintsugiParams`), never a plan, and tokens, never tensors. A store sends a `LayerFrame` for each
layer of each chunk, or a `ChunkLost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from kintsugi.core.errors import NotFound
from kintsugi.core.gate import GateProgress
from kintsugi.core.request import KintsugiParams
from kintsugi.core.spaces import ChunkKey, TokenIds


@dataclass(frozen=True)
class EngineRequest:
    """One prompt, tokenised by the sender."""

    request_id: str
    prompt_token_ids: TokenIds
    params: KintsugiParams
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's `SamplingParams` by name; the engine rejects unknown names with `InvalidField`."""
    priority: int = 0
    """vLLM's priority: lower runs first. A gateway decides who may use values below 0."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context headers (`traceparent`, `tracestate`)."""
    fingerprint: str = ""
    """Fingerprint in hexadecimal of the model that the tokens are for: during a model change, engines of both
    models answer. Empty for requests of the engine itself."""
    measurement: str = ""
    """If set, the request uses only prefix cache entries of requests with the same namespace and measurement,
    so that it takes as long as the first request with this prompt."""
    scored_token: int | None = None
    """Token whose logprob at the answer's first position is reported; the answer is sampled as usual."""


@dataclass(frozen=True)
class Usage:
    """Token counts, as OpenAI defines them."""

    prompt_tokens: int
    """Length of the prompt."""
    completion_tokens: int
    """Length of the answer."""
    cached_tokens: int
    """Prompt tokens that the engine did not compute itself: prefix cache and chunks."""


@dataclass(frozen=True)
class ErasedPlace:
    """A place from which data was erased."""

    place: str
    """Name of the place, such as `shard 6f1c…/ssd0`, `known texts`, `ledger` or `caches`."""
    items: int
    """Number of chunk copies erased; 0 also where they are not counted."""
    size_bytes: int
    """Bytes erased; 0 also where they are not counted."""
    gone_at_s: float
    """Unix seconds."""


@dataclass(frozen=True)
class EngineDelta:
    """A piece of an answer. The fields after `text` are set only in the last piece."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    accounting: Mapping[str, Any] | None = None
    """`core.accounting.Accounting.to_mapping`."""
    usage: Usage | None = None
    logprob: float | None = None
    """The logprob of `EngineRequest.scored_token`; None if none was requested."""


@dataclass(frozen=True)
class SaveOutcome:
    """The result of saving one chunk, and the reason of a failure."""

    is_saved: bool
    reason: str = ""


CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RESPONSES_PATH = "/v1/responses"


@dataclass(frozen=True)
class OpenAICall:
    """A request to an OpenAI endpoint, authenticated and checked by the gateway."""

    request_id: str
    path: str
    """`CHAT_PATH`, `COMPLETIONS_PATH` or `RESPONSES_PATH`."""
    body: Mapping[str, Any]
    """The request's JSON without Kintsugi's own fields (`kintsugi`, `documents` marked as chunks)."""
    params: KintsugiParams
    """They contain no spans: only the engine, which renders the template, knows the positions of chunks."""
    chunk_texts: tuple[str, ...] = ()
    """Texts that are tokenised separately wherever the rendered prompt contains them."""
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenAIHead:
    """First item of an answer to an `OpenAICall`; pieces of the body follow."""

    status: int
    content_type: str


@dataclass(frozen=True)
class MatchedChunk:
    """A stored chunk that a prompt contains."""

    namespace: str
    """The namespace that it is stored in: the request's own or its shared namespace."""
    key: ChunkKey
    """The key that it is stored under."""
    num_tokens: int
    """Its length."""


@dataclass(frozen=True)
class PromptMatch:
    """The stored chunks that an engine finds by content in the prompts of a request."""

    prompt_tokens: int
    """Number of tokens of all prompts together."""
    chunks: tuple[MatchedChunk, ...]
    """The chunks in the order of the prompts, without duplicates."""


@dataclass(frozen=True)
class EngineInfo:
    """The properties of engines that a gateway needs."""

    model: str
    """Name that clients use."""
    fingerprint: str
    """Hexadecimal."""
    prefix_token_ids: tuple[int, ...]
    portable: bool
    max_model_len: int
    blending: str
    """`on`, or the reason why nothing is blended."""
    progress: GateProgress = field(default_factory=lambda: GateProgress("off", ""))
    """The progress of the evidence that decides `blending`."""
    tokenizer: str = ""
    """Hexadecimal, `models.checkpoint.tokenizer_digest`; empty: not checked."""
    form: str = ""
    """Name of the form that prompts are written in (`core.plan.FormName`); empty: not known."""
    question_foot: str = ""
    """Text that the form writes after a text question."""
    context_token_ids: tuple[int, ...] = ()
    """The context between the prefix and each chunk while the chunk is prefilled."""
    plain_copies: bool = True
    """With a context: whether a plain copy of each chunk is also stored."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use for the model: its folder, and its name on the hub."""
    selector: str = ""
    """The selector of a request that names none; empty where the gate is closed."""
    learning: Mapping[str, Any] = field(default_factory=dict)
    """What the engine has measured since its start (`serving.learning.Learning.describe`); empty: nothing is
    measured."""
    ratio: float | None = None
    """The ratio of a request that names none; None where the gate is closed."""
    ratios_min: Mapping[str, float] | None = None
    """The lowest ratio that the gate allows, by selector; None: any selector with any ratio."""
    version: str = ""
    """Version of Kintsugi that the engine runs; empty: not known."""
    vllm: str = ""
    """Version of vLLM; empty: not known."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, `model` first."""
        return self.model, *self.aliases

    def check_name(self, name: str) -> None:
        """Raise `NotFound` if ``name`` is not a name of the model."""
        if name not in self.names:
            raise NotFound(f"model {name!r} is not served; request one of {', '.join(self.names)}")


class LossReason(StrEnum):
    """Why a process of the service ended unexpectedly."""

    KILLED = "killed"
    """By a signal, or by a crash of its own; Ray does not know which."""
    KERNEL_MEMORY = "kernel_memory"
    """By a signal or a crash, while the kernel of this machine ended processes for lack of memory."""
    RAY_MEMORY = "ray_memory"
    """By Ray's memory monitor."""
    NODE = "node"
    """Its node was lost."""


PARTS = ("Gateway", "Engine", "StoreShard", "Directory", "ServeController")
"""The processes of a service whose loss is reported."""
_LOSSES = {
    LossReason.KILLED: "was killed or crashed; its log in Ray's folder may say why",
    LossReason.KERNEL_MEMORY: "was ended by the kernel because memory ran out; stop other programs, or lower "
    "store.ram_gib or the engines' KV cache (kintsugi doctor shows what is needed)",
    LossReason.RAY_MEMORY: "was ended by Ray's memory monitor because other programs fill the memory; start "
    "Ray with RAY_memory_monitor_refresh_ms=0",
    LossReason.NODE: "was lost with its node",
}


@dataclass(frozen=True)
class LostPart:
    """A process of the service that ended unexpectedly. Ray starts another."""

    part: str
    """One of `PARTS`."""
    pid: int
    """0: unknown."""
    at_s: float
    """Unix time in seconds."""
    reason: LossReason

    def __str__(self) -> str:
        process = f" (process {self.pid})" if self.pid else ""
        at = datetime.fromtimestamp(self.at_s, UTC).isoformat(timespec="seconds")
        return f"{self.part}{process} {_LOSSES[self.reason]} (at {at}); Ray starts another"


class EngineBackend(ABC):
    """Answers prompts and stores chunks. For one event loop.

    Implementations: an engine in this process (`engine.asynchronous`), and the engines behind Ray Serve's
    handle (`serving.ray_backend`). Both, and the tests' stub, pass the same contract tests.

    Errors, raised by a call or by the first item of its answer: `InvalidField` for what a caller can correct,
    `Unavailable` if no engine answers (a request that has yielded nothing yet may be sent again),
    `ResourceExhausted` if queues are full.
    """

    @abstractmethod
    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Yield the answer in pieces. Closing the generator aborts the request in the engine. A request for
        another model raises `Unavailable` before anything is computed."""

    @abstractmethod
    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        """Prefill chunks in isolation and store them; returns once each is committed or has failed.

        With a context, a chunk counts as saved when all its copies are saved; a failure's reason is that of
        the first failed copy.

        ``ttl_s``: maximum time in seconds that the store keeps them; None: as the engine's store is
        configured. ``asked_at_s``: as in `ChunkManifest`.
        """

    @abstractmethod
    def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        """Answer an OpenAI request as vLLM does. Closing the generator aborts the request in the engine."""

    @abstractmethod
    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        """Return the stored chunks that `openai` would find by content in the call's prompts, however they
        were stored; computes nothing. Only for calls without chunk texts. Raises `NotFound` for another
        model's name."""

    @abstractmethod
    async def info(self, namespace: str = "") -> EngineInfo:
        """Describe one of the engines, which all have the same configuration. `blending`, `progress` and the
        fields derived from them are those of ``namespace``; empty: of the namespace with the most
        progress."""

    def lost_parts(self) -> Sequence[LostPart]:
        """Return the latest processes of the service that ended unexpectedly, oldest first; empty where
        nothing watches them."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Idempotent. A closed backend answers every call with `Unavailable`."""


@dataclass(frozen=True)
class LayerFrame:
    """The verified bytes of some heads of one layer of one chunk."""

    chunk: int
    """Index into the request's keys."""
    layer: int
    data: memoryview
    """The bytes of `ChunkManifest.head_range_bytes`, valid until the next frame is taken."""


@dataclass(frozen=True)
class ChunkLost:
    """Sent instead of a frame if a chunk can no longer be read. No more of its frames follow."""

    chunk: int
    layer: int
    reason: str
    is_unanswered: bool = False
    """Whether the chunk may still be stored in a shard that did not answer."""
