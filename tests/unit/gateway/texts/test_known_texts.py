from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.gateway.texts import known_texts
from kintsugi.gateway.texts.known_texts import (
    ALIKE_TRIED_MAX,
    WINDOW_CHARS,
    ChunkText,
    TextIndex,
    disjoint,
    window_hashes,
)

HEADERS = ("#" * WINDOW_CHARS, "file_path: /data/corpus/handbook/")
FOOTERS = ("", "-" * WINDOW_CHARS)


def text_of(text: str) -> ChunkText:
    known = ChunkText.of(text)
    assert known is not None
    return known


@given(st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_an_index_finds_what_it_holds_however_much_of_it_begins_alike(seed: int) -> None:
    generator = random.Random(seed)
    texts = sorted(
        {
            generator.choice(HEADERS) + str(generator.randrange(100)) * 20 + generator.choice(FOOTERS)
            for _ in range(generator.choice((4, 4 * ALIKE_TRIED_MAX)))
        }
    )
    index, held = TextIndex(), set()
    more = generator.choice((0.5, 0.7, 0.9))
    for _ in range(3 * len(texts)):
        text = generator.choice(texts)
        if generator.random() < more:
            index.add(text_of(text))
            held.add(text)
        else:
            index.remove(text_of(text))
            held.discard(text)
    message = " ".join(generator.sample(texts, min(5, len(texts))))
    expected = {
        (start, start + len(text))
        for text in held
        for start in range(len(message))
        if message.startswith(text, start)
    }
    assert set(index.matches(message, window_hashes(message))) == expected


def test_alike_chunks_that_a_text_does_not_hold_cost_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []
    digest = known_texts._digest

    def counted(text: str) -> bytes:
        digested.append(len(text))
        return digest(text)

    generator = random.Random(0)
    texts = [HEADERS[1] + generator.randbytes(30 + number % 9).hex() for number in range(3000)]
    index = TextIndex()
    for text in texts:
        index.add(text_of(text))
    monkeypatch.setattr(known_texts, "_digest", counted)
    shown = generator.sample(texts, 10)
    message = "\n".join(shown)
    spans = index.matches(message, window_hashes(message))
    assert [message[start:end] for start, end in spans] == shown
    assert digested == [len(text) for text in shown]
    digested.clear()
    hostile = (HEADERS[1] + texts[0][-WINDOW_CHARS:]) * 2000
    assert index.matches(hostile, window_hashes(hostile)) == []
    assert digested == []


@given(st.text(max_size=200), st.integers(0, 150))
@settings(deadline=None)
def test_a_windows_hash_does_not_depend_on_what_is_around_it(text: str, offset: int) -> None:
    hashes = window_hashes(text)
    assert len(hashes) == max(0, len(text) - WINDOW_CHARS + 1)
    if offset < len(hashes):
        assert hashes[offset] == window_hashes(text[offset : offset + WINDOW_CHARS])[0]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=9))
@settings(max_examples=200, deadline=None)
def test_disjoint_covers_as_much_as_any_choice(pairs: list[tuple[int, int]]) -> None:
    spans = [(start, start + length) for start, length in pairs]
    chosen = disjoint(spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(chosen))
    assert set(chosen) <= set(spans)
    best = 0
    for mask in range(1 << len(spans)):
        some = sorted(span for index, span in enumerate(spans) if mask >> index & 1)
        if all(a[1] <= b[0] for a, b in itertools.pairwise(some)):
            best = max(best, sum(end - start for start, end in some))
    assert sum(end - start for start, end in chosen) == best
