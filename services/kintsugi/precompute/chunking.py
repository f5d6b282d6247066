"""Cuts documents into chunks by tokens, at sentence and paragraph boundaries, the same on every machine.

A chunk's key is computed over its token ids, and a segment of a prompt is tokenised alone. Therefore the same
model folder and the same `ChunkingConfig` produce exactly the keys that a request looks up.

Without an overlap, the texts of a document's chunks, joined, are the document. A chunk keeps its line ends;
the space before a word and the indentation of a line begin the next chunk. The tokenizers of Llama 3, Qwen 3
and Gemma 3 then make nearly the same tokens of the chunks as of the whole document: 0.0 to 0.05 tokens differ
per cut. With all white space at the end of the chunk before it would be 0.3 to 0.8, at the beginning of the
next chunk 0.0 to 1.0.

`semantic-text-splitter` finds the boundaries (Unicode sentences and words, runs of newlines, Markdown's
structure). Its version is part of `ChunkingConfig.identity`, because another version may cut elsewhere.
Tokens are counted with the model's own tokenizer, without special tokens.

Needs the extra `chunking`. Does not use torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from kintsugi.core.errors import Corrupted, InvalidField, NotFound
from kintsugi.core.layout import TOKENS_MAX
from kintsugi.core.schema import STRICT
from kintsugi.core.spaces import ChunkKey, ChunkSpace
from kintsugi.models.checkpoint import checkpoint_folder

SPLITTER = "semantic-text-splitter"
SECTION_CHARS = 16_384
"""Longer documents are first cut into sections that are split separately: on text without boundaries the
splitter's time grows with the square of the length (0.2 s for 16,000 characters, minutes for a million)."""
_SECTION_ENDS = ("\n\n", "\n", ". ", " ")
LINE_END_TOKENS = 1
"""Tokens of a chunk that the splitter leaves free, for a line end that it would put into the next chunk."""


