"""The RPC `Generate`: a prompt made of segments, the request to an engine, and the events of the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kintsugi.core.accounting import count_cached
from kintsugi.core.errors import InvalidField, PermissionDenied, Unavailable
from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    EngineRequest,
    Usage,
)
from kintsugi.core.request import BlendOptions, KintsugiParams, Op, check_priority
from kintsugi.core.spaces import Span
from kintsugi.gateway.answers import Ask
from kintsugi.gateway.chunks import Spaces, ToSave
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.requests import choose_request_id
from kintsugi.gateway.texts.segments import ResolvedPrompt, Segment, SegmentResolver
from kintsugi.gateway.tracing import (
    Attribute,
    TraceSpan,
    describe_answer,
    describe_request,
    span,
)
from kintsugi.store.protocol.access import Caller, Verb

MAX_TOKENS_DEFAULT = 16
"""vLLM's default."""


@dataclass(frozen=True)
class GenerateCall:
    """A question over segments."""

    namespace: str
    segments: tuple[Segment, ...]
    question: Segment
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's `SamplingParams` by name."""
    options: BlendOptions = field(default_factory=BlendOptions)
    explain: bool = False
    no_blend: bool = False
    ttl_s: float | None = None
    """`KintsugiParams.ttl_s`."""
    measurement: str = ""
    """`EngineRequest.measurement`."""
    priority: int = 0
    model: str = ""
    """Name of the model that must answer; empty: any model."""
    request_id: str = field(default_factory=choose_request_id)
    """Id for logs; a caller may use the same id twice."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C headers of the request."""


