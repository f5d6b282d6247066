"""Tokenises a prompt so that every chunk gets the same token ids as when it is tokenised alone.

A chunk's key is computed over its token ids, and a tokenizer merges characters across boundaries: "chunk" and
"chunk\\n\\nQuestion" need not begin with the same ids. So a prompt is cut at its chunks, and each piece is
tokenised separately.
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
from kintsugi.models.prompt_form import special_tokens

CACHED_CHUNKS = 1024
CACHED_CHARS_MAX = 16_384
"""Maximum length of a text whose ids are cached. With `CACHED_CHUNKS` it bounds the cache to 100 MB (usually
20)."""
_DOCUMENT_GAP = "\n\n"


@dataclass(frozen=True)
class TextPiece:
    """A part of a prompt's text that is tokenised separately."""

    text: str
    is_chunk: bool


@dataclass(frozen=True)
class Segmented:
    """A tokenised prompt with the spans of its chunks."""

    token_ids: list[int]
    spans: tuple[Span, ...]


def with_documents(body: Mapping[str, Any]) -> dict[str, Any]:
    """Move `documents` to the beginning of the last user message, for a template that does not render them:
    vLLM would drop them silently.

    Does not check messages; vLLM refuses malformed ones. Raises `InvalidField` without a user message.
    """
    documents, messages = body.get("documents"), body.get("messages")
    if not documents or not isinstance(messages, list):
        return dict(body)
    last = max((i for i, one in enumerate(messages) if _is_user_message(one)), default=None)
    if last is None:
        raise InvalidField("documents", "need a user message, at whose beginning they are inserted")
    text = _DOCUMENT_GAP.join(str(one.get("text", "")) for one in documents) + _DOCUMENT_GAP
    content = messages[last].get("content") or ""
    if isinstance(content, str):
        content = text + content
    elif isinstance(content, list):
        content = [{"type": "text", "text": text}, *content]
    messages = [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
    return {**body, "messages": messages, "documents": None}


def with_whole_messages(items: Any) -> Any:
    """Return the items of a response's `input` with each assistant message reduced to one part and without
    null fields: vLLM reads only the first part, and fails on a refusal, on no part and on a null. Raises
    `InvalidField` for a part without text."""
    if not isinstance(items, list):
        return items
    return [
        _with_one_part(item, f"input[{index}]") if isinstance(item, Mapping) else item
        for index, item in enumerate(items)
    ]


def _with_one_part(item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    parts = item.get("content")
    if item.get("role") != "assistant" or not isinstance(parts, list):
        return item
    texts = [part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None for part in parts]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidField(
                f"{where}.content[{index}]", "must have a text or a refusal, as part of an assistant message"
            )
    part = {"type": "output_text", "text": "".join(map(str, texts)), "annotations": []}
    given = {name: value for name, value in item.items() if value is not None}
    return {"type": "message", **given, "content": [part]}


def _is_user_message(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "user"


def cut_at_chunks(
    text: str, chunk_texts: Iterable[str], found_chars_min: int = FOUND_CHARS_MIN
) -> list[TextPiece]:
    """Cut the text before and after each occurrence of a chunk.

    Searches longer chunks first, and skips occurrences that overlap an earlier one. A chunk with fewer than
    ``found_chars_min`` characters counts only if it fills whole lines or occurs just once. Raises
    `InvalidField` for more than `SPANS_MAX` occurrences. Cost: one search through the text per distinct
    chunk.
    """
    taken: list[tuple[int, int]] = []
    for chunk in sorted({chunk for chunk in chunk_texts if chunk}, key=lambda one: (-len(one), one)):
        is_short = len(chunk) < found_chars_min
        for start in _short_occurrences(text, chunk) if is_short else _occurrences(text, chunk):
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


def _short_occurrences(text: str, chunk: str) -> Iterator[int]:
    """Yield the start of the only occurrence. If there are several, yield the starts of those that fill whole
    lines: most templates write message parts and documents on separate lines."""
    first = text.find(chunk)
    if first >= 0 and text.find(chunk, first + 1) < 0:
        yield first
        return
    for start in _occurrences(text, chunk):
        end = start + len(chunk)
        if (not start or text[start - 1] == "\n") and text[end : end + 1] in ("", "\n"):
            yield start


def _occurrences(text: str, chunk: str) -> Iterator[int]:
    """Yield the starts of the occurrences from left to right, without overlaps."""
    start = text.find(chunk)
    while start >= 0:
        yield start
        start = text.find(chunk, start + len(chunk))


class SegmentTokenizer:
    """Tokenises prompts piece by piece. Thread-safe if the tokenizer is."""

    def __init__(self, tokenizer: Any, prefix_token_ids: Sequence[int] = ()) -> None:
        """``tokenizer``: a tokenizer of transformers. ``prefix_token_ids``: the chunk space's prefix."""
        self._tokenizer = tokenizer
        self._cached = lru_cache(CACHED_CHUNKS)(self._ids)
        self._special_before, self._special_behind = special_tokens(tokenizer)
        self._prefix = tuple(prefix_token_ids)

    def segment_text(self, text: str, chunk_texts: Iterable[str], add_special_tokens: bool) -> Segmented:
        """Tokenise a prompt, with each of its chunks separately.

        ``add_special_tokens`` adds the special tokens that the tokenizer puts around a plain prompt. If the
        text begins with the chunk space's prefix, the ids begin with the prefix's ids.
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
        """Return the prefix's ids after the special ones, and the rest of the text; no ids and the whole text
        if the text does not begin with the prefix."""
        if self._prefix[: len(special)] != special or len(self._prefix) == len(special):
            return (), text
        ids = self._prefix[len(special) :]
        start = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if not text.startswith(start) or self._ids(start) != ids:
            return (), text
        return ids, text[len(start) :]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
