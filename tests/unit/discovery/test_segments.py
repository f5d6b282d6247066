"""Boundaries of segments: where they fall, and what moves them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.core.plan import PromptChunk, RagPrompt
from kintsugi.core.spaces import TokenIds
from kintsugi.discovery.segments import (
    BLOCK_TOKENS_MIN,
    REACH_TOKENS,
    TOKENS_MAX,
    TOKENS_MIN,
    WHOLE_TOKENS_MAX,
    cut_chunks,
    find_boundaries,
    find_segments,
)
from kintsugi.discovery.token_classes import TokenClasses

TEXTS = ["<s>", "<end>", "\n", "\n\n", ".\n\n", "##", "```", *[f"w{i}" for i in range(993)]]
BOS, END, LINE, BLANK, STOP_BLANK, HEADING, FENCE = range(7)
WORDS_FROM = 7
CLASSES = TokenClasses.of_texts(TEXTS, special_ids=[BOS, END])


def words(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(WORDS_FROM, len(TEXTS)) for _ in range(count)]


def boundaries(ids: list[int]) -> list[int]:
    return find_boundaries(np.array(ids, np.uint32), CLASSES).tolist()


def pieces(ids: list[int]) -> list[tuple[int, ...]]:
    found = find_segments(TokenIds.of(ids), CLASSES)
    return [tuple(ids[one.start : one.end]) for one in found]


@st.composite
def documents(draw: st.DrawFn, paragraphs_max: int = 30) -> list[int]:
    """Paragraphs of all lengths between separators of all kinds."""
    separators = [[LINE, LINE], [BLANK], [STOP_BLANK], [LINE, HEADING], [LINE, FENCE, LINE], [END, LINE, BOS]]
    seed = draw(st.integers(0, 1 << 30))
    sizes = draw(st.lists(st.sampled_from([1, 5, 20, 60, 70, 120, 130, 300, 900]), max_size=paragraphs_max))
    generator = random.Random(seed)
    ids: list[int] = []
    for index, size in enumerate(sizes):
        ids += words(size, seed + index) + generator.choice(separators)
    return ids


@given(documents())
@settings(deadline=None)
def test_segments_are_disjoint_and_neither_too_short_nor_too_long(ids: list[int]) -> None:
    found = find_segments(TokenIds.of(ids), CLASSES)
    assert all(TOKENS_MIN <= one.num_tokens <= TOKENS_MAX for one in found)
    assert all(one.end <= other.start for one, other in pairwise(found))
    assert all(one.start >= 0 and one.end <= len(ids) for one in found)


@given(documents(), documents(paragraphs_max=3), st.floats(0, 1))
@settings(deadline=None)
def test_an_insertion_moves_no_boundary_out_of_reach(
    ids: list[int], inserted: list[int], where: float
) -> None:
    at = int(where * len(ids))
    before = boundaries(ids)
    after = boundaries(ids[:at] + inserted + ids[at:])
    shift = len(inserted)
    assert [one for one in before if one < at - REACH_TOKENS] == [
        one for one in after if one < at - REACH_TOKENS
    ]
    assert [one + shift for one in before if one > at + REACH_TOKENS] == [
        one for one in after if one > at + shift + REACH_TOKENS
    ]


@given(documents(), documents(), st.integers(BLOCK_TOKENS_MIN, 700))
@settings(deadline=None)
def test_a_passage_is_cut_alike_whatever_stands_around_it(
    before: list[int], behind: list[int], size: int
) -> None:
    passage = [*words(size, size), STOP_BLANK]
    alone = pieces(passage)
    assert sum(map(len, alone)) == len(passage)
    around = pieces([*before, BLANK, *passage, *words(5, 1), *behind])
    assert set(alone) <= set(around)


@given(st.integers(0, len(TEXTS) - 1), st.integers(1, 10_000))
@settings(deadline=None)
def test_one_token_repeated_is_cut_at_the_maximum(token: int, count: int) -> None:
    found = find_segments(TokenIds.of([token] * count), CLASSES)
    assert all(TOKENS_MIN <= one.num_tokens <= TOKENS_MAX for one in found)
    assert len(set(pieces([token] * count))) <= 2
    assert sum(one.num_tokens for one in found) > count - TOKENS_MIN


@pytest.mark.parametrize("size", [BLOCK_TOKENS_MIN, 200, WHOLE_TOKENS_MAX])
def test_a_passage_of_the_usual_size_stays_whole(size: int) -> None:
    passages = [[*words(size - 1, seed), STOP_BLANK] for seed in range(5)]
    assert pieces([one for passage in passages for one in passage]) == [tuple(one) for one in passages]


def test_plain_text_is_cut_into_segments_of_about_256() -> None:
    sizes = np.diff(boundaries(words(200_000, seed=3)))
    assert 230 <= sizes.mean() <= 280
    assert np.percentile(sizes, 95) <= 512
    assert sizes.min() >= BLOCK_TOKENS_MIN


def test_short_paragraphs_are_joined() -> None:
    ids = [one for index in range(300) for one in (*words(19, index), STOP_BLANK)]
    sizes = np.diff(boundaries(ids))
    assert sizes.min() >= TOKENS_MIN
    assert 100 <= sizes.mean() <= 300
    assert all(one % 20 == 0 for one in boundaries(ids))


def test_the_content_of_messages_begins_and_ends_segments() -> None:
    content, answer = words(200, 1), words(150, 2)
    header = [BOS, *words(1, 3), LINE]
    ids = [*header, *content, END, LINE, *header, *answer, END, LINE]
    first, second = len(header), 2 * len(header) + len(content) + 2
    assert {first, first + len(content), second, second + len(answer)} <= set(boundaries(ids))


@pytest.mark.parametrize(
    ("separator", "at"),
    [
        ([LINE, LINE], 2),
        ([BLANK], 1),
        ([BLANK, LINE], 2),
        ([LINE, HEADING], 1),
        ([LINE, FENCE], 1),
        ([END], 0),
        ([LINE], None),
        ([HEADING], None),
    ],
)
def test_what_separates(separator: list[int], at: int | None) -> None:
    ids = [*words(10, 1), *separator, *words(10, 2)]
    found = CLASSES.find_separators(np.array(ids, np.uint32)).tolist()
    assert found[:1] == ([] if at is None else [10 + at])


def test_ids_outside_the_vocabulary_have_no_class() -> None:
    ids = np.array([1 << 31] * 300, np.uint32)
    assert not len(CLASSES.find_separators(ids))
    assert not len(TokenClasses.none().find_separators(ids))


def test_a_prefix_is_left_out() -> None:
    ids = TokenIds.of([BOS, *words(300, 1)])
    assert find_segments(ids, CLASSES, offset=1)[0].start == 1


def test_chunks_are_cut_into_segments_and_no_token_is_lost() -> None:
    title, passage, end = words(5, 1), words(200, 2), words(30, 3)
    chunk = (*title, BLANK, *passage, BLANK, *end)
    separator = tuple(words(3, 4))
    prompt = RagPrompt((BOS,), (PromptChunk("one", chunk), PromptChunk("two", chunk, separator)), (END, 9))
    cut = cut_chunks(prompt, CLASSES)
    segment = (*passage, BLANK)
    assert cut.chunks == (
        PromptChunk("one", segment, (*title, BLANK)),
        PromptChunk("two", segment, (*end, *separator, *title, BLANK)),
    )
    assert cut.question == (*end, END, 9)
    assert cut.token_ids == prompt.token_ids


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans(), st.integers(0, 9)), min_size=1, max_size=5))
def test_cutting_chunks_changes_no_prompt(sizes: list[tuple[int, bool, int]]) -> None:
    chunks = tuple(
        PromptChunk("", (*words(size, seed), *([BLANK] if ends else [])), (LINE,) * (seed % 3))
        for size, ends, seed in sizes
    )
    prompt = RagPrompt((BOS,), chunks, (END,))
    cut = cut_chunks(prompt, CLASSES)
    assert cut.token_ids == prompt.token_ids
    assert all(TOKENS_MIN <= len(chunk.token_ids) <= TOKENS_MAX for chunk in cut.chunks)
    assert [cut.token_ids[span.start : span.end] for span in cut.spans] == [
        list(chunk.token_ids) for chunk in cut.chunks
    ]