@dataclass(frozen=True)
class Resolved:
    """First event of an answer: the spans of the segments in the prompt."""

    request_id: str
    segments: tuple[Span, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class Finished:
    """Last event of an answer."""

    finish_reason: str
    accounting: Mapping[str, Any]
    usage: Usage
    ttft_ms: float


class Prompts:
    """Builds prompts from segments."""

    def __init__(
        self,
        spaces: Spaces,
        resolver: SegmentResolver,
        metrics: GatewayMetrics,
        *,
        segments_max: int,
    ) -> None:
        """``segments_max``: maximum number of segments in one prompt."""
        self.metrics = metrics
        self.spaces = spaces
        self._resolver = resolver
        self._segments_max = segments_max

    async def resolve(self, call: GenerateCall) -> tuple[ResolvedPrompt, EngineRequest]:
        """Return the prompt, and the request for an engine, which `PromptAsk.send` completes.

        Raises `InvalidField` for a request that no engine would accept, `NotFound` and `Unavailable`.
        """
        if len(call.segments) > self._segments_max:
            raise InvalidField(
                "segments",
                f"{len(call.segments)} segments; a prompt has at most {self._segments_max}: join some",
            )
        info, space = await self.spaces.info(), await self.spaces.find(call.namespace)
        if call.model:
            info.check_name(call.model)
        prompt = await self._resolver.prompt(
            space, call.segments, call.question, info.max_model_len, info.question_foot
        )
        max_tokens = call.sampling.get("max_tokens", MAX_TOKENS_DEFAULT)
        if isinstance(max_tokens, int) and max_tokens >= info.max_model_len:
            raise InvalidField(
                "sampling.max_tokens",
                f"{max_tokens} is too many; the model reads {info.max_model_len} tokens, prompt and answer",
            )
        if isinstance(max_tokens, int) and max_tokens > info.max_model_len - len(prompt.token_ids):
            raise InvalidField(
                "segments",
                f"the prompt has {len(prompt.token_ids)} tokens and max_tokens is {max_tokens}; the model "
                f"reads {info.max_model_len} in all: send fewer segments, or reduce max_tokens",
            )
        privacy = self._resolver.privacy_of(call.namespace)
        params = KintsugiParams(
            namespace=call.namespace,
            op=Op.OFF if call.no_blend else Op.BLEND,
            spans=prompt.chunks,
            explain=call.explain,
            ttl_s=call.ttl_s,
            shared=privacy.shared,
            learn=privacy.expert.learn,
            **call.options.chosen,
        )
        return prompt, EngineRequest(
            call.request_id,
            prompt.token_ids,
            params,
            {"max_tokens": MAX_TOKENS_DEFAULT, **call.sampling},
            check_priority(call.priority),
            fingerprint=space.fingerprint.hex,
            measurement=call.measurement,
        )

    async def learn(self, call: GenerateCall, prompt: ResolvedPrompt) -> None:
        """Remember the chunks of a request that an engine has accepted."""
        await self._resolver.learn(prompt.space, call.segments, prompt.pieces)

    async def learn_texts(self, namespace: str, texts: Sequence[str]) -> list[ToSave]:
        """Remember texts as chunks, and return their keys and tokens. Raises `InvalidField` if a text is too
        long, and `Unavailable`."""
        segments = [Segment(text=text) for text in texts]
        space = await self.spaces.find(namespace)
        pieces = await self._resolver.pieces(space, segments)
        await self._resolver.learn(space, segments, pieces)
        return [(piece.key, piece.token_ids) for piece in pieces if piece.is_chunk]


def refuse_keys(namespace: str, segments: Sequence[Segment]) -> None:
    """Raise `PermissionDenied` for a segment that is named by its key: the answer would reveal whether the
    key is known."""
    if any(segment.key is not None for segment in segments):
        raise PermissionDenied(
            f"namespace {namespace!r} does not reveal which chunks are known, so segments cannot be "
            "named by key; send their texts or tokens"
        )


class PromptAsk(Ask[Resolved | EngineDelta | Finished]):
    """A request `Generate`: a prompt made of segments, answered with tokens and text."""

    span_name = "gateway.generate"

    def __init__(self, prompts: Prompts, caller: Caller, call: GenerateCall) -> None:
        super().__init__(prompts.metrics, "Generate", call.namespace, call.request_id, call.trace)
        self.ttl_s = call.ttl_s
        self._prompts = prompts
        self._caller = caller
        self._call = call
        self._prompt: ResolvedPrompt
        self._request: EngineRequest
        self._last: EngineDelta | None = None

    @property
    def prompt(self) -> ResolvedPrompt:
        """The prompt; set by `prepare`."""
        return self._prompt

    def authorize(self) -> None:
        self._caller.authorize(self.namespace, Verb.GENERATE)
        if self._call.explain:
            self._caller.require(Verb.LIST)
        if self.hides_chunks:
            refuse_keys(self.namespace, self._call.segments)

    def describe_request(self) -> Mapping[str, Attribute]:
        asked = {"max_tokens": MAX_TOKENS_DEFAULT, **self._call.sampling, "model": self._call.model}
        return describe_request(self.method, asked)

    def describe_answer(self) -> Mapping[str, Attribute]:
        last = self._last
        reasons = [] if last is None or last.finish_reason is None else [last.finish_reason]
        return describe_answer(self._usage(), self._prompts.spaces.known_info, self.request_id, reasons)

    def _usage(self) -> Usage:
        """Return the engine's usage; tokens that a blend computed are not cached tokens."""
        usage = (None if self._last is None else self._last.usage) or Usage(len(self._prompt.token_ids), 0, 0)
        return replace(usage, cached_tokens=count_cached(usage.cached_tokens, self.accounting or {}))

    async def prepare(self, trace: TraceSpan) -> Sequence[Resolved]:
        began_s = time.perf_counter()
        with span("gateway.resolve", trace.headers()):
            self._prompt, self._request = await self._prompts.resolve(self._call)
        prompt_tokens = self.tokens_asked = len(self._prompt.token_ids)
        max_tokens = self._request.sampling.get("max_tokens")
        self.tokens = prompt_tokens + (
            max(0, max_tokens) if isinstance(max_tokens, int) else MAX_TOKENS_DEFAULT
        )
        trace.set("kintsugi.prompt_tokens", prompt_tokens)
        self._prompts.metrics.resolve_s.observe(time.perf_counter() - began_s)
        return (Resolved(self.request_id, self._prompt.spans, prompt_tokens),)

    def send(self, backend: EngineBackend, trace: Mapping[str, str]) -> AsyncGenerator[EngineDelta, None]:
        # Engines need unique ids, but a client may reuse one, and an earlier attempt may not have ended.
        request_id = f"{self.request_id}-{uuid.uuid4().hex[:8]}"
        return backend.generate(replace(self._request, request_id=request_id, trace=trace))

    def read(self, item: EngineDelta) -> Sequence[EngineDelta]:
        self._last = item
        self.accounting = item.accounting
        return (item,) if item.token_ids or item.text else ()

    async def learn(self) -> None:
        await self._prompts.learn(self._call, self._prompt)

    def finish(self, first_s: float) -> Sequence[Finished]:
        last = self._last
        if last is None or last.finish_reason is None:
            raise Unavailable("the engine's answer is incomplete; send the request again")
        accounting = last.accounting or {}
        usage = self._usage()
        self.tokens_unused = self.tokens - usage.prompt_tokens - usage.completion_tokens
        if not self.shows_accounting:
            accounting, usage = {}, replace(usage, cached_tokens=0)
        return (Finished(last.finish_reason, accounting, usage, first_s * 1e3),)

    async def find_missed(self) -> Sequence[ToSave]:
        if not self._caller.may(Verb.PUT):
            return ()
        placed = zip(self._prompt.spans, self._prompt.pieces, strict=True)
        return [(piece.key, piece.token_ids) for span, piece in placed if span.key is not None]
