"""Prompts are put together from chunks as they were stored, and bad files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.cli.session import CHUNK_BYTES_MAX, Asked, build_prompt, read_chunk
from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.core.spaces import Span
from kintsugi.models.prompt_form import PromptForm
from tests.unit.cli.fakes import PROMPT, FakeTokenizer


def test_spans_tile_the_prompt_between_prefix_and_question() -> None:
    assert PROMPT.token_ids == [0, 10, 11, 12, 20, 21, 30, 31]
    assert PROMPT.spans == (Span(1, 4), Span(4, 6))
    assert PROMPT.warm_up == [0, 10, 11, 12]


def test_chunks_are_tokenised_alone() -> None:
    form = PromptForm.of(FakeTokenizer())
    prompt = build_prompt(form, Asked([("a", "one two"), ("b", "three")], "why?"))
    assert prompt.prefix == (0,)
    assert [chunk.token_ids for chunk in prompt.chunks] == [(5, 5), (7,)]
    assert prompt.question == (11, 6, 9)


def test_nothing_to_ask_is_refused() -> None:
    form = PromptForm.of(FakeTokenizer())
    with pytest.raises(InvalidField, match="question"):
        build_prompt(form, Asked([("a", "one two")], "  "))
    with pytest.raises(InvalidField, match="0 chunks"):
        build_prompt(form, Asked([], "why?"))


def test_a_chunk_file_is_named_in_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="absent"):
        read_chunk(tmp_path / "absent")
    binary, empty, large = (tmp_path / name for name in ("binary", "empty", "large"))
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text(" \n")
    large.write_bytes(b"a" * (CHUNK_BYTES_MAX + 1))
    for path in (binary, empty, large):
        with pytest.raises(InvalidField, match=path.name):
            read_chunk(path)
    good = tmp_path / "good.txt"
    good.write_text("Prose.")
    assert read_chunk(good) == ("good.txt", "Prose.\n")
