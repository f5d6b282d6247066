"""Prompts cut at their chunks, every piece tokenised alone."""

from __future__ import annotations

import tracemalloc
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi.core.request import FOUND_CHARS_MIN, SPANS_MAX, check_spans
from kintsugi.engine.openai.prompt import (
    SegmentTokenizer,
    TextPiece,
    cut_at_chunks,
    with_documents,
    with_whole_messages,
)
from kintsugi.precompute.chunking import Chunker
from tests.fakes.random_models.vocabulary import BOS_ID, train_tokenizer


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    return train_tokenizer(1024, 4096)


def pieces(text: str, *chunks: str) -> list[str]:
    """However short the chunks are."""
    return shown(cut_at_chunks(text, chunks, 0))


def shown(cut: list[TextPiece]) -> list[str]:
    return [f"[{piece.text}]" if piece.is_chunk else piece.text for piece in cut]


def test_every_occurrence_is_cut_out_the_longest_first() -> None:
    assert pieces("a bc d bc", "bc") == ["a ", "[bc]", " d ", "[bc]"]
    assert pieces("abcab", "ab", "abc") == ["[abc]", "[ab]"]
    assert pieces("aaaa", "aaa", "aa") == ["[aaa]", "a"]
    assert pieces("abc", "bcd", "") == ["abc"]
    assert pieces("", "x") == []


def test_a_short_chunk_is_one_only_where_it_was_marked() -> None:
    assert shown(cut_at_chunks("the sea\nthe\nthe end", ["the"])) == ["the sea\n", "[the]", "\nthe end"]
    assert shown(cut_at_chunks("the\nsea\nthe", ["the"])) == ["[the]", "\nsea\n", "[the]"]
    assert shown(cut_at_chunks("<doc>tea</doc>", ["tea"])) == ["<doc>", "[tea]", "</doc>"]
    assert shown(cut_at_chunks("the sea, the end", ["the"])) == ["the sea, the end"]
    assert shown(cut_at_chunks("no tea", ["the"])) == ["no tea"]
    long = "x" * FOUND_CHARS_MIN
    assert shown(cut_at_chunks(f"a{long}b{long}", [long])) == ["a", f"[{long}]", "b", f"[{long}]"]


def test_more_occurrences_than_spans_are_refused() -> None:
    with pytest.raises(InvalidField, match=str(SPANS_MAX)):
        cut_at_chunks("a" * (SPANS_MAX + 1), ["a"], 0)


def test_occurrences_beyond_the_bound_are_not_even_counted() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidField, match=str(SPANS_MAX)):
            cut_at_chunks("a" * (8 << 20), ["a"], 0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 << 20, "the text itself, and a bounded list"


@given(st.text("abc ", max_size=60), st.lists(st.text("abc ", min_size=1, max_size=6), max_size=5))
def test_pieces_make_up_the_text_and_chunks_are_chunks(text: str, chunks: list[str]) -> None:
    cut = cut_at_chunks(text, chunks, 0)
    assert "".join(piece.text for piece in cut) == text
    assert all(piece.text in chunks for piece in cut if piece.is_chunk)
    assert all(piece.text for piece in cut)
    assert any(piece.is_chunk for piece in cut) == any(chunk in text for chunk in chunks)


@settings(max_examples=50)
@given(
    st.text("salt and Sea.\n", max_size=40),
    st.lists(st.text("salt Sea.\n", min_size=FOUND_CHARS_MIN, max_size=50), max_size=4),
)
def test_a_chunk_has_the_ids_that_it_is_stored_under(gap: str, chunks: list[str]) -> None:
    text = gap.join(["System. ", *chunks, "What?"])
    segmented = SegmentTokenizer(tokenizer(), (BOS_ID,)).segment_text(text, chunks, add_special_tokens=True)
    check_spans(segmented.spans, len(segmented.token_ids))
    assert segmented.token_ids[0] == BOS_ID
    assert tokenizer().decode(segmented.token_ids[1:]) == text
    chunker = Chunker(tokenizer().backend_tokenizer)
    stored = {chunker.token_ids(chunk) for chunk in chunks}
    found = [tuple(segmented.token_ids[span.start : span.end]) for span in segmented.spans]
    assert all(ids in stored for ids in found)
    assert bool(found) == bool(chunks)


def test_without_chunks_the_ids_are_the_tokenizers_own() -> None:
    for special in (True, False):
        text = "Honey bees dance."
        segmented = SegmentTokenizer(tokenizer()).segment_text(text, [], special)
        assert segmented.token_ids == tokenizer()(text, add_special_tokens=special)["input_ids"]
        assert segmented.spans == ()


def test_a_prompt_begins_with_the_prefix_of_the_chunk_space() -> None:
    """Also where the tokenizer would join its end with what follows."""
    system = tuple(tokenizer()("You answer from the passages")["input_ids"])
    text = "You answer from the passages: salt."
    for special, rendered in ((True, text), (False, "<s>" + text)):
        segmented = SegmentTokenizer(tokenizer(), system).segment_text(rendered, ["salt."], special)
        assert tuple(segmented.token_ids[: len(system)]) == system
        assert tokenizer().decode(segmented.token_ids) == "<s>" + text
    other = SegmentTokenizer(tokenizer(), system).segment_text("Another system. salt.", ["salt."], True)
    assert tokenizer().decode(other.token_ids) == "<s>Another system. salt."


def test_documents_stand_before_the_last_question() -> None:
    documents = [{"text": "one"}, {"text": "two"}]
    asked = {"role": "user", "content": "why?"}
    body = with_documents({"documents": documents, "messages": [asked, asked]})
    assert body["messages"] == [asked, {"role": "user", "content": "one\n\ntwo\n\nwhy?"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "why?"}]}
    (message,) = with_documents({"documents": documents, "messages": [parts]})["messages"]
    assert [part["text"] for part in message["content"]] == ["one\n\ntwo\n\n", "why?"]


@pytest.mark.parametrize("message", ["hello", None, {"role": "user", "content": 5}])
def test_messages_that_are_none_are_left_to_the_engine(message: Any) -> None:
    asked = {"role": "user", "content": "why?"}
    messages = with_documents({"documents": [{"text": "one"}], "messages": [asked, message]})["messages"]
    assert messages[1] == message
    with pytest.raises(InvalidField, match="user message"):
        with_documents({"documents": [{"text": "one"}], "messages": ["hello"]})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "ab"),
        ([], ""),
    ],
)
def test_an_assistants_message_has_all_of_its_parts(content: list[Any], text: str) -> None:
    asked = {"role": "user", "content": [{"text": "q"}, {"text": "r"}]}
    said = {"role": "assistant", "content": content, "status": "incomplete", "id": None}
    part = {"type": "output_text", "text": text, "annotations": []}
    whole = {"role": "assistant", "type": "message", "content": [part], "status": "incomplete"}
    assert with_whole_messages([asked, said]) == [asked, whole]


@pytest.mark.parametrize(
    "items",
    [
        "text",
        None,
        [3, {}, {"role": "assistant", "content": "a"}],
    ],
)
def test_what_is_no_such_message_is_left_to_vllm(items: Any) -> None:
    assert with_whole_messages(items) == items


@pytest.mark.parametrize("part", ["a", {"text": 3}, {"type": "input_image", "image_url": "x"}])
def test_a_part_that_would_not_be_read_is_refused(part: Any) -> None:
    said = {"role": "assistant", "content": [{"text": "a"}, part]}
    with pytest.raises(InvalidField) as caught:
        with_whole_messages([3, said])
    assert caught.value.field == "input[1].content[1]"
