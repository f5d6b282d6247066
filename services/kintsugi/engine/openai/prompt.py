"""Tokenises a prompt so that every chunk has the ids that it has alone.

A chunk's key is over its token ids, and a tokenizer joins characters across any boundary: "chunk" and
"chunk\\n\\nQuestion" need not begin with the same ids. So a prompt is cut at its chunks, and each piece is
tokenised by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import FOUND_CHARS_MIN, SPANS_MAX
from kintsugi.core.spaces import Span

CACHED_CHUNKS = 1024
CACHED_CHARS_MAX = 16_384
"""Longest text whose ids are cached. With `CACHED_CHUNKS` it bounds the cache to 100 MB, usually 20."""
_PROBE = "a"
_DOCUMENT_GAP = "\n\n"


@dataclass(frozen=True)
class TextPiece:
    """A part of a prompt's text that is tokenised by itself."""

    text: str
    is_chunk: bool


@dataclass(frozen=True)
class Segmented:
    """A tokenised prompt, and where its chunks lie."""

    token_ids: list[int]
    spans: tuple[Span, ...]


def with_documents(body: Mapping[str, Any]) -> dict[str, Any]:
    """Move `documents` to the beginning of the last user message, for a template without a place for them.

    vLLM would drop them without a word. Messages that are none are left to it. Raises `InvalidField`.
    """
    documents, messages = body.get("documents"), body.get("messages")
    if not documents or not isinstance(messages, list):
        return dict(body)
    at = max((i for i, one in enumerate(messages) if _is_users(one)), default=None)
    if at is None:
        raise InvalidField("documents", "need a user message to stand before")
    text = _DOCUMENT_GAP.join(str(one.get("text", "")) for one in documents) + _DOCUMENT_GAP
    content = messages[at].get("content") or ""
    if isinstance(content, str):
        content = text + content
    elif isinstance(content, list):
        content = [{"type": "text", "text": text}, *content]
    messages = [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]
    return {**body, "messages": messages, "documents": None}


def _is_users(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "user"


def cut_at_chunks(
    text: str, chunk_texts: Iterable[str], found_chars_min: int = FOUND_CHARS_MIN
) -> list[TextPiece]:
    """The text, cut before and behind each occurrence of a chunk.

    A longer chunk's occurrences are taken first, and nothing that overlaps them; equal texts count once. Of a
    chunk with fewer than ``found_chars_min`` characters only the marked occurrences are meant: those that
    fill whole lines, or the only one there is. Raises `InvalidField` for more than `SPANS_MAX` occurrences.
    Cost: one search through the text for each distinct chunk.
    """
    taken: list[tuple[int, int]] = []
    for chunk in sorted({chunk for chunk in chunk_texts if chunk}, key=lambda one: (-len(one), one)):
        short = len(chunk) < found_chars_min
        for start in _chunk_occurrences(text, chunk) if short else _occurrences(text, chunk):
            end = start + len(chunk)
            at = bisect_left(taken, (start, end))
            if (at == 0 or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0]):
                taken.insert(at, (start, end))
                if len(taken) > SPANS_MAX:
                    raise InvalidField(
                        "messages", f"hold more than {SPANS_MAX} chunks; send fewer or longer ones"
                    )
    pieces, done = [], 0
    for start, end in taken:
        if done < start:
            pieces.append(TextPiece(text[done:start], is_chunk=False))
        pieces.append(TextPiece(text[start:end], is_chunk=True))
        done = end
    if done < len(text):
        pieces.append(TextPiece(text[done:], is_chunk=False))
    return pieces


def _chunk_occurrences(text: str, chunk: str) -> Iterator[int]:
    """Most templates set a message's parts and its documents on lines of their own."""
    first = text.find(chunk)
    if first >= 0 and text.find(chunk, first + 1) < 0:
        yield first
        return
    for start in _occurrences(text, chunk):
        end = start + len(chunk)
        if (not start or text[start - 1] == "\n") and text[end : end + 1] in ("", "\n"):
            yield start


def _occurrences(text: str, chunk: str) -> Iterator[int]:
    start = text.find(chunk)
    while start >= 0:
        yield start
        start = text.find(chunk, start + len(chunk))


class SegmentTokenizer:
    """Thread-safe where the tokenizer is."""

    def __init__(self, tokenizer: Any, prefix_token_ids: Sequence[int] = ()) -> None:
        """``tokenizer`` is transformers'; ``prefix_token_ids`` is what chunks were prefilled behind."""
        self._tokenizer = tokenizer
        self._cached = lru_cache(CACHED_CHUNKS)(self._ids)
        plain, special = self._ids(_PROBE), tuple(tokenizer(_PROBE, add_special_tokens=True)["input_ids"])
        before = next(
            (at for at in range(len(special)) if special[at : at + len(plain)] == plain), len(special)
        )
        self._special_before, self._special_behind = special[:before], special[before + len(plain) :]
        self._prefix = tuple(prefix_token_ids)

    def segment_text(self, text: str, chunk_texts: Iterable[str], add_special_tokens: bool) -> Segmented:
        """Tokenise, if told so with the special tokens that the tokenizer adds around a plain prompt.

        Where the text begins with the prefix of the chunk space, so do the ids.
        """
        ids = list(self._special_before) if add_special_tokens else []
        prefix_ids, rest = self._prefix_of(text, tuple(ids))
        ids += prefix_ids
        spans = []
        for piece in cut_at_chunks(rest, chunk_texts):
            if not piece.is_chunk:
                ids += self._ids(piece.text)
                continue
            # As `precompute.chunking.Chunker.token_ids`.
            chunk = (self._cached if len(piece.text) <= CACHED_CHARS_MAX else self._ids)(piece.text)
            if chunk:
                spans.append(Span(len(ids), len(ids) + len(chunk)))
                ids += chunk
        if add_special_tokens:
            ids += self._special_behind
        return Segmented(ids, tuple(spans))

    def _prefix_of(self, text: str, special: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The prefix's ids behind the special ones, and the text that follows; or no ids and the text."""
        if self._prefix[: len(special)] != special or len(self._prefix) == len(special):
            return (), text
        ids = self._prefix[len(special) :]
        start = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if not text.startswith(start) or self._ids(start) != ids:
            return (), text
        return ids, text[len(start) :]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
