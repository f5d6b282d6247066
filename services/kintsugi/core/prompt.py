"""RAG prompts as token ids, with the positions of their chunks, and the prompts that a calibration covers.
Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kintsugi.core.errors import InvalidField
from kintsugi.core.schema import STRICT
from kintsugi.core.spaces import Span

LENGTH_TOLERANCE = 1.25
"""Factor by which a prompt's lengths may exceed the measured range: no file of questions contains the
shortest and longest prompts that occur."""


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


@dataclass(frozen=True)
class LengthRange:
    """The smallest and the largest measured value."""

    __pydantic_config__ = STRICT

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise InvalidField("domain", f"{self.low} to {self.high} is not a range of lengths")


@dataclass(frozen=True)
class PromptShape:
    """The lengths that decide whether a calibration covers a prompt."""

    num_tokens: int
    chunk_tokens: tuple[int, ...]
    """The lengths of the chunks that would be blended."""


@dataclass(frozen=True)
class Domain:
    """The prompts that a report covers."""

    __pydantic_config__ = STRICT

    form: str
    """Name of the prompt form: the text around chunks and question."""
    prompt_tokens: LengthRange
    chunks: LengthRange
    chunk_tokens: LengthRange
    """Mean length of a prompt's chunks."""
    answer_tokens: LengthRange
    """Positions compared per prompt."""

    def holds_chunk(self, num_tokens: int) -> bool:
        """Whether the length of a single chunk is in the measured range, within `LENGTH_TOLERANCE`."""
        low, high = self.chunk_tokens.low / LENGTH_TOLERANCE, self.chunk_tokens.high * LENGTH_TOLERANCE
        return low <= num_tokens <= high

    def departure(self, shape: PromptShape) -> str | None:
        """Describe which length of a prompt is outside the measured range; None if no length is.

        Lengths may exceed the range by `LENGTH_TOLERANCE`. Fewer chunks than measured are allowed: tokens
        that are not loaded are computed.
        """
        mean = sum(shape.chunk_tokens) / max(1, len(shape.chunk_tokens))
        for name, value, measured, low in (
            ("tokens", shape.num_tokens, self.prompt_tokens, self.prompt_tokens.low),
            ("chunks", len(shape.chunk_tokens), self.chunks, 0),
            ("tokens per chunk", mean, self.chunk_tokens, self.chunk_tokens.low),
        ):
            if not low / LENGTH_TOLERANCE <= value <= measured.high * LENGTH_TOLERANCE:
                return f"{value:g} {name}, calibrated with {measured.low} to {measured.high}"
        return None
