"""The gateway, whatever it is reached through: who may do what, prompts out of segments, chunks in and out.

It holds no KV and plans nothing: it resolves what a client names into token ids and spans, sends them to an
engine with the client's constraints, and hands the answer on. gRPC (`grpc_server`) and HTTP are thin shells
around one object.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kintsugi.core.backend import EngineBackend
from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.errors import InvalidField, NotFound, PermissionDenied, Unavailable
from kintsugi.core.exchange import EngineDelta, EngineInfo, EngineRequest, SaveOutcome, SaveState, TokenUsage
from kintsugi.core.layout import TOKENS_MAX, ChunkManifest
from kintsugi.core.request import BlendOptions, KintsugiParams, Op, check_priority
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span
from kintsugi.gateway.access import Access, Caller, OpenAccess, open_access
from kintsugi.gateway.fill import FillConfig, Filler, FillMode
from kintsugi.gateway.metrics import GatewayMetrics
from kintsugi.gateway.recent_info import RecentInfo
from kintsugi.gateway.saves import Saver
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.learning import Detokenize, Learner
from kintsugi.gateway.texts.segments import (
    ResolvedPrompt,
    ResolvedSegment,
    Segment,
    SegmentResolver,
    Tokenize,
)
from kintsugi.gateway.tracing import Timelines, TraceSpan, add_layers, describe, span, without_times
from kintsugi.models.checkpoint import tokenizer_digest
from kintsugi.precompute.documents import DocumentIndex
from kintsugi.store.client.registry import open_async_store
from kintsugi.store.protocol.interface import AsyncChunkStore

log = logging.getLogger(__name__)

INFO_TTL_S = 5.0
"""So long the engines' description is believed: a calibration that passes is seen soon after."""
RETRIES_MAX = 1
"""Of an answer that has not begun when its engine goes."""
RETRY_WAIT_S = 0.05
MAX_TOKENS_DEFAULT = 16
"""vLLM's."""
SPACES_MAX = 1024


@dataclass(frozen=True)
class GatewayLimits:
    """What one request, and all together, may take."""

    segments_max: int = 1024
    chunks_max: int = 1024
    """Of one put, prefetch or page."""
    texts_max: int = 1024
    """Of one call of tokenize."""
    message_bytes_max: int = 8 << 20
    """Of one request, as over HTTP: two million token ids."""
    messages_bytes_max: int = 256 << 20
    """Of all requests that are being answered; the next are refused."""
    concurrent_max: int = 512
    """Requests at a time; the next are refused."""


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
    priority: int = 0
    request_id: str = ""
    """The client's, for logs; empty: one is made up."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C headers that came with the request."""


