"""The gateway's operations, which both front ends offer.

A gateway holds no KV and makes no blend decisions. `generate` and the chunk operations resolve segments into
token ids and spans and pass them to an engine or the store; `answers` is the only way to an engine's answer.
The front ends `fronts.grpc_server` and `fronts.http` translate requests into these calls, and results into
messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from kintsugi.core.deploy import GatewaySpec
from kintsugi.core.errors import InvalidField, NotFound, PermissionDenied, ResourceExhausted
from kintsugi.core.exchange import (
    EngineBackend,
    EngineDelta,
    LostPart,
    OpenAICall,
    SaveOutcome,
)
from kintsugi.core.layout import TOKENS_MAX, ChunkManifest
from kintsugi.core.namespaces import NO_RULES, NamespacePrivacy, NamespaceRules
from kintsugi.core.request import check_ttl
from kintsugi.core.spaces import ChunkKey
from kintsugi.gateway.answers import AnswerPipeline, Ask, Event, padding_s
from kintsugi.gateway.chunks import Copies, Recent, Saver, Spaces
from kintsugi.gateway.erasing import Eraser, Receipt
from kintsugi.gateway.fill import FillConfig, Filler
from kintsugi.gateway.metrics import GatewayMetrics, ShareMetrics
from kintsugi.gateway.prompts import Finished, GenerateCall, PromptAsk, Prompts, Resolved, refuse_keys
from kintsugi.gateway.residency import ChunkResidence, Residency
from kintsugi.gateway.shares import FairShares
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.known_texts import disjoint
from kintsugi.gateway.texts.learning import Detokenize, Learner
from kintsugi.gateway.texts.segments import ResolvedSegment, Segment, SegmentResolver, Tokenize
from kintsugi.gateway.threaded_store import ThreadedStore
from kintsugi.models.checkpoint import tokenizer_digest
from kintsugi.precompute.documents import DocumentIndex
from kintsugi.store.client.registry import open_store
from kintsugi.store.protocol.access import Access, Caller, Verb, open_access
from kintsugi.store.protocol.audit import AuditLog, open_audit
from kintsugi.store.protocol.interface import ChunkStore

log = logging.getLogger(__name__)

LOSS_S = 120.0
"""Age up to which a lost process explains why another does not answer."""


@dataclass(frozen=True)
class GatewayLimits:
    """Limits of one gateway, applied to gRPC and HTTP separately."""

    segments_max: int = 1024
    chunks_max: int = 1024
    """Maximum number of chunks in one put, prefetch or page."""
    texts_max: int = 1024
    """Maximum number of texts in one call of tokenize."""
    message_bytes_max: int = 8 << 20
    """Maximum size of a request: two million token ids, or a million tokens as text. JSON needs about ten
    times its size while it is parsed."""
    messages_bytes_max: int = 256 << 20
    """Maximum size of all requests that are being received or answered; further ones are refused."""
    concurrent_max: int = 512
    """Maximum number of concurrent gRPC requests of authenticated callers; further ones are refused."""
    watches_max: int = 128
    """Maximum number of concurrent health checks, health watches and reflection streams of authenticated
    callers."""
    http_concurrent_max: int = 1024
    """Maximum number of concurrent HTTP requests of authenticated callers; further ones are refused."""


class PutState(StrEnum):
    """The result for one chunk of a put."""

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
    """A chunk that the store holds."""

    manifest: ChunkManifest
    tier: str
    """Empty if the tier was not looked up."""
    known: bool
    """Whether prompts can name the chunk by its key alone."""


class Gateway:
    """The operations of one gateway. They take the caller and raise errors of `core.errors`. For one event
    loop."""

    def __init__(
        self,
        backend: EngineBackend,
        store: ChunkStore,
        tokenize: Tokenize,
        *,
        known: KnownChunks | None = None,
        documents: DocumentIndex | None = None,
        detokenize: Detokenize | None = None,
        access: Access | None = None,
        audit: AuditLog | None = None,
        limits: GatewayLimits | None = None,
        fill: FillConfig | None = None,
        tokenizer: str = "",
        token_chars_max: int | None = None,
        rules: NamespaceRules | None = None,
        engine_places: int | None = None,
    ) -> None:
        """``tokenize`` returns a text's ids without special tokens; the longest token has ``token_chars_max``
        characters. With ``detokenize``, the texts of ``documents`` are found in messages. ``fill`` None:
        misses are not filled.
        ``tokenizer``: digest of the tokenizer; empty: any engine is accepted. ``audit`` is closed with the
        gateway; None: nothing is audited. ``rules``: the service's rules; rules in the tokens file take
        precedence. ``engine_places``: maximum number of concurrent requests to engines; None: no limit."""
        self.backend = backend
        self._store = ThreadedStore(store)
        self.access = access or Access()
        self.audit = audit
        self.limits = limits or GatewayLimits()
        self._rules = NO_RULES if rules is None else rules
        self._read_rules = NO_RULES
        self._effective_rules = self._rules
        self.shares = FairShares(self.rules, engine_places)
        self.known = KnownChunks() if known is None else known  # an empty `KnownChunks` is falsy
        self.metrics = GatewayMetrics()
        self.metrics.registry.register(ShareMetrics(self.shares, self.known))
        self.recent_info = Recent(lambda: self.backend.info(), "no engine answered", self._explain_silence)
        self.recent_stats = Recent(
            lambda: self._store.run(lambda store: store.stats()),
            "the store did not answer",
            self._explain_silence,
        )
        self.spaces = Spaces(self.recent_info, tokenizer, store.name_key)
        self._documents = documents
        self.detokenize = detokenize
        """Returns the text of token ids; None if the tokenizer is unknown."""
        self._resolver = SegmentResolver(
            tokenize, self.known, documents, token_chars_max, self._privacy_of, store.name_key
        )
        self.prompts = Prompts(
            self.spaces,
            self._resolver,
            self.metrics,
            segments_max=self.limits.segments_max,
        )
        self._saver = Saver(backend, shares=self.shares)
        self._copies = Copies(self.spaces, self._store, self._shared_with)
        self._learner: Learner | None = None
        if documents is not None and detokenize is not None:
            self._learner = Learner(documents, self.known, tokenize, detokenize, self.spaces.info)
            self._learner.start()
        self._filler = None if fill is None else self._start_filler(fill)
        self._residency = Residency(self.spaces, self._resolver, self._store, self._shared_with)
        self._eraser = Eraser(
            self._store,
            self._copies,
            self.known,
            self._resolver,
            self._saver,
            filler=self._filler,
            documents=documents,
            learner=self._learner,
        )
        self.answers = AnswerPipeline(backend, self._filler, self.shares)
        self._add_gauges()

    def _add_gauges(self) -> None:
        add = self.metrics.add_gauge
        add(
            "audit_lines_lost",
            "Lines of the audit log that could not be written",
            lambda: 0 if self.audit is None else self.audit.lines_lost,
        )
        add("active_requests", "Answers in progress", lambda: self.answers.under_way)
        add("known_chunks", "Chunks whose tokens are known", lambda: len(self.known))

    def report_loss(self, lost: LostPart) -> None:
        """Log and count a process of the service that ended unexpectedly."""
        log.error("%s", lost)
        self.metrics.count_loss(lost)

    def _explain_silence(self) -> str:
        """Return `; ` and the last process that was lost in the last `LOSS_S`; empty without one."""
        lost = self.backend.lost_parts()
        return f"; {lost[-1]}" if lost and time.time() - lost[-1].at_s < LOSS_S else ""

    def _start_filler(self, config: FillConfig) -> Filler:
        filler = Filler(
            self._copies, self._saver, lambda: not self.answers.under_way, config, self.metrics.count_fill
        )
        filler.start()
        self.metrics.add_gauge(
            "fill_queue_chunks", "Missed chunks awaiting a fill", lambda: self.fill_queue_chunks
        )
        return filler

    @property
    def fill_queue_chunks(self) -> int:
        """Number of missed chunks that wait for a fill."""
        return 0 if self._filler is None else len(self._filler.queue)

    @staticmethod
    async def open(
        spec: GatewaySpec,
        backend: EngineBackend,
        store_url: str,
        model_folder: str | Path,
        rules: NamespaceRules | None = None,
    ) -> Gateway:
        """Open a gateway as ``spec`` configures it, with the tokenizer in ``model_folder``.

        Does not call the backend, because engines may still be starting. Raises `InvalidField`, `NotFound`,
        `Corrupted` and `Unavailable`.
        """
        from kintsugi.precompute.chunking import Chunker  # needs the extra `chunking`

        documents: DocumentIndex | None = None
        if spec.expert.ledger:
            from kintsugi.precompute.ledger import Ledger  # needs the extra `precompute`

            documents = Ledger(Path(spec.expert.ledger))
        chunker = Chunker.of_model(model_folder)
        folder = Path(spec.expert.data_dir) / "known_chunks" if spec.expert.data_dir else None
        gateway = Gateway(
            backend,
            open_store(store_url),
            chunker.token_ids,
            known=KnownChunks(folder),
            documents=documents,
            detokenize=chunker.text_of,
            access=open_access(spec.tokens_file),
            audit=open_audit(spec.expert.audit_dir, "gateway"),
            fill=FillConfig() if spec.expert.fill_on_miss else None,
            tokenizer=tokenizer_digest(model_folder),
            token_chars_max=chunker.token_chars_max,
            rules=rules,
            engine_places=spec.expert.engine_places,
        )
        gateway.follow_erasures()
        return gateway

    def follow_erasures(self) -> None:
        """Start to follow the store's erasures, and forget the chunks that other gateways erase."""
        self._eraser.start()

    def rules(self) -> NamespaceRules:
        """Return the service's rules for namespaces, overridden by the rules in the tokens file."""
        read = self.access.rules()
        if read is not self._read_rules:
            self._read_rules, self._effective_rules = read, self._rules.overridden_by(read)
        return self._effective_rules

    def _privacy_of(self, namespace: str) -> NamespacePrivacy:
        return self.rules().privacy_of(namespace)

    def _shared_with(self, namespace: str) -> str:
        return self._privacy_of(namespace).shared

    def find_known_texts(self, namespace: str, text: str) -> list[tuple[int, int]]:
        """Find the texts of chunks that a namespace may use inside ``text``. Return `[start, end)` in
        characters, disjoint and in order. Thread-safe."""
        found = self.known.find(namespace, text)
        shared = self._privacy_of(namespace).shared
        return disjoint([*found, *self.known.find(shared, text)]) if shared else found

    def set_rules(self, rules: NamespaceRules) -> None:
        """Replace the rules of the service."""
        self._rules, self._read_rules, self._effective_rules = rules, NO_RULES, rules

    def generate(
        self, caller: Caller, call: GenerateCall
    ) -> AsyncGenerator[Resolved | EngineDelta | Finished, None]:
        """Stream the answer. Closing the generator ends the work in the engine."""
        return self.answer(caller, PromptAsk(self.prompts, caller, call))

    def answer(self, caller: Caller, ask: Ask[Event]) -> AsyncGenerator[Event, None]:
        """Stream the answer to a request, restricted to what its namespace's privacy allows."""
        ask.privacy = self._privacy_of(ask.namespace)
        ask.hides_chunks = self.hides_chunks(caller, ask.namespace)
        ask.shows_accounting = caller.may(Verb.LIST) and not ask.hides_chunks
        return self.answers.stream(ask)

    def hides_chunks(self, caller: Caller, namespace: str) -> bool:
        """Return whether the namespace's privacy hides from the caller which chunks are known."""
        return not (self._privacy_of(namespace).expert.accounting or caller.is_unrestricted)

    @contextmanager
    def _serve(self, caller: Caller, namespace: str, verb: Verb | None = None) -> Iterator[None]:
        """Authorise a request to a namespace, and count it while the block runs. ``verb`` None: any verb is
        sufficient. Raises `PermissionDenied` and `ResourceExhausted`."""
        caller.authorize(namespace, verb)
        with self.shares.admit(namespace):
            yield

    async def put_chunks(
        self,
        caller: Caller,
        namespace: str,
        chunks: Sequence[Segment],
        *,
        wait: bool = True,
        ttl_s: float | None = None,
    ) -> list[Put]:
        """Save the chunks that the store lacks. With ``wait``, return when they are committed.

        Stored chunks are kept for at least ``ttl_s`` more seconds, and new chunks for at most ``ttl_s``;
        None: until the store needs their space."""
        check_ttl(ttl_s)
        asked_at_s = self._saver.times.now(namespace)
        with self._serve(caller, namespace, Verb.PUT):
            self._check_count("chunks", len(chunks), self.limits.chunks_max)
            info = await self.spaces.info()
            space = await self.spaces.find(namespace)
            pieces = await self._resolver.pieces(space, chunks, "chunks")
            room = min(info.max_model_len - len(space.lead_token_ids) - 1, TOKENS_MAX)
            for index, piece in enumerate(pieces):
                if not piece.is_chunk:
                    multiple = self._privacy_of(namespace).expert.chunk_tokens_multiple
                    raise InvalidField(
                        f"chunks[{index}]",
                        f"has {piece.num_tokens} tokens; a chunk of this namespace has at least {multiple}",
                    )
                if piece.num_tokens > room:
                    raise InvalidField(
                        f"chunks[{index}]", f"has {piece.num_tokens} tokens; this model takes {room}: cut it"
                    )
            wanted = [(one.key, one.token_ids) for one in pieces]
            missing = await self._copies.retain(namespace, wanted, ttl_s)
            num_tokens = sum(len(tokens) for _, tokens in missing)
            self.shares.charge(namespace, num_tokens)
            try:
                futures = self._saver.submit(namespace, missing, ttl_s=ttl_s, asked_at_s=asked_at_s)
            except ResourceExhausted:  # nothing is saved
                self.shares.settle(namespace, num_tokens)
                raise
            await self._resolver.learn(space, chunks, pieces)
            states: dict[ChunkKey, tuple[PutState, str]] = {}
            for (key, _), future in zip(missing, futures, strict=True):
                outcome = await asyncio.shield(future) if wait else None
                states[key] = _put_state(outcome)
            return [
                Put(piece.key, piece.num_tokens, *states.get(piece.key, (PutState.PRESENT, "")))
                for piece in pieces
            ]

    @staticmethod
    def _check_count(name: str, count: int, count_max: int) -> None:
        if count > count_max:
            raise InvalidField(name, f"{count} were sent; send at most {count_max}")

    async def get_chunk(self, caller: Caller, namespace: str, key: ChunkKey) -> GatewayChunk:
        """Return a stored chunk. Raises `NotFound`."""
        with self._serve(caller, namespace, Verb.LIST):
            (tier,), (manifest,) = await self._store.run(
                lambda store: (store.tiers(namespace, [key]), store.lookup(namespace, [key]))
            )
            if tier is None or manifest is None:
                raise NotFound(f"chunk {key} is not stored in namespace {namespace!r}; put it")
            return GatewayChunk(manifest, tier, self.known.knows(namespace, key))

    async def delete_chunk(self, caller: Caller, namespace: str, key: ChunkKey) -> Receipt:
        """Erase every copy of a chunk, and its tokens. Raises `Unavailable` if a shard that may hold a copy
        does not answer."""
        with self._serve(caller, namespace, Verb.DELETE):
            return await self._eraser.erase_chunk(namespace, key, caller.pattern_of(namespace))

    async def delete_document(
        self, caller: Caller, namespace: str, corpus: str, document_id: str
    ) -> tuple[bool, Receipt]:
        """Erase a document, and the chunks that no other document has. Return whether it existed, and the
        receipt. Raises `NotFound` without a ledger, and `Unavailable`."""
        with self._serve(caller, namespace, Verb.DELETE):
            within = caller.pattern_of(namespace)
            return await self._eraser.erase_document(namespace, corpus, document_id, within)

    async def erase_namespace(self, caller: Caller, namespace: str) -> Receipt:
        """Erase all data of a namespace. Raises `Unavailable` if a shard does not answer."""
        with self._serve(caller, namespace, Verb.ADMIN):
            return await self._eraser.erase_namespace(namespace, caller.pattern_of(namespace))

    async def list_chunks(
        self, caller: Caller, namespace: str, limit: int = 100, after: ChunkKey | None = None
    ) -> list[GatewayChunk]:
        """Return a page of chunks, in key order. Raises `Unavailable` if a shard does not answer."""
        with self._serve(caller, namespace, Verb.LIST):
            self._check_count("page_size", limit, self.limits.chunks_max)
            manifests = await self._store.run(lambda store: store.list(namespace, limit, after))
            return [GatewayChunk(m, "", self.known.knows(namespace, m.key)) for m in manifests]

    async def prefetch(
        self, caller: Caller, namespace: str, segments: Sequence[Segment]
    ) -> tuple[list[ChunkKey | None], int]:
        """Start to load chunks into RAM. Return their keys (None for plain segments), and the number of
        chunks that are in RAM or being loaded (0 for a caller who may not know what is stored)."""
        with self._serve(caller, namespace, Verb.GENERATE):
            if hides_chunks := self.hides_chunks(caller, namespace):
                refuse_keys(namespace, segments)
            self._check_count("segments", len(segments), self.limits.segments_max)
            space = await self.spaces.find(namespace)
            pieces = await self._resolver.pieces(space, segments)
            is_chunk = [not s.plain and piece.is_chunk for s, piece in zip(segments, pieces, strict=True)]
            keys = [piece.key if wanted else None for piece, wanted in zip(pieces, is_chunk, strict=True)]
            wanted = list(dict.fromkeys(key for key in keys if key is not None))
            accepted = await self._store.run(lambda store: store.prefetch(namespace, wanted))
            await self._resolver.learn(space, segments, pieces)
            return keys, accepted if caller.may(Verb.LIST) and not hides_chunks else 0

    async def find_residency(
        self,
        caller: Caller,
        namespace: str,
        chunks: Sequence[Segment],
        keys: Sequence[ChunkKey] = (),
        call: OpenAICall | None = None,
    ) -> list[ChunkResidence]:
        """Find the shards that hold ``chunks``, ``keys``, and the chunks that an engine finds by their
        content in the prompts of ``call``. The result is delayed as a first token is, if the namespace's
        privacy pads.

        Raises `PermissionDenied` if the caller may not know what is stored, and as
        `EngineBackend.find_chunks`.
        """
        began_s, privacy, prompt_tokens = time.perf_counter(), self._privacy_of(namespace), 0
        with self._serve_revealing(caller, namespace):
            self._check_count("chunks", len(chunks) + len(keys), self.limits.segments_max)
            found = await self._residency.find(namespace, chunks)
            found += await self._residency.find_keys(namespace, keys)
            if call is not None:
                params = replace(call.params, namespace=namespace, shared=privacy.shared)
                match = await self.backend.find_chunks(replace(call, params=params))
                prompt_tokens = match.prompt_tokens
                found += await self._residency.find_matched(match.chunks)
        if privacy.pads:
            # The time must not reveal which chunks an engine found, so the step depends on the whole prompt.
            step_s = privacy.step_s(max(prompt_tokens, sum(one.num_tokens for one in found)))
            await asyncio.sleep(padding_s(time.perf_counter() - began_s, step_s))
        return found

    @contextmanager
    def _serve_revealing(self, caller: Caller, namespace: str) -> Iterator[None]:
        """As `_serve`, for calls that reveal stored chunks."""
        with self._serve(caller, namespace, Verb.LIST):
            if self.hides_chunks(caller, namespace):
                raise PermissionDenied(
                    f"namespace {namespace!r} does not reveal which chunks are stored; use a token for all "
                    "namespaces"
                )
            yield

    async def tokenize(self, caller: Caller, namespace: str, texts: Sequence[str]) -> list[ResolvedSegment]:
        """Tokenise each text alone."""
        with self._serve(caller, namespace):
            self._check_count("texts", len(texts), self.limits.texts_max)
            plain = [Segment(text=text, plain=True) for text in texts]
            return await self._resolver.pieces(await self.spaces.find(namespace), plain, "texts")

    async def close(self) -> None:
        """Close the gateway and its store; the backend's owner closes the backend. Idempotent."""
        await self.answers.close()
        await self.recent_info.close()
        await self.recent_stats.close()
        await self._eraser.close()
        if self._learner is not None:
            await self._learner.close()
        if self._filler is not None:
            await self._filler.close()
        await self._saver.close()
        await self._store.close()
        await asyncio.to_thread(self.known.close)
        if self._documents is not None:
            self._documents.close()


def _put_state(outcome: SaveOutcome | None) -> tuple[PutState, str]:
    if outcome is None:
        return PutState.ACCEPTED, ""
    return (PutState.STORED if outcome.is_saved else PutState.FAILED), outcome.reason
