"""An engine backend without a model, for tests and benchmarks: made-up tokens after stated delays.

Its model is called `stub`, and so is the reason in every accounting.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kintsugi.core.accounting import Accounting, Outcome
from kintsugi.core.errors import InvalidField, NotFound, Unavailable, UnknownField
from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    OpenAICall,
    OpenAIHead,
    PromptMatch,
    SaveOutcome,
    Usage,
)
from kintsugi.core.layout import ChunkManifest, Codec, KVLayout
from kintsugi.core.request import Op
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span, TokenIds, anchors_of
from kintsugi.store.protocol.interface import ChunkStore

_LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype="bfloat16")
"""The layout of stored chunks: two bytes of zeros per token for each of K and V."""
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "n"),
)
_WORDS = ("made", "up", "by", "a", "stub")


@dataclass(frozen=True)
class StubDelays:
    """In seconds."""

    first_token_s: float = 0.0
    token_s: float = 0.0
    save_s: float = 0.0
    """Per chunk."""


@dataclass
class StubSeen:
    """The requests that it received, for assertions."""

    requests: list[EngineRequest] = field(default_factory=list)
    saves: list[tuple[str, str, tuple[TokenIds, ...], int, float | None, float]] = field(default_factory=list)
    """Request id, namespace, chunks, priority, lifetime in seconds, Unix seconds when asked for."""
    running: int = 0
    """Answers in progress."""
    searched: list[OpenAICall] = field(default_factory=list)
    """Those of `find_chunks`."""
    ended_early: int = 0
    """Answers that were closed before their last token."""


LOGPROBS: Mapping[Op, float] = {Op.OFF: -0.1, Op.BLEND: -0.3}
"""Of every token that is scored."""
REMEMBERED_MAX = 10_000
"""Requests kept in `StubSeen`."""


class StubBackend(EngineBackend):
    """Answers `made up by a stub made up …`; stores chunks of zeros where it has a store."""

    def __init__(
        self,
        delays: StubDelays | None = None,
        *,
        store: ChunkStore | None = None,
        fingerprint: ModelFingerprint | None = None,
        prefix_token_ids: Sequence[int] = (1,),
        context_token_ids: Sequence[int] = (),
        plain_copies: bool = True,
        max_model_len: int = 8192,
        question_foot: str = "",
    ) -> None:
        self.delays = delays or StubDelays()
        self.seen = StubSeen()
        self.down = False
        """While true, every call is `Unavailable`."""
        self._store = store
        self._closed = False
        self._info = EngineInfo(
            model="stub",
            fingerprint=(fingerprint or ModelFingerprint.of({"weights": "stub"})).hex,
            prefix_token_ids=tuple(prefix_token_ids),
            portable=True,
            max_model_len=max_model_len,
            blending="stub",
            question_foot=question_foot,
            context_token_ids=tuple(context_token_ids),
            plain_copies=plain_copies,
            aliases=("org/stub",),
        )

    def come_up(self) -> None:
        """Answer again."""
        self.down = False

    def _check_up(self) -> None:
        if self.down or self._closed:
            raise Unavailable("the stub is down; send the request again")

    def space(self, namespace: str) -> ChunkSpace:
        info = self._info
        fingerprint = ModelFingerprint(bytes.fromhex(info.fingerprint))
        name_key = b"" if self._store is None else self._store.name_key(namespace)
        prefix, context = info.prefix_token_ids, info.context_token_ids
        return ChunkSpace(fingerprint, namespace, prefix, info.portable, context, name_key)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        self._check_up()
        if request.fingerprint not in ("", self._info.fingerprint):
            raise Unavailable("the stub serves another model than the prompt is for; ask again")
        max_tokens = self._check_request(request)
        if len(self.seen.requests) < REMEMBERED_MAX:
            self.seen.requests.append(request)
        accounting = await self._accounting(request)
        usage = Usage(len(request.prompt_token_ids), max_tokens, accounting.tokens_hit)
        self.seen.running += 1
        complete = False
        try:
            await asyncio.sleep(self.delays.first_token_s)
            for index in range(max_tokens):
                if index:
                    await asyncio.sleep(self.delays.token_s)
                last = index == max_tokens - 1
                complete = last
                scored = index == 0 and request.scored_token is not None
                yield EngineDelta(
                    (index,),
                    _WORDS[index % len(_WORDS)] + " ",
                    "length" if last else None,
                    accounting.to_mapping() if last else None,
                    usage if last else None,
                    LOGPROBS[request.params.op] if scored else None,
                )
        finally:
            self.seen.running -= 1
            self.seen.ended_early += not complete

    def _check_request(self, request: EngineRequest) -> int:
        """How many tokens to answer. Raises `InvalidField` and `UnknownField`."""
        for name in request.sampling:
            if name not in _SAMPLING:
                raise UnknownField(f"sampling.{name}", _SAMPLING)
        max_tokens = request.sampling.get("max_tokens", 16)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise InvalidField("sampling.max_tokens", f"{max_tokens!r} is not a number of tokens above 0")
        length, longest = len(request.prompt_token_ids), self._info.max_model_len
        if not 0 < length <= longest - max_tokens:
            raise InvalidField(
                "prompt", f"{length} tokens and {max_tokens} to answer; between 1 and {longest} in all fit"
            )
        return max_tokens

    async def _accounting(self, request: EngineRequest) -> Accounting:
        spans = [] if request.params.op is Op.OFF else list(request.params.spans or ())
        # Keys that a gateway found are believed: finding them again would count as the gateway's own cost.
        # With a context, the first chunk's is that of its plain copy.
        believed = not self._info.context_token_ids
        keys = [(span.key if believed else None) or self._key(request, span) for span in spans]
        held: Sequence[ChunkManifest | None] = [None] * len(keys)
        if self._store is not None:
            held = self._store.lookup(request.params.namespace, keys)
        hit = [span for span, manifest in zip(spans, held, strict=True) if manifest is not None]
        missed = [span for span, manifest in zip(spans, held, strict=True) if manifest is None]
        return Accounting(
            Outcome.BLENDED if hit else Outcome.DECLINED,
            reason="stub",
            chunks_hit=len(hit),
            chunks_missed=len(missed),
            tokens_hit=sum(span.num_tokens for span in hit),
            tokens_missed=sum(span.num_tokens for span in missed),
        )

    def _key(self, request: EngineRequest, span: Span) -> ChunkKey:
        prompt = request.prompt_token_ids
        space = self.space(request.params.namespace).space_at(span.start, prompt)
        return ChunkKey.of(space, prompt[span.start : span.end])

    async def save(
        self,
        request_id: str,
        namespace: str,
        chunks: Sequence[TokenIds],
        priority: int = 0,
        ttl_s: float | None = None,
        asked_at_s: float = 0.0,
    ) -> list[SaveOutcome]:
        self._check_up()
        if len(self.seen.saves) < REMEMBERED_MAX:
            self.seen.saves.append((request_id, namespace, tuple(chunks), priority, ttl_s, asked_at_s))
        outcomes = []
        for token_ids in chunks:
            await asyncio.sleep(self.delays.save_s)
            if not token_ids:
                outcomes.append(SaveOutcome(False, "the chunk has no tokens"))
                continue
            try:
                outcomes.append(await self._put(namespace, token_ids, ttl_s, asked_at_s))
            except (InvalidField, NotFound) as error:
                outcomes.append(SaveOutcome(False, str(error)))
        return outcomes

    async def _put(
        self,
        namespace: str,
        token_ids: Sequence[int],
        ttl_s: float | None,
        asked_at_s: float,
    ) -> SaveOutcome:
        """Raises `InvalidField` and `NotFound` for what the store refuses."""
        copies = self.space(namespace).copies(self._info.plain_copies) if self._store is not None else ()
        for copy in copies:
            assert self._store is not None
            manifest, frames = _zeros(copy, token_ids, asked_at_s)
            self._store.put(manifest, frames, ttl_s=ttl_s or 0.0)
        return SaveOutcome(is_saved=True)

    async def openai(self, call: OpenAICall) -> AsyncGenerator[OpenAIHead | bytes, None]:
        self._check_up()
        await asyncio.sleep(self.delays.first_token_s)
        yield OpenAIHead(200, "application/json")
        body: dict[str, Any] = {
            "id": call.request_id,
            "object": "chat.completion" if "chat" in call.path else "text_completion",
            "model": self._info.model,
            "choices": [{"index": 0, "text": "made up by a stub", "finish_reason": "length"}],
            "chunk_texts": list(call.chunk_texts),
        }
        yield json.dumps(body).encode()

    async def find_chunks(self, call: OpenAICall) -> PromptMatch:
        """Tokens are characters, and the template is none. Noted in `StubSeen.searched`."""
        from kintsugi.engine.scheduler.matching import match_prompts

        self._check_up()
        self.seen.searched.append(call)
        prompts = [TokenIds.of(ids) for ids in _prompts_of(call.body)]
        if self._store is None:
            return PromptMatch(sum(map(len, prompts)), ())
        return match_prompts(self._store, self.space, call.params, prompts)

    async def info(self, namespace: str = "") -> EngineInfo:
        self._check_up()
        return self._info

    async def close(self) -> None:
        self._closed = True


def _prompts_of(body: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of an OpenAI request's prompts."""
    if "messages" in body:
        return [[ord(one) for message in body["messages"] for one in message["content"]]]
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [[ord(one) for one in prompt]]
    return [prompt] if isinstance(prompt, list) else []


def _zeros(
    space: ChunkSpace, token_ids: Sequence[int], asked_at_s: float = 0.0
) -> tuple[ChunkManifest, list[bytes]]:
    frames: list[memoryview | bytes] = [bytes(_LAYOUT.frame_bytes(Codec.RAW, len(token_ids)))]
    manifest = ChunkManifest.of(
        space,
        ChunkKey.of(space, token_ids),
        anchors_of(token_ids, space.name_key),
        len(token_ids),
        _LAYOUT,
        Codec.RAW,
        frames,
        asked_at_s=asked_at_s,
    )
    return manifest, [bytes(frame) for frame in frames]
