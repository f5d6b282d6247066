"""Documents into chunks: by tokens, at sentence and paragraph boundaries, the same on every machine.

A chunk's key is over its token ids, and a segment of a prompt tokenises alone. So whoever cuts a document
here, with the same model folder and `ChunkingConfig`, gets exactly the keys that a request looks up.
The boundaries are those of `semantic-text-splitter` (Unicode sentences and words, runs of newlines,
Markdown's structure); its version is part of `ChunkingConfig.identity`, because another version may cut
elsewhere. Token counts are the model's own tokenizer's, special tokens left out.

Needs the extra `chunking`. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
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
"""Longer documents are cut into sections first, each split by itself: on text without boundaries the
splitter's time grows with the square of its length (0.2 s for 16,000 characters, minutes for a million)."""
_SECTION_ENDS = ("\n\n", "\n", ". ", " ")


@dataclass(frozen=True)
class ChunkingConfig:
    """How documents are cut. Two parties that use different ones do not find each other's chunks."""

    __pydantic_config__ = STRICT

    tokens_max: int = 512
    """Upper bound of a chunk's tokens; chunks end at the last boundary before it."""
    overlap_tokens: int = 0
    """At most so many tokens of a chunk begin the next one. Stored and prefilled twice: 0 is cheapest."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_max <= TOKENS_MAX:
            raise InvalidField("tokens_max", f"{self.tokens_max} is outside [1, {TOKENS_MAX}]")
        if not 0 <= self.overlap_tokens < self.tokens_max:
            raise InvalidField(
                "overlap_tokens", f"{self.overlap_tokens} is outside [0, {self.tokens_max}), the chunk's size"
            )

    @cached_property
    def identity(self) -> str:
        """Everything but the tokenizer that decides where a document is cut."""
        facts = {
            **asdict(self),
            "section_chars": SECTION_CHARS,
            "splitter": f"{SPLITTER} {version(SPLITTER)}",
        }
        return json.dumps(facts, sort_keys=True)


@dataclass(frozen=True)
class Chunk:
    """One piece of a document."""

    index: int
    """From 0, in the document's order."""
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
        """What retrieval hands on with a chunk's text, so that it and the cache speak of the same thing."""
        return {
            "kintsugi_key": self.key(space).hex,
            "kintsugi_index": self.index,
            "kintsugi_tokens": len(self.token_ids),
        }


class Chunker:
    """Cuts documents for one model. Thread-safe; cheap to make (2 ms), and not to be pickled."""

    def __init__(self, tokenizer: Tokenizer, config: ChunkingConfig | None = None) -> None:
        """``tokenizer`` is a `tokenizers.Tokenizer`; `transformers` fast tokenizers hold theirs as
        `backend_tokenizer`. A copy is made: truncation and padding are never wanted here."""
        self.config = config or ChunkingConfig()
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        capacity, overlap = self.config.tokens_max, self.config.overlap_tokens
        self._text = TextSplitter.from_huggingface_tokenizer(self._tokenizer, capacity, overlap)
        self._markdown = MarkdownSplitter.from_huggingface_tokenizer(self._tokenizer, capacity, overlap)

    @staticmethod
    def of_model(folder: str | Path, config: ChunkingConfig | None = None) -> Chunker:
        """With the tokenizer in a checkpoint folder, or of a hub name, `org/model`, whose small files are
        downloaded. Raises `NotFound`, `Corrupted`, and as `checkpoint_folder` does."""
        path = checkpoint_folder(folder) / "tokenizer.json"
        if not path.is_file():
            raise NotFound(
                f"{folder} has no tokenizer.json; save the model's fast tokenizer there "
                "(AutoTokenizer.from_pretrained(…).save_pretrained(…))"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises plain `Exception` for whatever it cannot parse.
            raise Corrupted(f"{path} is no tokenizer ({error}); download it again") from error
        return Chunker(tokenizer, config)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """A segment's ids, by itself: what a request holds for it, without special tokens around it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def token_chars_max(self) -> int:
        """Characters of the longest token. None stands for more of a text, unless the tokenizer drops some or
        does not know them. vLLM bounds a prompt's text by it, too."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What the ids decode to. Tokenised again it need not give the same ids, with every tokenizer."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def chunks(self, text: str, markdown: bool = False) -> Iterator[Chunk]:
        """The document's chunks in order; none for one without text. Lazy, a section at a time.

        Cost: about 2 µs a character, most of it counting tokens of candidate pieces.
        """
        splitter = self._markdown if markdown else self._text
        index = 0
        for begin, end in _sections(text):
            for start, piece in splitter.chunk_indices(text[begin:end]):
                yield from self._chunk(index, begin + start, piece)
                index += 1

    def _chunk(self, index: int, start: int, piece: str) -> Iterator[Chunk]:
        ids = self.token_ids(piece)
        # The splitter counts with its own build of the tokenizer; a difference would break the bound.
        assert len(ids) <= self.config.tokens_max or len(piece) == 1, (len(ids), piece[:80])
        yield Chunk(index, start, piece, ids)


def _sections(text: str) -> Iterator[tuple[int, int]]:
    """Ranges of at most `SECTION_CHARS` that cover the text, each up to the best boundary in reach."""
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
