"""A RAG prompt: what the chunks stand behind, the chunks, the question; and where each chunk lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.spaces import Span

CHUNK_BYTES_MAX = 4 << 20
CHUNKS_MAX = 256


@dataclass(frozen=True)
class Chunk:
    """A piece of text that is prefilled once and used in many prompts."""

    title: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RagPrompt:
    """`[prefix][chunk]…[chunk][question]` as token ids."""

    prefix: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    question: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prefix, *(i for chunk in self.chunks for i in chunk.token_ids), *self.question]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where each chunk lies."""
        spans, start = [], len(self.prefix)
        for chunk in self.chunks:
            spans.append(Span(start, start + len(chunk.token_ids)))
            start = spans[-1].end
        return tuple(spans)

    @property
    def warm_up(self) -> list[int]:
        """Prefix and first chunk: what an earlier request may have left in a prefix cache."""
        return [*self.prefix, *self.chunks[0].token_ids]


def build_prompt(tokenizer: Any, texts: Sequence[tuple[str, str]], question: str) -> RagPrompt:
    """From (title, text) pairs. Chunks are tokenised one by one, as they were when they were stored."""
    if not question.strip():
        raise InvalidField("question", "is empty; ask something about the chunks")
    if not 0 < len(texts) <= CHUNKS_MAX:
        raise InvalidField("chunk", f"{len(texts)} chunks; give between 1 and {CHUNKS_MAX}")
    return RagPrompt(
        prefix=prefix_of(tokenizer),
        chunks=tuple(Chunk(title, _ids(tokenizer, text)) for title, text in texts),
        question=_ids(tokenizer, f"\nQuestion: {question.strip()}\nAnswer:"),
    )


def prefix_of(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts before any prompt: BOS, or nothing."""
    return tuple(tokenizer("").input_ids)


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def read_chunk(path: Path) -> tuple[str, str]:
    """(title, text) of a file the user named. Raises `NotFound` or `InvalidField`."""
    if not path.is_file():
        raise NotFound(f"{path} is not a file; name a text file")
    if path.stat().st_size > CHUNK_BYTES_MAX:
        raise InvalidField("chunk", f"{path} exceeds {CHUNK_BYTES_MAX >> 20} MiB; split it into chunks")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidField("chunk", f"{path} is not UTF-8 text; convert it first") from None
    if not text.strip():
        raise InvalidField("chunk", f"{path} is empty; name a file with text")
    return path.name, text