@dataclass(frozen=True)
class Resolved:
    """First event of an answer: what the segments stand for."""

    request_id: str
    segments: tuple[Span, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class Finished:
    """Last event of an answer."""

    finish_reason: str
    accounting: Mapping[str, Any]
    usage: TokenUsage
    ttft_ms: float


class PutState(StrEnum):
    """What became of a chunk that was put."""

    PRESENT = "present"
    STORED = "stored"
    ACCEPTED = "accepted"
    FAILED = "failed"


@dataclass(frozen=True)
class Put:
    """One chunk of a put."""

    key: ChunkKey
    num_tokens: int
    state: PutState
    reason: str = ""

    @property
    def new(self) -> bool:
        return self.state in (PutState.STORED, PutState.ACCEPTED)


@dataclass(frozen=True)
class GatewayChunk:
    """What the store holds."""

    manifest: ChunkManifest
    tier: str
    """Empty where it was not asked for."""
    known: bool
    """Whether a prompt can be built from the key alone."""


class Gateway:
    """For one event loop. Every method takes the caller and raises what `core.errors` has."""

    def __init__(
        self,
        backend: EngineBackend,
        store: AsyncChunkStore,
        tokenize: Tokenize,
        *,
        known: KnownChunks | None = None,
        documents: DocumentIndex | None = None,
        detokenize: Detokenize | None = None,
        access: Access | None = None,
        limits: GatewayLimits | None = None,
        fill: FillConfig | None = None,
        read_only: bool = False,
        overtaking: bool = False,
        tokenizer: str = "",
        token_chars_max: int | None = None,
    ) -> None:
        """``tokenize``: a text's ids alone, without special tokens, of which the longest has
        ``token_chars_max`` characters. ``detokenize`` given, the texts of
        ``documents`` are found in messages. ``fill`` None: misses are not filled. ``overtaking``: requests
        may have a priority below 0. ``tokenizer``: the digest of what tokenises; empty: any engine's."""
        self.backend = backend
        self.store = store
        self.access = access or OpenAccess()
        self.limits = limits or GatewayLimits()
        self.read_only = read_only
        self.overtaking = overtaking
        self.known = KnownChunks() if known is None else known  # an empty one is false
        self.metrics = GatewayMetrics()
        self._tokenize = tokenize
        self._documents = documents
        self._resolver = SegmentResolver(tokenize, self.known, documents, token_chars_max)
        self._saver = Saver(backend)
        self._timelines = Timelines()
        self._active = 0
        self.recent_info = RecentInfo(lambda: self.backend.info())
        self._tokenizer = tokenizer
        self._own_info: EngineInfo | None = None
        """Of an engine with our tokenizer."""
        self._info: EngineInfo | None = None
        """What `_spaces` are of."""
        self._spaces: dict[str, ChunkSpace] = {}
        self._learner: Learner | None = None
        if documents is not None and detokenize is not None:
            self._learner = Learner(documents, self.known, tokenize, detokenize, self.info)
            self._learner.start()
        self._filler: Filler | None = None
        if fill is not None and not read_only:
            self._filler = Filler(store, self._saver, lambda: not self._active, fill, self.metrics.filled)
            self._filler.start()
            queue = self._filler.queue
            self.metrics.watch(
                "fill_queue_chunks", "Missed chunks that wait to be filled", lambda: len(queue)
            )
        self.metrics.active.set_function(lambda: self._active)
        self.metrics.watch("known_chunks", "Chunks whose tokens are known", lambda: len(self.known))

    @staticmethod
    async def open(
        spec: GatewaySpec,
        backend: EngineBackend,
        store_url: str,
        model_folder: str | Path,
        *,
        limits: GatewayLimits | None = None,
    ) -> Gateway:
        """As `spec` says, with the tokenizer in `model_folder`. On the running event loop.

        Does not ask the backend anything: engines may still be starting. Raises `InvalidField`, `NotFound`,
        `Corrupted` and `Unavailable`.
        """
        from kintsugi.precompute.chunking import Chunker  # the splitter is of the extra `chunking`

        try:
            mode = FillMode(spec.fill_on_miss)
        except ValueError:
            raise InvalidField(
                "gateway.fill_on_miss", f"{spec.fill_on_miss!r} is not one of {', '.join(FillMode)}"
            ) from None
        documents: DocumentIndex | None = None
        if spec.ledger:
            from kintsugi.precompute.ledger import Ledger  # its readers are of the extra `precompute`

            documents = Ledger(Path(spec.ledger))
        chunker = Chunker.of_model(model_folder)
        folder = Path(spec.data_dir) / "known_chunks" if spec.data_dir else None
        return Gateway(
            backend,
            open_async_store(store_url),
            chunker.token_ids,
            known=KnownChunks(folder),
            documents=documents,
            detokenize=chunker.text_of,
            access=open_access(spec.tokens_file),
            limits=limits,
            fill=FillConfig() if mode is FillMode.BACKGROUND else None,
            read_only=spec.read_only,
            overtaking=spec.overtaking,
            tokenizer=tokenizer_digest(model_folder),
            token_chars_max=chunker.token_chars_max,
        )

    async def info(self) -> EngineInfo:
        """Of the engines, the newest that one with our tokenizer said: while one model replaces another,
        engines of both answer. Raises `Unavailable` where none has ever answered."""
        info = await self.recent_info.known(INFO_TTL_S)
        if not self._tokenizer or info.tokenizer in ("", self._tokenizer):
            self._own_info = info
        if self._own_info is None:
            raise Unavailable("only engines of another model answer yet; try again later")
        return self._own_info

    async def space(self, namespace: str) -> ChunkSpace:
        """What chunks of a namespace are found by."""
        info = await self.info()
        if info is not self._info:
            if self._info is None or _identity(info) != _identity(self._info):
                self._spaces.clear()
            self._info = info
        space = self._spaces.get(namespace)
        if space is None:
            fingerprint = ModelFingerprint(bytes.fromhex(info.fingerprint))
            space = ChunkSpace(fingerprint, namespace, tuple(info.prefix_token_ids), info.portable)
            if len(self._spaces) >= SPACES_MAX:
                self._spaces.clear()
            self._spaces[namespace] = space
        return space

    async def generate(
        self, caller: Caller, call: GenerateCall
    ) -> AsyncGenerator[Resolved | EngineDelta | Finished, None]:
        """The answer as it comes; closing the generator ends the work in the engine."""
        began_s = time.perf_counter()
        request_id = call.request_id or uuid.uuid4().hex
        with span("gateway.generate", call.trace) as trace:
            trace.set("kintsugi.namespace", call.namespace)
            trace.set("kintsugi.request_id", request_id)
            caller.checked(call.namespace)
            with span("gateway.resolve", trace.headers()):
                prompt = await self._prompt(call)
            trace.set("kintsugi.prompt_tokens", len(prompt.token_ids))
            with self.answering(), span("gateway.engine", trace.headers()) as engine:
                request = self._request(call, prompt, request_id, engine)
                self.metrics.resolve_s.observe(time.perf_counter() - began_s)
                yield Resolved(request_id, prompt.spans, len(prompt.token_ids))
                async with aclosing(self._answer(call, request, prompt, began_s)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            describe(trace, event.accounting)
                            trace.set("kintsugi.ttft_ms", round(event.ttft_ms, 3))
                            add_layers(engine, event.accounting)
                            if request.params.timeline and not call.explain:
                                told = without_times(event.accounting)
                                event = dataclasses.replace(event, accounting=told)
                        yield event

    @contextmanager
    def answering(self) -> Iterator[None]:
        """An answer is under way: what is filled in the background waits for its end."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if self._filler is not None and not self._active:
                self._filler.wake()

    async def suspect_texts(self, namespace: str, texts: Sequence[str]) -> None:
        """Have looked up chunks that an answer may have had to compute. Their texts are known from now on.

        Raises `InvalidField` for a chunk that is too long, and `Unavailable`.
        """
        if self._filler is not None:
            segments = [Segment(text=text) for text in texts]
            space = await self.space(namespace)
            pieces = await self._resolver.pieces(space, segments)
            self._resolver.learn(space, segments, pieces)
            self._filler.suspect(namespace, [(piece.key, piece.token_ids) for piece in pieces])

    async def _prompt(self, call: GenerateCall) -> ResolvedPrompt:
        """Raises `InvalidField` and `NotFound`."""
        if len(call.segments) > self.limits.segments_max:
            raise InvalidField(
                "segments",
                f"{len(call.segments)} segments; at most {self.limits.segments_max} make a prompt: join some",
            )
        space = await self.space(call.namespace)
        assert self._info is not None
        return await self._resolver.prompt(space, call.segments, call.question, self._info.max_model_len)

    def _request(
        self, call: GenerateCall, prompt: ResolvedPrompt, request_id: str, trace: TraceSpan
    ) -> EngineRequest:
        """Raises `InvalidField` for what no engine would take."""
        assert self._info is not None
        asked = call.sampling.get("max_tokens", MAX_TOKENS_DEFAULT)
        room = self._info.max_model_len - len(prompt.token_ids)
        if isinstance(asked, int) and asked > room:
            raise InvalidField(
                "segments",
                f"the prompt has {len(prompt.token_ids)} tokens and max_tokens is {asked}; the model reads "
                f"{self._info.max_model_len} in all: send fewer segments, or ask for a shorter answer",
            )
        params = KintsugiParams(
            namespace=call.namespace,
            op=Op.OFF if call.no_blend else Op.BLEND,
            spans=prompt.chunks,
            explain=call.explain,
            timeline=self._timelines.wanted(trace),
            **call.options.chosen,
        )
        return EngineRequest(
            # The client may send one id twice; in an engine they must differ.
            f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt.token_ids,
            params,
            {"max_tokens": MAX_TOKENS_DEFAULT, **call.sampling},
            check_priority(call.priority, self.overtaking),
            trace.headers(),
            prompt.space.fingerprint.hex,
        )

    async def _answer(
        self, call: GenerateCall, request: EngineRequest, prompt: ResolvedPrompt, began_s: float
    ) -> AsyncGenerator[EngineDelta | Finished, None]:
        ttft_s, last = 0.0, None
        async with aclosing(self._deltas(request)) as deltas:
            async for delta in deltas:
                if last is None:
                    ttft_s = time.perf_counter() - began_s
                    self.metrics.ttft_s.observe(ttft_s)
                    self._resolver.learn(prompt.space, call.segments, prompt.pieces)
                last = delta
                if delta.token_ids or delta.text:
                    yield delta
        if last is None or last.finish_reason is None:
            raise Unavailable("the engine ended the answer before it was complete; send the request again")
        self.metrics.accounted(last.accounting)
        self._suspect(call.namespace, prompt, last.accounting)
        usage = last.usage or TokenUsage(len(prompt.token_ids), 0)
        yield Finished(last.finish_reason, last.accounting or {}, usage, ttft_s * 1e3)

    async def _deltas(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """From another engine where the first goes before it has said anything."""
        for attempt in range(RETRIES_MAX + 1):
            begun = False
            try:
                async with aclosing(self.backend.generate(request)) as deltas:
                    async for delta in deltas:
                        begun = True
                        yield delta
                return
            except Unavailable as error:
                if begun or attempt == RETRIES_MAX:
                    raise
                log.info("request %s is sent again: %s", request.request_id, error)
            request = dataclasses.replace(request, request_id=f"{request.request_id}-again")
            await asyncio.sleep(RETRY_WAIT_S)

    def _suspect(self, namespace: str, prompt: ResolvedPrompt, accounting: Mapping[str, Any] | None) -> None:
        """Have looked up what a request may have missed."""
        values = accounting or {}
        missed = values.get("chunks_missed", 0) or values.get("outcome") in ("declined", "failed")
        if self._filler is None or not missed:
            return
        placed = zip(prompt.spans, prompt.pieces, strict=True)
        chunks = [(piece.key, piece.token_ids) for span, piece in placed if span.key is not None]
        self._filler.suspect(namespace, chunks)

    async def put_chunks(
        self,
        caller: Caller,
        namespace: str,
        chunks: Sequence[Segment],
        *,
        tier: str = "auto",
        wait: bool = True,
    ) -> list[Put]:
        """Have chunks computed that the store lacks; with `wait`, until they are committed."""
        caller.checked(namespace)
        self._check_writable("chunks cannot be put")
        self._check_count("chunks", len(chunks), self.limits.chunks_max)
        info = await self.info()
        space = await self.space(namespace)
        pieces = await self._resolver.pieces(space, chunks, "chunks")
        room = min(info.max_model_len - len(info.prefix_token_ids) - 1, TOKENS_MAX)
        for index, piece in enumerate(pieces):
            if piece.num_tokens > room:
                raise InvalidField(
                    f"chunks[{index}]", f"has {piece.num_tokens} tokens; this model takes {room}: cut it"
                )
        tiers = await self.store.tiers(namespace, [piece.key for piece in pieces])
        missing = [(p.key, p.token_ids) for p, held in zip(pieces, tiers, strict=True) if held is None]
        futures = self._saver.submit(namespace, missing, tier=tier or "auto")
        self._resolver.learn(space, chunks, pieces)
        states: dict[ChunkKey, tuple[PutState, str]] = {}
        for (key, _), future in zip(missing, futures, strict=True):
            outcome = await asyncio.shield(future) if wait else None
            states[key] = _put_state(outcome)
        return [
            Put(piece.key, piece.num_tokens, *states.get(piece.key, (PutState.PRESENT, "")))
            for piece in pieces
        ]

    def _check_writable(self, what: str) -> None:
        if self.read_only:
            raise PermissionDenied(f"{what}: this gateway is read-only; start it without --read-only")

    @staticmethod
    def _check_count(name: str, count: int, count_max: int) -> None:
        if not 0 < count <= count_max:
            raise InvalidField(name, f"{count} of them; send between 1 and {count_max}")

    async def get_chunk(self, caller: Caller, namespace: str, key: ChunkKey) -> GatewayChunk:
        """Raises `NotFound`."""
        caller.checked(namespace)
        (tier,) = await self.store.tiers(namespace, [key])
        (manifest,) = await self.store.lookup(namespace, [key])
        if tier is None or manifest is None:
            raise NotFound(f"chunk {key} is not in namespace {namespace!r}; put it")
        return GatewayChunk(manifest, tier, self.known.knows(namespace, key))

    async def delete_chunk(self, caller: Caller, namespace: str, key: ChunkKey) -> bool:
        """Whether it was there. What is known of it is forgotten, too. Raises `Unavailable` where a shard
        that may hold it does not answer."""
        caller.checked(namespace)
        self._check_writable("chunks cannot be deleted")
        try:
            return await self.store.delete(namespace, [key]) > 0
        finally:  # also where a shard still holds it: it is not to be found or filled meanwhile
            self.known.forget(namespace, [key])
            if self._filler is not None:
                self._filler.forget(namespace, [key])

    async def list_chunks(
        self, caller: Caller, namespace: str, limit: int = 100, after: ChunkKey | None = None
    ) -> list[GatewayChunk]:
        """In key order. Raises `Unavailable` where a shard does not answer."""
        caller.checked(namespace)
        self._check_count("page_size", limit, self.limits.chunks_max)
        manifests = await self.store.list(namespace, limit, after)
        return [GatewayChunk(m, "", self.known.knows(namespace, m.key)) for m in manifests]

    async def prefetch(
        self, caller: Caller, namespace: str, segments: Sequence[Segment]
    ) -> tuple[list[ChunkKey | None], int]:
        """Keys of the segments, None for plain ones, and how many are in RAM or on their way."""
        caller.checked(namespace)
        self._check_count("segments", len(segments), self.limits.segments_max)
        space = await self.space(namespace)
        pieces = await self._resolver.pieces(space, segments)
        keys = [None if s.plain else piece.key for s, piece in zip(segments, pieces, strict=True)]
        wanted = list(dict.fromkeys(key for key in keys if key is not None))
        accepted = await self.store.prefetch(namespace, wanted)
        self._resolver.learn(space, segments, pieces)
        return keys, accepted

    async def tokenize(self, caller: Caller, namespace: str, texts: Sequence[str]) -> list[ResolvedSegment]:
        """Each text alone."""
        caller.checked(namespace)
        self._check_count("texts", len(texts), self.limits.texts_max)
        plain = [Segment(text=text, plain=True) for text in texts]
        return await self._resolver.pieces(await self.space(namespace), plain, "texts")

    async def close(self) -> None:
        """Idempotent. The backend is its owner's to close."""
        await self.recent_info.close()
        if self._learner is not None:
            await self._learner.close()
        if self._filler is not None:
            await self._filler.close()
        await self._saver.close()
        await self.store.close()
        await asyncio.to_thread(self.known.close)
        if self._documents is not None:
            self._documents.close()


def _identity(info: EngineInfo) -> EngineInfo:
    """What chunk spaces depend on: a calibration that passes changes none."""
    return dataclasses.replace(info, blending="")


def _put_state(outcome: SaveOutcome | None) -> tuple[PutState, str]:
    if outcome is None:
        return PutState.ACCEPTED, ""
    return (PutState.STORED if outcome.state is SaveState.SAVED else PutState.FAILED), outcome.reason
