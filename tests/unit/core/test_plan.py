"""Where exactness ends, and what a plan's digest depends on."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.errors import InvalidField
from kintsugi.core.plan import BlendPlan, ChunkHit, Selection, exact_end, plan_digest
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey, ChunkSpace, ModelFingerprint, Span

FINGERPRINT = ModelFingerprint.of({"weights": "plan"})
SPACE = ChunkSpace(FINGERPRINT, "acme", (1, 2))
BARE = ChunkSpace(FINGERPRINT, "acme")
PROMPT = [1, 2, *range(100, 118)]


@pytest.mark.parametrize(
    ("spans", "end"),
    [
        ([], 20),
        ([(2, 8)], 20),
        ([(2, 8), (8, 12)], 8),
        ([(2, 8), (10, 12)], 10),
        ([(3, 8)], 3),
        ([(3, 8), (8, 12)], 3),
        ([(0, 8)], 0),
    ],
)
def test_exactness_ends_at_the_first_chunk_that_saw_another_prefix(
    spans: list[tuple[int, int]], end: int
) -> None:
    assert exact_end([Span(*span) for span in spans], SPACE, PROMPT) == end


def test_behind_another_prefix_no_chunk_is_exact() -> None:
    assert exact_end([Span(2, 8)], SPACE, [1, 9, *PROMPT[2:]]) == 2


def test_without_a_prefix_a_chunk_at_the_start_is_exact() -> None:
    assert exact_end([Span(0, 5)], BARE, PROMPT) == 20
    assert exact_end([Span(0, 5), Span(5, 9)], BARE, PROMPT) == 5
    assert exact_end([Span(1, 5)], BARE, PROMPT) == 1


def test_with_a_context_only_a_plain_copy_is_exact() -> None:
    prepared = dataclasses.replace(SPACE, context_token_ids=(7, 7))
    plain = ChunkKey.of(SPACE, PROMPT[2:8])
    assert exact_end([Span(2, 8, plain)], prepared, PROMPT) == 20
    assert (
        exact_end([Span(2, 8, plain), Span(8, 12, ChunkKey.of(SPACE, PROMPT[8:12]))], prepared, PROMPT) == 8
    )
    assert exact_end([Span(2, 8, ChunkKey.of(prepared, PROMPT[2:8]))], prepared, PROMPT) == 2
    assert exact_end([Span(2, 8)], prepared, PROMPT) == 2


def test_every_argument_decides_the_digest() -> None:
    spans = [Span(2, 8), Span(8, 12)]
    digests = [
        plan_digest(SPACE, spans, Selection(0.15)),
        plan_digest(BARE, spans, Selection(0.15)),
        plan_digest(dataclasses.replace(SPACE, context_token_ids=(7,)), spans, Selection(0.15)),
        plan_digest(SPACE, spans[:1], Selection(0.15)),
        plan_digest(SPACE, [Span(2, 9), Span(9, 12)], Selection(0.15)),
        plan_digest(SPACE, spans, Selection(0.16)),
        plan_digest(SPACE, spans, Selection(0.15, SelectorName.HKVD_GRADUAL)),
        plan_digest(SPACE, spans, Selection(0.15, check_layer=2)),
        plan_digest(SPACE, spans, Selection(0.15, query_layers=(1,))),
        plan_digest(SPACE, spans, Selection(0.15, query_layers=(1, 2))),
        plan_digest(SPACE, [], Selection(0.15)),
        plan_digest(SPACE, spans, Selection(0.15), PROMPT),
        plan_digest(SPACE, spans, Selection(0.15), PROMPT[:-1]),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}


def test_equal_ratios_have_one_digest() -> None:
    one = {plan_digest(SPACE, [], Selection(ratio)) for ratio in (1, 1.0)}
    zero = {plan_digest(SPACE, [], Selection(ratio)) for ratio in (0, 0.0, -0.0)}
    assert len(one) == len(zero) == 1


def test_a_key_beside_a_span_changes_nothing() -> None:
    """The block hashes that the digest is mixed into cover the tokens already."""
    with_key = [Span(2, 8, ChunkKey(bytes(32)))]
    selection = Selection(0.1)
    assert plan_digest(SPACE, with_key, selection) == plan_digest(SPACE, [Span(2, 8)], selection)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6, unique=True))
def test_no_two_ratios_share_a_digest(ratios: list[float]) -> None:
    digests = {plan_digest(SPACE, [Span(2, 8)], Selection(ratio)) for ratio in ratios}
    assert len(digests) == len(ratios)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio", -0.1),
        ("ratio", float("nan")),
        ("ratio", 1.5),
        ("check_layer", -1),
        ("query_layers", (-1,)),
        ("query_layers", (2, 1)),
        ("query_layers", (1, 1)),
    ],
)
def test_an_impossible_selection_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidField) as raised:
        dataclasses.replace(Selection(0.15), **{field: value})  # type: ignore[arg-type]
    assert raised.value.field == field


def test_repeated_query_layers_are_refused_with_what_is_valid() -> None:
    with pytest.raises(InvalidField, match="different layers in ascending order, from 0"):
        Selection(0.15, query_layers=(1, 1))


def test_without_misses_chunks_and_keeps_the_rest() -> None:
    keys = [ChunkKey(bytes([i]) * 32) for i in range(2)]
    hits = tuple(
        ChunkHit(start, start + 5, key) for start, key in zip((0, 5, 10), itertools.cycle(keys), strict=False)
    )
    plan = BlendPlan(hits, Selection(0.15), exact_end=5)
    assert plan.without(frozenset()) == plan
    assert plan.without(frozenset(keys[:1])) == dataclasses.replace(plan, hits=hits[1:2])
    assert plan.without(frozenset(keys)).hits == ()
    assert hits[0].num_tokens == 5
