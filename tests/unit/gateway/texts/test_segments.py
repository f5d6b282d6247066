"""Segments into tokens: bounded, off the event loop, and known for as long as they are used."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.spaces import ChunkSpace, ModelFingerprint, TokenIds
from kintsugi.gateway.texts.known_chunks import KnownChunks
from kintsugi.gateway.texts.segments import (
    INLINE_CHARS_MAX,
    LONG_CHARS,
    TEXT_CHARS_MAX,
    ResolvedSegment,
    Segment,
    SegmentResolver,
)
from kintsugi.precompute.documents import (
    DocumentIndex,
    DocumentRef,
    IndexedChunk,
    KnownChunk,
    NameKey,
    no_name_key,
)

SPACE = ChunkSpace(ModelFingerprint.of({"weights": "none"}), "tenant", (1,))
OTHERS = ChunkSpace(SPACE.fingerprint, "other", (1,))
TEXT = "a text that is long enough to be found again"


def tokenize(text: str) -> list[int]:
    return [ord(character) for character in text]


def resolver(known: KnownChunks | None = None, documents: DocumentIndex | None = None) -> SegmentResolver:
    return SegmentResolver(tokenize, KnownChunks() if known is None else known, documents)


async def learned(resolve: SegmentResolver, *segments: Segment) -> list[ResolvedSegment]:
    """As of a request that was not refused."""
    pieces = await resolve.pieces(SPACE, segments)
    await resolve.learn(SPACE, segments, pieces)
    return pieces


def test_a_small_request_for_many_tokens_is_refused_before_they_are_gathered() -> None:
    known = KnownChunks()
    resolve = resolver(known)

    async def ask() -> None:
        (piece,) = await learned(resolve, Segment(token_ids=TokenIds.of([7] * 1000)))
        with pytest.raises(InvalidField, match=r"11000 tokens up to segments\[10\]; at most 10000"):
            await resolve.prompt(SPACE, [Segment(key=piece.key)] * 1024, Segment(text="Why?"), 10_000)
        with pytest.raises(InvalidField, match="question: 4 tokens"):
            await resolve.prompt(SPACE, [], Segment(text="Why?"), 3)

    asyncio.run(ask())


def test_many_short_texts_are_no_more_inline_than_a_long_one() -> None:
    inline_chars = 0

    def watched(text: str) -> list[int]:
        nonlocal inline_chars
        if threading.current_thread() is threading.main_thread():
            inline_chars += len(text)
        return tokenize(text)

    texts = [Segment(text=f"{number:04}" * 250) for number in range(20)]
    pieces = asyncio.run(SegmentResolver(watched, KnownChunks(), None).pieces(SPACE, texts))
    assert [piece.num_tokens for piece in pieces] == [1000] * 20
    assert 0 < inline_chars <= INLINE_CHARS_MAX


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    def refused(text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenised")

    known = KnownChunks()
    bounded = SegmentResolver(refused, known, None, token_chars_max=9)
    unbounded = SegmentResolver(refused, known, None)

    async def ask() -> None:
        long = Segment(text="x" * (LONG_CHARS + 1))
        with pytest.raises(
            InvalidField, match=f"question: has {LONG_CHARS + 1} char.* at most {LONG_CHARS} here"
        ):
            await bounded.prompt(SPACE, [], long, 4096)
        with pytest.raises(InvalidField, match=r"segments\[0\]: has .* cut it"):
            await bounded.prompt(SPACE, [long], Segment(text="Why?"), 4096)
        longest = Segment(text="x" * (TEXT_CHARS_MAX + 1), plain=True)
        for resolve in (bounded, unbounded):
            with pytest.raises(InvalidField, match=rf"texts\[0\]: .* at most {TEXT_CHARS_MAX} here"):
                await resolve.pieces(SPACE, [longest], "texts")

    asyncio.run(ask())


def test_a_text_that_may_fit_is_tokenised_whatever_is_dropped_of_it() -> None:
    """A normaliser may make one token of any number of spaces."""
    resolve = SegmentResolver(lambda text: [ord(c) for c in text if c != " "], KnownChunks(), None, 1)

    async def ask() -> None:
        spaces = await resolve.prompt(SPACE, [], Segment(text="x" + " " * (LONG_CHARS - 1)), 3)
        assert spaces.token_ids == TokenIds.of([1, ord("x")])
        exact = Segment(text="x" * (LONG_CHARS + 1))
        prompt = await resolve.prompt(SPACE, [exact], Segment(text="?"), LONG_CHARS + 2)
        assert len(prompt.token_ids) == LONG_CHARS + 3

    asyncio.run(ask())


def test_long_texts_are_tokenised_one_at_a_time_and_hold_up_no_others() -> None:
    may_end = threading.Event()
    running: list[int] = []
    most_long = 0

    def watched(text: str) -> list[int]:
        nonlocal most_long
        if len(text) > LONG_CHARS:
            running.append(1)
            most_long = max(most_long, len(running))
            may_end.wait(20)
            running.pop()
        return [len(text)]

    resolve = SegmentResolver(watched, KnownChunks(), None)

    async def ask() -> None:
        async with asyncio.timeout(20):
            long = [
                asyncio.create_task(resolve.pieces(SPACE, [Segment(text="x" * (LONG_CHARS + number))]))
                for number in range(1, 5)
            ]
            while not running:
                await asyncio.sleep(0.001)
            (piece,) = await resolve.pieces(SPACE, [Segment(text="y" * (INLINE_CHARS_MAX + 1))])
            assert piece.token_ids == TokenIds.of([INLINE_CHARS_MAX + 1])
            assert not any(task.done() for task in long)
            may_end.set()
            await asyncio.gather(*long)

    asyncio.run(ask())
    assert most_long == 1


def test_a_text_that_was_deleted_and_comes_again_is_known_again() -> None:
    known = KnownChunks()
    resolve = resolver(known)

    async def ask() -> None:
        (piece,) = await learned(resolve, Segment(text=TEXT))
        known.erase("tenant", [piece.key], math.inf)
        with pytest.raises(NotFound):
            await resolve.pieces(SPACE, [Segment(key=piece.key)])
        await learned(resolve, Segment(text=TEXT))
        assert await resolve.pieces(SPACE, [Segment(key=piece.key)]) == [piece]
        assert known.find("tenant", f"… {TEXT} …") == [(2, 2 + len(TEXT))]

    asyncio.run(ask())


def test_a_text_in_use_is_not_what_is_forgotten_first() -> None:
    known = KnownChunks(chunks_max=4)
    resolve = resolver(known)

    async def ask() -> None:
        for text in (TEXT, "another one", TEXT, "a third one"):
            (piece,) = await learned(resolve, Segment(text=text))
        (piece,) = await learned(resolve, Segment(text=TEXT))
        assert known.knows("tenant", piece.key)

    asyncio.run(ask())


def test_nothing_is_known_of_what_was_only_resolved() -> None:
    known = KnownChunks()
    resolve = resolver(known)

    async def ask() -> None:
        segments = [
            Segment(text=TEXT),
            Segment(token_ids=TokenIds.of([1, 2])),
            Segment(text=TEXT[1:], plain=True),
        ]
        pieces = await resolve.pieces(SPACE, segments)
        assert len(known) == 0
        await resolve.learn(SPACE, segments, pieces)
        assert [known.knows("tenant", piece.key) for piece in pieces] == [True, True, False]

    asyncio.run(ask())


class OneCorpus(DocumentIndex):
    """One corpus of another tenant; stands in for a precompute ledger."""

    def __init__(self, chunk: KnownChunk) -> None:
        self._chunk = chunk

    def resolve(  # type: ignore[override]
        self, corpus: str, refs: list[DocumentRef], name_key: NameKey = no_name_key
    ) -> list[KnownChunk | None]:
        if corpus != "secret":
            raise NotFound(f"corpus {corpus!r} is not complete in this ledger; run kintsugi precompute")
        return [self._chunk if ref == self._chunk.ref else None for ref in refs]

    def chunks(self, fingerprint: str, after: int, limit: int) -> list[IndexedChunk]:
        return []

    def close(self) -> None:
        return None


def test_nobody_learns_which_corpora_others_have() -> None:
    async def refusal(corpus: str) -> str:
        ref = DocumentRef("manual", 0)
        (piece,) = await resolver().pieces(OTHERS, [Segment(text=TEXT)])
        documents = OneCorpus(KnownChunk(ref, "1", piece.key, tuple(piece.token_ids)))
        with pytest.raises(NotFound) as caught:
            await resolver(documents=documents).pieces(SPACE, [Segment(document=(corpus, ref))])
        return str(caught.value).replace(corpus, "…")

    assert asyncio.run(refusal("secret")) == asyncio.run(refusal("none"))
