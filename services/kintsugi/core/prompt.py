"""A RAG prompt as token ids: prefix, chunks, question and their positions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.spaces import Span


class FormName(StrEnum):
    """The form of a prompt: the text around its chunks and its question (`models.prompt_form`)."""

    AUTO = "auto"
    """`CHAT` where the checkpoint has a chat template, else `PLAIN`."""
    CHAT = "chat"
    """The chat template, with the chunks at the beginning of the user's message."""
    DOCUMENTS = "documents"
    """The chat template, with the chunks where it writes documents."""
    PLAIN = "plain"
    """The tokenizer's special tokens, the chunks and the question, without a template."""


def end_line(text: str) -> str:
    """Add a line end to a text that has none, so that the next text of the prompt begins on its own line."""
    return text if text.endswith("\n") else f"{text}\n"


@dataclass(frozen=True)
class PromptChunk:
    """A piece of text that is prefilled once and used in many prompts."""

    title: str
    token_ids: tuple[int, ...]
    separator: tuple[int, ...] = ()
    """Token ids that a template writes between the previous chunk and this one. They are computed."""


@dataclass(frozen=True)
class RagPrompt:
    """`[prefix][chunk]…[chunk][question]` as token ids, each chunk after its separator."""

    prefix: tuple[int, ...]
    chunks: tuple[PromptChunk, ...]
    question: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        chunks = (i for chunk in self.chunks for i in (*chunk.separator, *chunk.token_ids))
        return [*self.prefix, *chunks, *self.question]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Positions of the chunks."""
        spans, end = [], len(self.prefix)
        for chunk in self.chunks:
            start = end + len(chunk.separator)
            end = start + len(chunk.token_ids)
            spans.append(Span(start, end))
        return tuple(spans)

    @property
    def warm_up(self) -> list[int]:
        """Prefix and first chunk, which an earlier request may have left in a prefix cache."""
        return self.token_ids[: self.spans[0].end]
