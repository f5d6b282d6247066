"""From the user's texts to a RAG prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.prompt import PromptChunk, RagPrompt

CHUNK_BYTES_MAX = 4 << 20
CHUNKS_MAX = 256


def build_prompt(tokenizer: Any, texts: Sequence[tuple[str, str]], ending: str) -> RagPrompt:
    """From (title, text) pairs, and the question as it ends the prompt.

    Chunks are tokenised one by one, as they were when they were stored.
    """
    if not 0 < len(texts) <= CHUNKS_MAX:
        raise InvalidField("chunk", f"{len(texts)} chunks; give between 1 and {CHUNKS_MAX}")
    return RagPrompt(
        prefix=prefix_of(tokenizer),
        chunks=tuple(PromptChunk(title, _ids(tokenizer, text)) for title, text in texts),
        question=_ids(tokenizer, ending),
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
