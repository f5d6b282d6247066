"""A RAG prompt as token ids: what the chunks stand behind, the chunks, the question; and where each lies."""

from __future__ import annotations

from dataclasses import dataclass

from kintsugi.core.spaces import Span


@dataclass(frozen=True)
class PromptChunk:
    """A piece of text that is prefilled once and used in many prompts."""

    title: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RagPrompt:
    """`[prefix][chunk]…[chunk][question]` as token ids."""

    prefix: tuple[int, ...]
    chunks: tuple[PromptChunk, ...]
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
