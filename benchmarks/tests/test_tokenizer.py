"""The bundled tokenizer: whole words of the testbed, bytes for the rest, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.testbed.generator import TASKS, Shape, eval_example, make_training_text
from benchmarks.testbed.tokenizer import BOS, EOS, build_tokenizer, build_vocabulary, piece_ids

TOKENIZER = build_tokenizer(4096)
VOCABULARY = build_vocabulary()


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False).input_ids
    return ids


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n\t", "pearls hid by her in attic.", "naïve Ünïcode 東京", "  leading", "a'b \x00 z"],
)
def test_awkward_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_is_the_concatenation_of_its_parts(task: str) -> None:
    for index in range(20):
        example = eval_example(task, index)
        parts = [token for text in (*example.chunks, example.question) for token in encode(text)]
        assert encode("".join(example.chunks) + example.question) == parts
        assert len(encode(" " + example.answer)) == 1


def test_pieces_are_tokens() -> None:
    pieces = make_training_text(3, Shape(), 384).pieces
    assert piece_ids(pieces, VOCABULARY) == encode("".join(pieces))


def test_special_tokens() -> None:
    assert TOKENIZER.bos_token == BOS
    assert TOKENIZER.eos_token == EOS
    assert TOKENIZER("She").input_ids[0] == VOCABULARY[BOS]
