"""Resolves the segments of a prompt to token ids, spans and chunk keys.

A segment is a text, token ids, a chunk key or a document's chunk. Each text is tokenised alone, as precompute
does. The ids are cached, because tokenising 3,000 tokens takes milliseconds and most chunks recur.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import xxhash

from kintsugi.core.errors import ForeignChunkKey, InvalidField, NotFound
from kintsugi.core.held import Held
from kintsugi.core.layout import TOKENS_MAX
from kintsugi.core.namespaces import NO_PRIVACY, NamespacePrivacy, is_within
from kintsugi.core.spaces import ID_BYTES, ChunkKey, ChunkSpace, Span, TokenIds
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.precompute.documents import DocumentIndex, DocumentRef, KnownChunk

INLINE_CHARS_MAX = 4096
"""Maximum number of a request's characters that are tokenised on the event loop; the rest is tokenised on a
thread."""
THREADS = 2
LONG_CHARS = 1 << 18
"""Number of characters above which texts are tokenised one at a time, so that the second thread is free for
shorter texts. Tokenisation needs 250 bytes a character: 65 MB and up to half a second at this length. Shorter
texts are never refused for their length, because a tokenizer may map any number of unknown or ignored
characters to one token."""
TEXT_CHARS_MAX = 1 << 21
"""Maximum length of one text, which needs half a gigabyte during tokenisation and exceeds any model's
context."""
TOGETHER_TOKENS_MAX = 8 << 20
"""Maximum number of tokens in the segments of a request that is not a prompt. A key of 64 characters can name
a chunk of `TOKENS_MAX` tokens."""
PIECE_BYTES = 256
"""A tokenised text's name and key, and the objects around its tokens, beyond `ITEM_BYTES`."""
CACHED_BYTES_MAX = 48 << 20
"""Memory for cached texts, as tokens."""

Tokenize = Callable[[str], Sequence[int]]
_TextName = tuple[bytes, bytes, int]
"""Digest of the chunk space, digest of the text, and the number that divides the chunk's length."""


@dataclass(frozen=True)
class Segment:
    """One part of a prompt; exactly one of the first four fields is set."""

    text: str | None = None
    token_ids: TokenIds | None = None
    key: ChunkKey | None = None
    document: tuple[str, DocumentRef] | None = None
    """Name of a corpus, and a chunk in it."""
    plain: bool = False
    """Whether the segment is prompt text but not a chunk."""


