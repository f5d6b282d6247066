"""The tokens of a context: the same for everybody who needs them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers
from transformers import AutoTokenizer

from kintsugi.core.errors import InvalidField, NotFound
from kintsugi.models.bundled import bundled_checkpoint
from kintsugi.models.context import (
    BUNDLED_TOKENS,
    CONTEXT_TOKENS_MAX,
    tokenize_context,
)
from kintsugi.models.passages import read_bundled_passages

MODEL = str(bundled_checkpoint())


def test_no_context_needs_no_tokenizer() -> None:
    assert tokenize_context("none", "no/model") == ()


def test_the_bundled_context_is_the_beginning_of_two_passages() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    first, second = (
        tuple(tokenizer(passage.text, add_special_tokens=False).input_ids)[:BUNDLED_TOKENS]
        for passage in read_bundled_passages()[:2]
    )
    assert tokenize_context("bundled", MODEL) == first + second == tokenize_context("corpus", MODEL)


def test_a_file_is_taken_whole_and_without_special_tokens(tmp_path: Path) -> None:
    text = "A passage of\r\nits own, about tea.\n"
    file = tmp_path / "context.txt"
    file.write_bytes(text.encode())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    expected = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    assert tokenize_context(str(file), MODEL) == expected


def test_what_is_no_context_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "context.txt"
    with pytest.raises(NotFound, match="`none`, `bundled`, `corpus` or a text file"):
        tokenize_context(str(file), MODEL)
    for content, message in (
        (b"", "has no tokens"),
        (b"\xff\xfe", "not UTF-8"),
        (b"word " * CONTEXT_TOKENS_MAX * 2, f"at most {CONTEXT_TOKENS_MAX}"),
    ):
        file.write_bytes(content)
        with pytest.raises(InvalidField, match=message):
            tokenize_context(str(file), MODEL)
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(InvalidField, match="more than 1048576 bytes"):
        tokenize_context(str(file), MODEL)
    file.write_text("a passage")
    with pytest.raises(NotFound, match="neither a checkpoint folder"):
        tokenize_context(str(file), str(tmp_path / "absent"))


def test_the_engines_arguments_choose_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model at a revision, or with code of its own, has no other tokenizer for its context."""
    asked: list[dict[str, object]] = []
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def load(path: str, **arguments: object) -> object:
        asked.append(arguments)
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    tokenize_context("bundled", MODEL, {"revision": "v2", "trust_remote_code": True, "dtype": "auto"})
    assert asked == [{"revision": "v2", "trust_remote_code": True}]
