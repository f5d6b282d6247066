"""Which positions do not pass with the question, and that a blend without them is right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.plan import BlendPlan, ChunkHit
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor.control.cost import PassWorkload, pass_work
from kintsugi.fusor.gaps import COPIED_PER_PASSED, KEPT_TOKENS, find_left_out, find_question
from kintsugi.fusor.sliced import PassStatus
from tests.fakes.toy_chunks import ToyPrompt
from tests.fakes.toy_stack import ToyStack
from tests.unit.fusor.test_blend import (
    LAYERS,
    LENGTH,
    assert_cache,
    begin,
    blended,
    finish,
    fresh_of,
    kept_of,
    model,
    prompt,
    stack_until,
)

KEPT = KEPT_TOKENS


def hits(*spans: tuple[int, int]) -> list[ChunkHit]:
    return [ChunkHit(start, end, ChunkKey(bytes(32))) for start, end in spans]


def chunks(*spans: tuple[int, int]) -> list[range]:
    return [range(*span) for span in spans]


def test_text_that_is_no_chunk_passes_whole() -> None:
    assert find_left_out(hits((1000, 1100), (5000, 5100)), chunks((1000, 1100), (5000, 5100)), 0, 0) == []
    assert find_left_out(hits((1000, 1100), (5000, 5100)), [], 0, 0) == []


def test_a_missed_chunk_keeps_its_beginning_wherever_it_stands() -> None:
    """Before the first hit, between two, and behind the last."""
    known = chunks((0, 200), (200, 300), (300, 500), (500, 600), (600, 900))
    loaded = hits((200, 300), (500, 600))
    expected = [range(KEPT, 200), range(300 + KEPT, 500), range(600 + KEPT, 900)]
    assert find_left_out(loaded, known, 0, 0) == expected
    assert find_question(loaded, known) == 900


def test_a_short_chunk_passes_whole() -> None:
    assert find_left_out(hits((KEPT, 200)), chunks((0, KEPT), (KEPT, 200)), 0, 0) == []


def test_a_chunk_of_which_a_part_is_loaded_is_not_missed() -> None:
    """The engine's prefix cache holds its beginning."""
    assert find_left_out(hits((150, 300)), chunks((0, 300)), 150, 0) == []


def test_what_the_engine_has_cached_is_not_left_out() -> None:
    known = chunks((0, 300), (300, 400))
    assert find_left_out(hits((300, 400)), known, 250, 0) == [range(250, 300)]
    assert find_left_out(hits((300, 400)), known, 300, 0) == []


def test_what_follows_the_last_hit_is_the_question_where_no_chunk_is_known() -> None:
    assert find_question(hits((0, 100)), []) == 100
    assert find_question(hits((0, 100)), chunks((0, 100))) == 100


def test_a_long_prefix_or_many_hits_are_not_copied_for_a_few_tokens() -> None:
    few = COPIED_PER_PASSED * 100
    for prefix, loaded in ((few, 50), (0, few + 50)):
        first = (prefix, prefix + loaded)
        for inside, is_left_out in ((99, False), (102, True)):
            second = (first[1], first[1] + KEPT + inside)
            left_out = find_left_out(hits(first), chunks(first, second), 0, prefix)
            assert bool(left_out) is is_left_out


@given(
    cuts=st.lists(st.integers(0, 2000), min_size=2, max_size=12, unique=True).map(sorted),
    loads=st.lists(st.booleans(), min_size=6, max_size=6),
    start=st.integers(0, 500),
)
def test_by_position(cuts: list[int], loads: list[bool], start: int) -> None:
    spans = [(first, end) for first, end in zip(cuts[::2], cuts[1::2], strict=False) if end > start]
    loaded = [span for span, is_loaded in zip(spans, loads, strict=False) if is_loaded]
    expected = [
        position
        for first, end in spans
        for position in range(max(first + KEPT, start), end)
        if (first, end) not in loaded
    ]
    if COPIED_PER_PASSED * len(expected) < sum(end - first for first, end in loaded):
        expected = []
    left_out = find_left_out(hits(*loaded), chunks(*spans), start, 0)
    assert [position for gap in left_out for position in gap] == expected


def plan_of(scene: ToyPrompt, ratio: float, selector: SelectorName) -> BlendPlan:
    """What lies between the chunks of the scene are chunks that were missed."""
    plan = scene.plan(ratio, selector, query_layers=(1, 2))
    places = [0, *(place for hit in plan.hits for place in (hit.start, hit.end))]
    known = [range(first, end) for first, end in pairwise(places) if end > first]
    return replace(plan, chunks=tuple(known))


@pytest.mark.parametrize("selector", [SelectorName.QUERY, SelectorName.HYBRID])
@pytest.mark.parametrize("start", [0, 8])
def test_a_long_gap_passes_once(selector: SelectorName, start: int) -> None:
    scene = prompt()
    plan = plan_of(scene, 0.4, selector)
    with kept_of(2):
        left_out = find_left_out(plan.hits, plan.chunks, start, plan.exact_end)
        work, stack = begin(scene, plan, stack_until(scene, start), start=start)
        assert finish(work) is PassStatus.DONE
    spared = sum(map(len, left_out))
    assert spared >= 3
    hit = sum(hit.end - max(hit.start, start) for hit in plan.hits)
    other = LENGTH - start - hit
    workload = PassWorkload(hit, other, LAYERS, stack.projection_share, left_out_tokens=spared)
    assert pass_work(plan.selection, workload).token_layers == pytest.approx(work.tally.token_layers)
    fresh = {layer: [*range(start), *positions] for layer, positions in fresh_of(work, 1).items()}
    expected = model().dense(scene.token_ids, fresh=fresh, loaded=scene.loaded)
    assert_cache(stack, expected.keys, expected.values, 1e-5)


@pytest.mark.parametrize("selector", [SelectorName.QUERY, SelectorName.HYBRID])
def test_where_distances_count_everything_passes(selector: SelectorName) -> None:
    scene = prompt()
    plan = plan_of(scene, 0.4, selector)
    expected, _ = blended(scene, plan)
    stack = ToyStack(model())
    stack.sees_order_alone = False
    with kept_of(2):
        work, _ = blended(scene, plan, stack)
        closed, _ = blended(scene, plan)
    assert work.tally.active_positions == expected.tally.active_positions
    assert work.tally.token_layers == expected.tally.token_layers > closed.tally.token_layers


@pytest.mark.parametrize("forgets", [False, True])
def test_what_is_left_out_changes_no_write_of_the_blend(forgets: bool) -> None:
    """The question's own cache is written besides."""
    scene = prompt()
    plan = plan_of(scene, 0.15, SelectorName.QUERY)
    stack = ToyStack(model())
    stack.forgets = forgets
    with kept_of(2):
        blended(scene, plan, stack)
    assert stack.writes == [(layer, 42) for layer in range(LAYERS)]
