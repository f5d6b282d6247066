"""A RAG prompt as token ids, the sources of its KV, and the plan that the connector executes.

Pure. A `Planner` (fusor) turns a prompt's hits into a `BlendPlan`; the plan's digest names the KV that
executing it produces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import blake3

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import BlendOptions, SelectorName, Trial, parse_selector
from kintsugi.core.spaces import ChunkKey, ChunkSpace, Span, token_bytes


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
class ChunkSource:
    """Where a chunk's bytes come from."""

    shard: str = ""
    """Address of the shard; empty if the store is in this process, or if unknown."""
    tier: str = ""
    """`ram`, the name of an SSD tier, or `bucket`; empty if unknown."""


@dataclass(frozen=True)
class ChunkHit:
    """A chunk of the prompt that the store holds."""

    start: int
    end: int
    key: ChunkKey
    num_bytes: int = 0
    """Bytes of all layers that one rank loads."""
    source: ChunkSource = ChunkSource()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Selection:
    """Configuration of the choice of hit tokens to recompute. The gate judges it, and a plan's digest
    includes it.

    A layer number beyond the model's last layer means the last layer.
    """

    ratio: float
    """Share of the hit tokens with approximate KV (`BlendPlan.exact_end`) that is recomputed."""
    selector: str = SelectorName.HKVD
    """Name of the selector, which ranks the tokens."""
    check_layer: int = 1
    """The layer whose KV deviation selects tokens, for selectors that use it."""
    query_layers: tuple[int, ...] = ()
    """Layers at which the question's attention counts, ascending. Empty: chosen by the fusor."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise InvalidField("ratio", f"{self.ratio} is outside [0, 1]")
        parse_selector(self.selector)
        if self.check_layer < 0:
            raise InvalidField("check_layer", f"{self.check_layer} must not be negative")
        if any(layer < 0 for layer in self.query_layers) or list(self.query_layers) != sorted(
            set(self.query_layers)
        ):
            raise InvalidField(
                "query_layers",
                f"{list(self.query_layers)} must be different layers in ascending order, from 0",
            )


def make_trial(selection: Selection) -> Trial:
    """Return a trial of a configuration."""
    return Trial(selection.ratio, str(selection.selector), selection.check_layer, selection.query_layers)


def selection_of(trial: Trial) -> Selection:
    """Return the configuration of a trial."""
    return Selection(trial.ratio, trial.selector, trial.check_layer, trial.query_layers)


def apply_options(selection: Selection, options: BlendOptions) -> Selection:
    """Return the selection with the request's options in place of its own values."""
    return replace(selection, **options.chosen)


@dataclass(frozen=True)
class BlendPlan:
    """The plan for one prompt. All ranks execute it in the same way."""

    hits: tuple[ChunkHit, ...]
    """In prompt order, disjoint."""
    selection: Selection
    exact_end: int = 0
    """Loaded KV of tokens before this position equals that of a full prefill (`exact_end`). A ratio of 1
    recomputes these tokens; other ratios do not count them."""
    chunks: tuple[range, ...] = ()
    """Positions of the prompt's known chunks, loaded or not: in order, disjoint, and followed by text."""
    predicted_ttft_s: float | None = None
    """Predicted time from planning to the first token; None if no prediction was possible."""

    def without(self, keys: frozenset[ChunkKey]) -> BlendPlan:
        """Return the plan with `keys` as misses: their tokens are computed instead of loaded."""
        return replace(self, hits=tuple(hit for hit in self.hits if hit.key not in keys))


def exact_end(spans: Sequence[Span], space: ChunkSpace, prompt_token_ids: Sequence[int]) -> int:
    """Return the first position whose KV is approximate if every span is a hit.

    A chunk directly after its prefix is exact if it is a plain copy; with a context, its key shows this. Text
    up to the next chunk is then exact, too. `len(prompt)` if nothing is approximate.
    """
    for span in spans:
        if span.start != space.first_place(prompt_token_ids):
            return span.start
        tokens = prompt_token_ids[span.start : span.end]
        if space.context_token_ids and span.key != ChunkKey.of(space.plain, tokens):
            return span.start
    return len(prompt_token_ids)


def plan_digest(
    space: ChunkSpace,
    spans: Sequence[Span],
    selection: Selection,
    asking: Sequence[int] = (),
    takes_others: bool = False,
) -> bytes:
    """Return 32 bytes that identify the KV of a prompt blended this way.

    They depend on the request alone, not on what the store held: a missed chunk is computed instead, which is
    never worse, and a later turn over the same spans must find the KV. `asking`: the prompt's token ids, if
    the selection depends on the question, so that questions do not share KV. `takes_others`: whether the
    request also uses chunks found after its first span; such KV is not shared with requests that use none.
    """
    hasher = blake3.blake3(b"kintsugi-plan\0" + space.digest)
    # Adding 0.0 makes one spelling of 1 and 1.0, and of the two zeros.
    ratio = f"{selection.ratio + 0.0!r}"
    layers = f"{selection.check_layer}\0{','.join(map(str, selection.query_layers))}"
    hasher.update(f"{selection.selector}\0{layers}\0{ratio}\0".encode())
    for span in spans:
        hasher.update(span.start.to_bytes(8, "little") + span.end.to_bytes(8, "little"))
    hasher.update((b"\1" if takes_others else b"\0") + token_bytes(asking))
    return hasher.digest()