@dataclass(frozen=True)
class ResolvedSegment:
    """A segment's tokens and key."""

    token_ids: TokenIds
    """Tokens of the chunk."""
    key: ChunkKey
    tail: TokenIds = field(default_factory=TokenIds)
    """Further tokens of the segment, which are not in the chunk, because chunks have quantised lengths."""
    is_chunk: bool = True
    """False if the segment is shorter than the shortest chunk."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class ResolvedPrompt:
    """`[prefix][segment]…[question]` as token ids."""

    space: ChunkSpace
    token_ids: TokenIds
    spans: tuple[Span, ...]
    """Spans of the segments; the spans of plain segments have no key."""
    pieces: tuple[ResolvedSegment, ...]
    """The segments, in order."""

    @property
    def chunks(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.key is not None)


class SegmentResolver:
    """Resolves the segments of requests. For one event loop."""

    def __init__(
        self,
        tokenize: Tokenize,
        known: KnownChunks,
        documents: DocumentIndex | None,
        token_chars_max: int | None = None,
        privacy_of: Callable[[str], NamespacePrivacy] = lambda namespace: NO_PRIVACY,
        name_key: Callable[[str], bytes] = lambda namespace: b"",
    ) -> None:
        """``token_chars_max``: length of the tokenizer's longest token in characters; None: unknown.
        ``privacy_of`` returns a namespace's privacy. ``name_key``: `ChunkStore.name_key`."""
        self.privacy_of = privacy_of
        self._name_key = name_key
        self._tokenize = tokenize
        self._token_chars_max = token_chars_max
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._long = asyncio.Semaphore(1)
        self._known = known
        self._documents = documents
        self.cached: Held[_TextName, ResolvedSegment] = Held(CACHED_BYTES_MAX)
        """Tokenised texts."""

    async def prompt(
        self,
        space: ChunkSpace,
        segments: Sequence[Segment],
        question: Segment,
        tokens_max: int,
        question_foot: str = "",
    ) -> ResolvedPrompt:
        """Resolve a whole prompt. ``question_foot`` is appended to a question that is a text.

        Raises `InvalidField`, also if the segments or the question alone have more than ``tokens_max``
        tokens, `ForeignChunkKey` and `NotFound`. The errors name the segment.
        """
        pieces = await self.pieces(space, segments, "segments", tokens_max)
        end = len(space.prefix_token_ids)
        spans = []
        for segment, piece in zip(segments, pieces, strict=True):
            start, end = end, end + piece.num_tokens
            spans.append(Span(start, end, piece.key if piece.is_chunk and not segment.plain else None))
            end += len(piece.tail)
        if question.text:
            question = replace(question, text=question.text + question_foot)
        asked = await self.pieces(space, [question], "question", tokens_max)
        prefix = TokenIds.of(space.prefix_token_ids)
        parts = [part for piece in (*pieces, *asked) for part in (piece.token_ids, piece.tail) if part]
        token_ids = TokenIds.join([prefix, *parts])
        return ResolvedPrompt(space, token_ids, tuple(spans), tuple(pieces))

    async def learn(
        self, space: ChunkSpace, segments: Sequence[Segment], pieces: Sequence[ResolvedSegment]
    ) -> None:
        """Remember the chunks of an accepted request. A refused request must not evict others' chunks."""
        new = []
        multiple = self.privacy_of(space.namespace).expert.chunk_tokens_multiple
        for segment, piece in zip(segments, pieces, strict=True):
            if segment.plain or not piece.is_chunk or (segment.token_ids is None and segment.text is None):
                continue
            if segment.text is not None:
                name = _name_of(space, segment.text, multiple)
                is_known = self._known.token_ids(space.namespace, piece.key) is not None
                if is_known and self.cached.get(space.namespace, name) is not None:
                    continue
                self._keep(space.namespace, name, piece)
            new.append((piece, segment.text))

        def remember() -> None:
            for piece, text in new:
                self._known.remember(space.namespace, piece.key, piece.token_ids, text)

        if new:
            await asyncio.to_thread(remember)

    def forget(self, namespace: str, keys: Collection[ChunkKey] | None) -> None:
        """Remove cached texts of chunks; None: all of the namespace and its parts."""
        names = [
            name
            for name in self.cached.bytes_by_namespace
            if (is_within(name, namespace) if keys is None else name == namespace)
        ]
        for name in names:
            for text, piece in self.cached.items(name):
                if keys is None or piece.key in keys:
                    self.cached.pop(name, text)

    async def pieces(
        self,
        space: ChunkSpace,
        segments: Sequence[Segment],
        where: str = "segments",
        tokens_max: int = TOGETHER_TOKENS_MAX,
    ) -> list[ResolvedSegment]:
        """Resolve segments, in order. ``where`` is the request's field, for errors. Raises as `prompt`."""
        privacy = self.privacy_of(space.namespace)
        shared = self._space_in(space, privacy.shared) if privacy.shared else None
        documents = await self._look_up_documents(space, shared, segments, where)
        pieces: list[ResolvedSegment] = []
        tokens = inline_chars = 0
        for index, segment in enumerate(segments):
            name = where if where == "question" else f"{where}[{index}]"
            is_chunk = not segment.plain and where != "question"
            multiple = privacy.expert.chunk_tokens_multiple if is_chunk else 1
            if segment.text is not None:
                room = tokens_max - tokens
                self._check_length(segment.text, name, min(room, TOKENS_MAX) if is_chunk else room)
                inline_chars += len(segment.text)
                inline = inline_chars <= INLINE_CHARS_MAX
                piece = await self._of_text(space, segment.text, name, inline, multiple)
            elif segment.token_ids is not None:
                if not segment.token_ids:
                    raise InvalidField(name, "has no tokens; leave it out")
                piece = _cut_chunk(space, segment.token_ids, multiple)
            elif segment.key is not None:
                piece = self._of_key(space, shared, segment.key, name)
            elif index in documents:
                piece = documents[index]
            else:
                raise InvalidField(name, "is empty; give a text, tokens, a chunk key or a document's chunk")
            if is_chunk and piece.num_tokens > TOKENS_MAX:
                raise InvalidField(
                    name,
                    f"has {piece.num_tokens} tokens; a chunk has at most {TOKENS_MAX}: cut it",
                )
            tokens += piece.num_tokens + len(piece.tail)
            if tokens > tokens_max:
                raise InvalidField(
                    where, f"{tokens} tokens up to {name}; at most {tokens_max} are allowed: send fewer"
                )
            pieces.append(piece)
        return pieces

    def _space_in(self, space: ChunkSpace, namespace: str) -> ChunkSpace:
        """Return the space of the same model in another namespace; its chunks have other keys."""
        return replace(space, namespace=namespace, name_key=self._name_key(namespace))

    def _check_length(self, text: str, name: str, tokens_max: int) -> None:
        """Raise `InvalidField` for a text whose length alone implies too many tokens."""
        chars_max = TEXT_CHARS_MAX
        if self._token_chars_max is not None:
            chars_max = min(chars_max, max(tokens_max * self._token_chars_max, LONG_CHARS))
        if len(text) > chars_max:
            raise InvalidField(
                name, f"has {len(text)} characters; a text has at most {chars_max} here: cut it"
            )

    async def _of_text(
        self, space: ChunkSpace, text: str, name: str, inline: bool, multiple: int
    ) -> ResolvedSegment:
        text_name = _name_of(space, text, multiple)
        piece = self.cached.get(space.namespace, text_name)
        if piece is not None:
            self._keep(space.namespace, text_name, piece)
            return piece
        if inline:
            token_ids = TokenIds.of(self._tokenize(text))
        else:
            async with self._long if len(text) > LONG_CHARS else nullcontext():
                loop = asyncio.get_running_loop()
                token_ids = await loop.run_in_executor(
                    self._threads, lambda: TokenIds.of(self._tokenize(text))
                )
        if not token_ids:
            raise InvalidField(name, "has no tokens; leave it out or give it a text")
        return _cut_chunk(space, token_ids, multiple)

    def _keep(self, namespace: str, name: _TextName, piece: ResolvedSegment) -> None:
        size = PIECE_BYTES + ID_BYTES * (piece.num_tokens + len(piece.tail))
        self.cached.put(namespace, name, piece, size)

    def _of_key(
        self, space: ChunkSpace, shared: ChunkSpace | None, key: ChunkKey, name: str
    ) -> ResolvedSegment:
        ids = self._known.token_ids(space.namespace, key)
        if ids is None and shared is not None:
            theirs = self._known.token_ids(shared.namespace, key)
            if theirs is not None and ChunkKey.of(shared, theirs) == key:
                return ResolvedSegment(theirs, ChunkKey.of(space, theirs))
        if ids is None:
            raise NotFound(
                f"{name}: chunk {key} is not known here in namespace {space.namespace!r}; send its text or "
                "tokens once, or put it again"
            )
        if ChunkKey.of(space, ids) != key:
            raise ForeignChunkKey(
                name,
                f"chunk {key} belongs to another chunk space: its model or system prompt is not served now; "
                "put it again",
            )
        return ResolvedSegment(ids, key)

    async def _look_up_documents(
        self, space: ChunkSpace, shared: ChunkSpace | None, segments: Sequence[Segment], where: str
    ) -> dict[int, ResolvedSegment]:
        """Resolve the segments that name a document's chunk. Return them by their index."""
        by_corpus: dict[str, dict[int, DocumentRef]] = {}
        for index, segment in enumerate(segments):
            if segment.document is not None:
                corpus, ref = segment.document
                by_corpus.setdefault(corpus, {})[index] = ref
        pieces = {}
        for corpus, refs in by_corpus.items():
            if self._documents is None:
                raise NotFound(f"{where}: this gateway knows no corpora; start it with a precompute ledger")
            try:
                found = await asyncio.to_thread(
                    self._documents.resolve, corpus, list(refs.values()), self._name_key
                )
            except NotFound:  # the same error as for a corpus of another namespace
                found = [None] * len(refs)
            for (index, ref), chunk in zip(refs.items(), found, strict=True):
                pieces[index] = _piece_of(space, shared, chunk, ref, f"{where}[{index}]", corpus)
        return pieces


