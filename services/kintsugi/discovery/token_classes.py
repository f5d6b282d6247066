"""Classifies tokens of a vocabulary that separate the pieces of a prompt.

A class follows from a token's text alone, so a table of one byte per token id is computed once per tokenizer.
Separators of several tokens (a blank line may be two line breaks) are found in sequences of classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ENDS_LINE = 1
"""The token's text ends with a line break."""
ONLY_LINE_BREAK = 2
"""The token's text is white space with a line break."""
ENDS_PARAGRAPH = 4
"""The token's text ends with a blank line."""
BEGINS_BLOCK = 8
"""At the beginning of a line, the token begins a heading, a fence or a rule."""
IS_SPECIAL = 16
"""The token occurs between messages or at the ends of a prompt: a special token, or markup such as
`<tool_response>` that was added to the vocabulary."""

HEADER_TOKENS_MAX = 4
"""Maximum tokens of a message's header after its special token, such as `user` and a line break."""

_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\s*\Z")
_MARKUP = re.compile(r"<\S.*>")
_BLOCK = re.compile(r"\s*(#{1,6}(\s|\Z)|```|~~~|---|===)")


@dataclass(frozen=True)
class TokenClasses:
    """The classes of all token ids of a vocabulary."""

    table: npt.NDArray[np.uint8]
    """Sum of the classes by token id. Larger ids have no class."""

    @staticmethod
    def of_texts(texts: Sequence[str], special_ids: Iterable[int] = ()) -> TokenClasses:
        """Classify the texts of all token ids, in order."""
        table = np.fromiter(map(_class_of, texts), np.uint8, len(texts))
        special = [one for one in special_ids if 0 <= one < len(texts)]
        table[special] = IS_SPECIAL
        return TokenClasses(table)

    @staticmethod
    def of_tokenizer(tokenizer: Any) -> TokenClasses:
        """The classes of a transformers tokenizer. Takes up to a second."""
        texts = tokenizer.batch_decode([[token_id] for token_id in range(len(tokenizer))])
        added = tokenizer.added_tokens_decoder.items()
        return TokenClasses.of_texts(texts, [token_id for token_id, token in added if _is_border(token)])

    @staticmethod
    def none() -> TokenClasses:
        """Return classes without separators, for models without a tokenizer."""
        return TokenClasses(np.zeros(0, np.uint8))

    def find_separators(self, token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
        """The positions at which a new piece begins, ascending and within `[1, len)`."""
        if not len(self.table) or len(token_ids) < 2:
            return np.zeros(0, np.intp)
        classes = self._classes_of(token_ids)
        before, behind = classes[:-1], classes[1:]
        line_ended = (before & ENDS_LINE) != 0
        is_blank = (before & ENDS_PARAGRAPH) != 0
        # A blank line may be two tokens, each with one line break.
        is_blank[1:] |= line_ended[:-1] & ((before[1:] & ONLY_LINE_BREAK) != 0)
        is_blank &= (behind & ONLY_LINE_BREAK) == 0
        opens = line_ended & ((behind & BEGINS_BLOCK) != 0)
        special_before, special_behind = (before & IS_SPECIAL) != 0, (behind & IS_SPECIAL) != 0
        message_ends = special_behind & ~special_before
        simple = np.flatnonzero(is_blank | opens | message_ends) + 1
        contents = _contents(classes, np.flatnonzero(special_before & ~special_behind) + 1)
        return np.unique(np.concatenate((simple, contents)))

    def count_text(self, token_ids: npt.NDArray[np.uint32]) -> int:
        """Return the number of tokens before the first `IS_SPECIAL` token; all tokens if there is none."""
        is_special = (self._classes_of(token_ids) & IS_SPECIAL) != 0
        return int(is_special.argmax()) if is_special.any() else len(token_ids)

    def _classes_of(self, token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        if not len(self.table):
            return np.zeros(len(token_ids), np.uint8)
        classes: npt.NDArray[np.uint8] = self.table[np.minimum(token_ids, len(self.table) - 1)]
        classes[token_ids >= len(self.table)] = 0
        return classes


def _contents(classes: npt.NDArray[np.uint8], behind: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return the start of each message's content: after the line break that ends its header, if it has one.

    ``behind``: the positions directly after special tokens.
    """
    padded = np.concatenate((classes, np.zeros(HEADER_TOKENS_MAX, np.uint8)))
    headers = padded[behind[:, None] + np.arange(HEADER_TOKENS_MAX)] & ENDS_LINE != 0
    starts = np.where(headers.any(axis=1), behind + headers.argmax(axis=1) + 1, behind)
    return starts[starts < len(classes)]


def _is_border(token: Any) -> bool:
    """Whether an added token marks a prompt's structure, and is not part of its text.

    Such tokens need not be special: DeepSeek's token before a user's message and Qwen's `<tool_response>` are
    not. Other added tokens are text: Gemma adds runs of line breaks, GPT-NeoX runs of blanks, and an
    extended vocabulary has added words.
    """
    return bool(token.special or _MARKUP.fullmatch(token.content.strip()))


def _class_of(text: str) -> int:
    if "\n" not in text:
        return BEGINS_BLOCK if _BLOCK.match(text) else 0
    found = 0
    if text.rstrip(" \t\r").endswith("\n"):
        found |= ENDS_LINE
    if not text.strip():
        found |= ONLY_LINE_BREAK
    if _BLANK_LINE.search(text):
        found |= ENDS_PARAGRAPH
    return found
