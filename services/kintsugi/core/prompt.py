"""A RAG prompt as token ids: what the chunks stand behind, the chunks, the question; and where each lies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.spaces import Span


class FormName(StrEnum):
    """How a prompt is written around its chunks and its question (`models.prompt_form`)."""

    AUTO = "auto"
    """`CHAT` where the checkpoint has a chat template, else `PLAIN`."""
    CHAT = "chat"
    """The chat template, with the chunks at the beginning of the user's message."""
    DOCUMENTS = "documents"
    """The chat template, with the chunks where it writes documents."""
    PLAIN = "plain"
    """The tokenizer's special tokens, the chunks and the question, without a template."""


@dataclass(frozen=True)
class PromptChunk:
    """A piece of text that is prefilled once and used in many prompts."""

    title: str
    token_ids: tuple[int, ...]
    lead: tuple[int, ...] = ()
    """Token ids between the chunk before and this one, which a template wrote. They are computed."""


@dataclass(frozen=True)
class RagPrompt:
    """`[prefix][chunk]…[chunk][question]` as token ids, each chunk behind its lead."""

    prefix: tuple[int, ...]
    chunks: tuple[PromptChunk, ...]
    question: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        chunks = (i for chunk in self.chunks for i in (*chunk.lead, *chunk.token_ids))
        return [*self.prefix, *chunks, *self.question]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where each chunk lies."""
        spans, end = [], len(self.prefix)
        for chunk in self.chunks:
            start = end + len(chunk.lead)
            end = start + len(chunk.token_ids)
            spans.append(Span(start, end))
        return tuple(spans)

    @property
    def warm_up(self) -> list[int]:
        """Prefix and first chunk: what an earlier request may have left in a prefix cache."""
        return self.token_ids[: self.spans[0].end]
