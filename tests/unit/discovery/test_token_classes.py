"""Which tokens of a tokenizer separate what, where the vocabulary was added to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kintsugi.discovery.token_classes import (
    ENDS_LINE,
    ENDS_PARAGRAPH,
    IS_SPECIAL,
    ONLY_LINE_BREAK,
    TokenClasses,
)

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

ADDED = {
    "<s>": (True, IS_SPECIAL),
    "[INST]": (True, IS_SPECIAL),
    "<｜User｜>": (False, IS_SPECIAL),
    "<tool_response>": (False, IS_SPECIAL),
    "\n\n": (False, ENDS_LINE | ONLY_LINE_BREAK | ENDS_PARAGRAPH),
    "\n": (False, ENDS_LINE | ONLY_LINE_BREAK),
    "        ": (False, 0),
    "\t\t": (False, 0),
    "kintsugi": (False, 0),
    "<": (False, 0),
}
"""Whether each added token is special, and its class."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    model = tokenizers.models.WordLevel({"word": 0, "other": 1, "[UNK]": 2}, "[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    for text, (special, _) in ADDED.items():
        tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False, special=special)])
    return tokenizer


def test_an_added_token_is_a_border_if_it_is_special_or_markup(tokenizer: Any) -> None:
    """Any other has the class of its text, as if it had been there from the beginning."""
    table = TokenClasses.of_tokenizer(tokenizer).table
    found = {text: int(table[tokenizer.convert_tokens_to_ids(text)]) for text in ADDED}
    assert found == {text: expected for text, (_, expected) in ADDED.items()}
    assert list(table[:2]) == [0, 0]


def test_a_run_of_blanks_separates_nothing_and_a_run_of_line_breaks_paragraphs(tokenizer: Any) -> None:
    word = [0, 1] * 5
    indented = [*word, tokenizer.convert_tokens_to_ids("        "), *word]
    parted = [*word, tokenizer.convert_tokens_to_ids("\n\n"), *word]
    classes = TokenClasses.of_tokenizer(tokenizer)
    assert classes.find_separators(np.array(indented, np.uint32)).tolist() == []
    assert classes.find_separators(np.array(parted, np.uint32)).tolist() == [11]


@pytest.mark.parametrize(
    ("texts", "count"),
    [([], 0), (["word", "other"], 2), (["word", "\n", "[INST]", "word"], 2), (["[INST]", "word"], 0)],
)
def test_text_is_counted_up_to_the_next_border(tokenizer: Any, texts: list[str], count: int) -> None:
    ids = np.array(tokenizer.convert_tokens_to_ids(texts), np.uint32)
    assert TokenClasses.of_tokenizer(tokenizer).count_text(ids) == count
    assert TokenClasses.none().count_text(ids) == len(texts)


@pytest.mark.parametrize("opening", ["#", "######", "```", "~~~", "---", "===", " ```", "----", "```python"])
def test_a_line_that_opens_a_block_separates(opening: str) -> None:
    classes = TokenClasses.of_texts(["word", "\n", opening])
    behind_a_line = np.array([0, 0, 1, 2, 0], np.uint32)
    within_a_line = np.array([0, 0, 2, 0, 0], np.uint32)
    assert classes.find_separators(behind_a_line).tolist() == [3]
    assert classes.find_separators(within_a_line).tolist() == []


@pytest.mark.parametrize("text", ["#tag", "#######", "``", "--", "=", "-", "word"])
def test_other_lines_separate_nothing(text: str) -> None:
    classes = TokenClasses.of_texts(["word", "\n", text])
    assert classes.find_separators(np.array([0, 0, 1, 2, 0], np.uint32)).tolist() == []