def _name_of(space: ChunkSpace, text: str, multiple: int) -> _TextName:
    digest = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
    return space.digest, digest, multiple


def _cut_chunk(space: ChunkSpace, token_ids: TokenIds, multiple: int) -> ResolvedSegment:
    """Return the segment of these tokens: a chunk whose length is a multiple of ``multiple``, and the
    tail."""
    if multiple == 1:
        return ResolvedSegment(token_ids, ChunkKey.of(space, token_ids))
    length = len(token_ids) - len(token_ids) % multiple
    if not length:
        return ResolvedSegment(token_ids, ChunkKey.of(space, token_ids), is_chunk=False)
    chunk = token_ids[:length]
    return ResolvedSegment(chunk, ChunkKey.of(space, chunk), token_ids[length:])


def _piece_of(
    space: ChunkSpace,
    shared: ChunkSpace | None,
    chunk: KnownChunk | None,
    ref: DocumentRef,
    name: str,
    corpus: str,
) -> ResolvedSegment:
    """Return the segment of a document's chunk.

    Raises `NotFound` also for a corpus of another namespace, so that callers learn nothing about it.
    """
    token_ids = TokenIds() if chunk is None else TokenIds.of(chunk.token_ids)
    keys = [ChunkKey.of(one, token_ids) for one in (space, shared) if one is not None]
    if chunk is None or chunk.key not in keys:
        version = "" if ref.version is None else f" in version {ref.version!r}"
        raise NotFound(
            f"{name}: document {ref.document_id!r} of corpus {corpus!r} has no chunk {ref.index}{version} "
            f"for namespace {space.namespace!r} and the model that is served; run kintsugi precompute"
        )
    return ResolvedSegment(token_ids, keys[0])
