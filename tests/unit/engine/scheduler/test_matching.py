"""Finding chunks by content: at any offset, the longest first, never by the anchor alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.core.layout import Codec
from kintsugi.core.plan import ChunkSource
from kintsugi.core.spaces import ANCHOR_TOKENS, ChunkKey, ChunkSpace, Span, anchors_of, token_bytes
from kintsugi.engine.scheduler import matching
from kintsugi.engine.scheduler.matching import (
    in_codecs,
    match_content,
    match_spans,
    without_prefix,
)
from kintsugi.store.client.ram import RamStore
from kintsugi.store.protocol.interface import Found
from tests.contracts.store_contract import SPACE, make_chunk


def store_of(*chunks: list[int]) -> RamStore:
    store = RamStore()
    for tokens in chunks:
        store.put(*make_chunk(tokens))
    return store


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from("abc")), max_size=6))
def test_every_known_chunk_is_found(layout: list[tuple[int, str]]) -> None:
    chunks = {"a": list(range(100, 140)), "b": list(range(300, 333)), "c": list(range(500, 600))}
    store = store_of(*chunks.values())
    prompt, expected = [], []
    for gap, name in layout:
        prompt += [7] * gap
        expected.append((len(prompt), len(prompt) + len(chunks[name])))
        prompt += chunks[name]
    assert [(span.start, span.end) for span in match_content(store, SPACE, prompt).spans] == expected


def test_the_longest_chunk_that_fits_wins() -> None:
    store = store_of(list(range(40)), list(range(90)), list(range(200)))
    match = match_content(store, SPACE, [9, *range(100), 9])
    assert [(span.start, span.end) for span in match.spans] == [(1, 91)]


def test_equal_anchors_with_other_tokens_behind_are_no_match() -> None:
    store = store_of(list(range(60)))
    prompt = [*range(ANCHOR_TOKENS), *range(1000, 1100)]
    assert match_content(store, SPACE, prompt).spans == ()


COMMON = list(range(5000, 5040))


@pytest.mark.parametrize(
    "make",
    [
        lambda number: [*COMMON, *range(10 * number, 10 * number + 50)],
        lambda number: [*range(10 * number, 10 * number + 50), *COMMON],
        lambda number: [*COMMON, number, *COMMON],
        lambda number: [*COMMON, *[7] * number, *COMMON],
    ],
    ids=["begin alike", "end alike", "begin and end alike", "differ in length alone"],
)
def test_all_of_many_chunks_that_are_alike_are_found(make: Callable[[int], list[int]]) -> None:
    chunks = [make(number) for number in range(200)]
    store = store_of(*chunks)
    for chunk in chunks:
        (span,) = match_content(store, SPACE, [9, *chunk, 9, 9]).spans
        assert (span.start, span.end) == (1, 1 + len(chunk))


def test_a_prompt_that_repeats_itself_is_compared_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = 0

    def key_of(space: ChunkSpace, token_ids: Sequence[int]) -> ChunkKey:
        nonlocal keys
        keys += 1
        return ChunkKey.in_space(space.digest, token_bytes(token_ids))

    store = store_of(*([7] * length for length in range(40, 80)))
    monkeypatch.setattr(matching, "CANDIDATES_MAX", 100)
    monkeypatch.setattr(ChunkKey, "of", staticmethod(key_of))
    match = match_content(store, SPACE, [7] * 1000)
    assert keys <= 100
    assert (match.spans[0].start, match.spans[0].end) == (0, 79)


def test_a_manifest_that_lies_about_its_anchor_is_no_match() -> None:
    store = RamStore()
    manifest, frames = make_chunk(list(range(60)))
    store.put(dataclasses.replace(manifest, anchors=anchors_of(range(500, 560))), frames)
    assert match_content(store, SPACE, list(range(500, 600))).spans == ()


def test_with_a_context_the_plain_copy_is_found_in_first_place_and_the_prepared_chunk_elsewhere() -> None:
    space = dataclasses.replace(SPACE, prefix_token_ids=(1, 2), context_token_ids=(3,))
    chunk = list(range(100, 140))
    prompt = [1, 2, *chunk, *chunk]
    prepared, plain = ChunkKey.of(space, chunk), ChunkKey.of(space.plain, chunk)
    for copies, expected in (
        ((space, space.plain), [(2, plain), (42, prepared)]),
        ((space,), [(42, prepared)]),
        ((space.plain,), [(2, plain)]),
    ):
        store = RamStore()
        for copy in copies:
            store.put(*make_chunk(chunk, copy))
        match = match_content(store, space, prompt)
        assert [(span.start, span.key) for span in match.spans] == expected
        assert set(match.manifests) == {key for _, key in expected}
    behind_another_prefix = match_content(store, space, [1, 9, *chunk])
    assert behind_another_prefix.spans == ()


def test_short_prompts_and_short_chunks_match_by_span_only() -> None:
    tokens = list(range(ANCHOR_TOKENS - 1))
    store = store_of(tokens)
    assert match_content(store, SPACE, tokens).spans == ()
    span = Span(0, len(tokens), ChunkKey.of(SPACE, tokens))
    assert list(match_spans(store, SPACE, [span]).manifests) == [span.key]


def test_chunks_in_codecs_that_nobody_calibrated_are_missed() -> None:
    tokens = list(range(40))
    span = Span(0, 40, ChunkKey.of(SPACE, tokens))
    match = match_spans(store_of(tokens), SPACE, [span])
    assert in_codecs(match, None) is match
    assert in_codecs(match, frozenset((Codec.RAW, Codec.INT8))) == match
    foreign = in_codecs(match, frozenset((Codec.INT8,)))
    assert (foreign.spans, foreign.manifests) == (match.spans, {})


def test_spans_keep_their_misses() -> None:
    known, unknown = list(range(40)), list(range(50, 90))
    spans = [Span(0, 40, ChunkKey.of(SPACE, known)), Span(40, 80, ChunkKey.of(SPACE, unknown))]
    match = match_spans(store_of(known), SPACE, spans)
    assert match.spans == tuple(spans)
    assert list(match.manifests) == [spans[0].key]


SHARED_SPACE = ChunkSpace(SPACE.fingerprint, "shared")


@pytest.mark.parametrize("name_key", [b"", bytes(range(32))], ids=["plain", "encrypted"])
def test_shared_chunks_are_used_where_the_own_space_has_none(name_key: bytes) -> None:
    own, theirs = list(range(100)), list(range(200, 300))
    shared_space = dataclasses.replace(SHARED_SPACE, name_key=name_key)
    store = store_of(own)
    manifest, frames = make_chunk(theirs, shared_space)
    store.put(dataclasses.replace(manifest, anchors=anchors_of(theirs, name_key)), frames)
    prompt = [9, *own, 9, *theirs, 9]
    for match in (
        match_content(store, SPACE, prompt, shared_space),
        match_spans(
            store,
            SPACE,
            [Span(1, 101, ChunkKey.of(SPACE, own)), Span(102, 202, ChunkKey.of(SPACE, theirs))],
            prompt,
            shared_space,
        ),
    ):
        assert [(span.start, span.end) for span in match.spans] == [(1, 101), (102, 202)]
        assert [span.key for span in match.spans] == [ChunkKey.of(SPACE, own), ChunkKey.of(SPACE, theirs)]
        found = [match.manifests[span.key] for span in match.spans if span.key is not None]
        assert [manifest.namespace for manifest in found] == [SPACE.namespace, "shared"]
        assert match.stored[ChunkKey.of(shared_space, theirs)].namespace == "shared"


def test_without_a_shared_space_nobody_elses_chunks_are_found() -> None:
    theirs = list(range(200, 300))
    store = store_of(list(range(100)))
    store.put(*make_chunk(theirs, SHARED_SPACE))
    assert match_content(store, SPACE, theirs).spans == ()
    assert match_spans(store, SPACE, [Span(0, 100, ChunkKey.of(SPACE, theirs))]).manifests == {}


class _Forgetful(RamStore):
    """Proposes chunks that it cannot deliver any more, as a shard whose bucket is out of reach."""

    def __init__(self, lost: list[ChunkKey]) -> None:
        super().__init__()
        self._lost = lost

    def find(self, namespace: str, keys: Sequence[ChunkKey]) -> list[Found | None]:
        source = ChunkSource("shard 1", "ssd0")
        found = super().find(namespace, keys)
        return [
            None if one is None or one.manifest.key in self._lost else Found(one.manifest, source)
            for one in found
        ]


def test_what_is_found_by_content_has_a_source_and_can_be_delivered() -> None:
    kept, lost = list(range(100, 180)), list(range(300, 380))
    store = _Forgetful([ChunkKey.of(SPACE, lost)])
    for tokens in (kept, lost):
        store.put(*make_chunk(tokens))
    match = match_content(store, SPACE, [7, *lost, *kept])
    assert [(span.start, span.end) for span in match.spans] == [(81, 161)]
    assert match.sources == {ChunkKey.of(SPACE, kept): ChunkSource("shard 1", "ssd0")}
    assert match.manifests.keys() == match.sources.keys()


def test_a_prompt_without_chunks_costs_no_second_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(list(range(100)))
    monkeypatch.delattr(RamStore, "lookup")
    assert match_content(store, SPACE, list(range(500, 600))).spans == ()


def test_offsets_limit_where_chunks_are_found() -> None:
    store = store_of(list(range(100, 140)), list(range(300, 340)))
    prompt = [7, *range(100, 140), 7, *range(300, 340)]
    found = match_content(store, SPACE, prompt, places=dict.fromkeys((0, 42, 500), len(prompt)))
    assert [(span.start, span.end) for span in found.spans] == [(42, 82)]


def test_the_end_of_its_text_limits_how_long_a_chunk_may_be() -> None:
    store = store_of(list(range(100, 140)), list(range(100, 300)))
    prompt = list(range(100, 400))
    for text_end, lengths in ((300, [200]), (199, [40]), (39, [])):
        found = match_content(store, SPACE, prompt, places={0: text_end})
        assert [span.num_tokens for span in found.spans] == lengths


@pytest.mark.parametrize(
    ("num_computed", "is_behind", "starts", "in_prefix"),
    [
        (0, True, [50, 150, 250], 0),
        (50, True, [50, 150, 250], 0),
        (64, True, [150, 250], 1),
        (150, True, [150, 250], 1),
        (208, True, [250], 2),
        (300, True, [], 3),
        (64, False, [50, 150, 250], 0),
        (208, False, [], 3),
    ],
)
def test_what_the_prefix_cache_holds_exactly_is_not_blended(
    num_computed: int, is_behind: bool, starts: list[int], in_prefix: int
) -> None:
    chunks = [list(range(1000 * index, 1000 * index + 80)) for index in (1, 2, 3)]
    prompt = [token for chunk in chunks for token in ([7] * 20 + chunk)]
    prompt = [7] * 30 + prompt
    match = match_content(store_of(*chunks), SPACE, prompt)
    assert [span.start for span in match.spans] == [50, 150, 250]
    kept = without_prefix(match, SPACE, prompt, num_computed, is_behind)
    assert [span.start for span in kept.spans] == starts
    assert kept.num_in_prefix == in_prefix


def test_a_chunk_in_first_place_is_as_exact_as_the_prefix_cache() -> None:
    space = dataclasses.replace(SPACE, prefix_token_ids=(1, 2))
    chunk, other = list(range(100, 180)), list(range(300, 380))
    prompt = [1, 2, *chunk, *other]
    store = RamStore()
    for tokens in (chunk, other):
        store.put(*make_chunk(tokens, space))
    match = match_content(store, space, prompt)
    assert without_prefix(match, space, prompt, 80, is_behind=True) is match