@dataclass(frozen=True)
class ChunkingConfig:
    """How documents are cut. Different configurations produce different chunks, with different keys."""

    __pydantic_config__ = STRICT

    tokens_max: int = 512
    """Maximum number of tokens in a chunk; a chunk ends at the last boundary before it."""
    overlap_tokens: int = 0
    """Maximum number of tokens that two consecutive chunks share. Shared tokens are stored and prefilled
    twice, so 0 is cheapest."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_max <= TOKENS_MAX:
            raise InvalidField("tokens_max", f"{self.tokens_max} is outside [1, {TOKENS_MAX}]")
        if not 0 <= self.overlap_tokens < self.tokens_max:
            raise InvalidField(
                "overlap_tokens", f"{self.overlap_tokens} is outside [0, tokens_max = {self.tokens_max})"
            )

    @cached_property
    def identity(self) -> str:
        """Everything that determines where a document is cut, except the tokenizer."""
        facts = {
            **asdict(self),
            "section_chars": SECTION_CHARS,
            "line_end_tokens": LINE_END_TOKENS,
            "splitter": f"{SPLITTER} {version(SPLITTER)}",
        }
        return json.dumps(facts, sort_keys=True)


@dataclass(frozen=True)
class Chunk:
    """One chunk of a document."""

    index: int
    """Index in the document, from 0."""
    start: int
    """Offset of its first character in the document."""
    text: str
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def key(self, space: ChunkSpace) -> ChunkKey:
        return ChunkKey.of(space, self.token_ids)

    def metadata(self, space: ChunkSpace) -> dict[str, Any]:
        """The metadata that a retriever stores with the chunk's text, so that requests can name the cached
        chunk."""
        return {
            "kintsugi_key": self.key(space).hex,
            "kintsugi_index": self.index,
            "kintsugi_tokens": len(self.token_ids),
        }


class Chunker:
    """Cuts documents for one model. Thread-safe and cheap to create (2 ms); do not pickle it."""

    def __init__(self, tokenizer: Tokenizer, config: ChunkingConfig | None = None) -> None:
        """``tokenizer`` is a `tokenizers.Tokenizer`; a fast tokenizer of `transformers` has one as its
        `backend_tokenizer`. The chunker uses a copy without truncation and padding."""
        self.config = config or ChunkingConfig()
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        overlap = self.config.overlap_tokens
        capacity = max(self.config.tokens_max - LINE_END_TOKENS, overlap + 1)
        self._text = TextSplitter.from_huggingface_tokenizer(self._tokenizer, capacity, overlap, trim=False)
        self._markdown = MarkdownSplitter.from_huggingface_tokenizer(
            self._tokenizer, capacity, overlap, trim=False
        )

    @staticmethod
    def of_model(folder: str | Path, config: ChunkingConfig | None = None) -> Chunker:
        """Use the tokenizer of a checkpoint folder or of a hub name, `org/model`. A hub's tokenizer is
        downloaded without the weights. Raises `NotFound`, `Corrupted`, and what `checkpoint_folder`
        raises."""
        path = checkpoint_folder(folder) / "tokenizer.json"
        if not path.is_file():
            raise NotFound(
                f"{folder} has no tokenizer.json; save the model's fast tokenizer there "
                "(AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises plain `Exception` for everything that it cannot parse.
            raise Corrupted(f"{path} is not a tokenizer ({error}); download it again") from error
        return Chunker(tokenizer, config)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise a segment alone, without special tokens. A request has the same ids for it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def token_chars_max(self) -> int:
        """Number of characters of the longest token. No token covers more text, apart from characters that
        the tokenizer drops or does not know. vLLM bounds a prompt's text by the same number."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode the ids. Tokenising the text again may produce other ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def chunks(self, text: str, markdown: bool = False) -> Iterator[Chunk]:
        """Yield the document's chunks in order, one section at a time; none for an empty text.

        Cost: about 2 µs per character, mostly for counting the tokens of candidate chunks.
        """
        splitter = self._markdown if markdown else self._text
        ranges: Iterator[tuple[int, int]] = (
            (begin + start, begin + start + len(piece))
            for begin, end in _sections(text)
            for start, piece in splitter.chunk_indices(text[begin:end])
        )
        if not self.config.overlap_tokens:
            ranges = self._move_cuts(text, ranges)
        for index, (start, end) in enumerate(ranges):
            ids = self.token_ids(text[start:end])
            # The splitter counts with its own build of the tokenizer; a difference would break the bound.
            assert len(ids) <= self.config.tokens_max or end - start == 1, (len(ids), text[start:end][:80])
            yield Chunk(index, start, text[start:end], ids)

    def _move_cuts(self, text: str, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Move each cut to its place in the white space around it. A cut stays where the splitter put it if
        the chunk before or after it would be too long."""
        start = 0
        for end, next_end in pairwise(chain((end for _, end in ranges), [len(text)])):
            if end <= start:
                continue  # the chunk before has taken this range, which is white space
            cut = _place_cut(text, start, end, next_end) if end < next_end else end
            if cut != end and not (self._fits(text[start:cut]) and self._fits(text[cut:next_end])):
                cut = end
            yield start, cut
            start = cut

    def _fits(self, text: str) -> bool:
        return len(self.token_ids(text)) <= self.config.tokens_max


def _place_cut(text: str, start: int, cut: int, end: int) -> int:
    """Return the place for a cut between `start` and `end`: after the last line end of the white space around
    it, or else before that white space."""
    before, after = text[start:cut].rstrip(), text[cut:end].lstrip()
    first, last = start + len(before), end - len(after)
    line_end = max(text.rfind("\n", first, last), text.rfind("\r", first, last))
    if line_end >= 0:
        return line_end + 1
    return first if before else cut


def _sections(text: str) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `SECTION_CHARS` characters that cover the text. Each range ends at the best
    boundary in its second half."""
    begin = 0
    while len(text) - begin > SECTION_CHARS:
        limit, half = begin + SECTION_CHARS, begin + SECTION_CHARS // 2
        found = (
            text.rfind(mark, half, limit) + len(mark) for mark in _SECTION_ENDS if mark in text[half:limit]
        )
        end = next(found, limit)
        yield begin, end
        begin = end
    if begin < len(text):
        yield begin, len(text)
