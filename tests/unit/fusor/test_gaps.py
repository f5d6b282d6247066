"""Which positions do not pass with the question, and that a blend without them is right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.core.plan import ChunkHit
from kintsugi.core.request import SelectorName
from kintsugi.core.spaces import ChunkKey
from kintsugi.fusor.control.cost import PassWorkload, pass_work
from kintsugi.fusor.gaps import COPIED_PER_PASSED, GAP_TOKENS_MAX, find_left_out
from kintsugi.fusor.sliced import PassStatus
from tests.fakes.toy_stack import ToyStack
from tests.unit.fusor.test_blend import (
    LAYERS,
    LENGTH,
    assert_cache,
    begin,
    blended,
    finish,
    fresh_of,
    gaps_of,
    model,
    prompt,
    stack_until,
)

MAX = GAP_TOKENS_MAX


def hits(*spans: tuple[int, int]) -> list[ChunkHit]:
    return [ChunkHit(start, end, ChunkKey(bytes(32))) for start, end in spans]


def test_short_gaps_pass_whole() -> None:
    assert find_left_out(hits((MAX, 200), (200, 300), (300 + MAX, 500)), 0, 0) == []


def test_a_long_gap_keeps_its_beginning() -> None:
    gaps = find_left_out(hits((MAX + 1, 200), (500, 600)), 0, 0)
    assert gaps == [range(MAX, MAX + 1), range(200 + MAX, 500)]


def test_what_follows_the_last_hit_is_the_question() -> None:
    assert find_left_out(hits((0, 100)), 0, 0) == []


def test_what_the_engine_has_cached_is_no_gap() -> None:
    assert find_left_out(hits((300, 400)), 250, 0) == []
    assert find_left_out(hits((300, 400)), 300 - MAX - 5, 0) == [range(295, 300)]
    assert find_left_out(hits((300, 400), (410, 420)), 350, 0) == []


@pytest.mark.parametrize("cached", [0, 32, 250, 300])
def test_whether_a_prefix_is_cached_changes_nothing(cached: int) -> None:
    """A head of 300 tokens, which other prompts share, and a chunk that is missed behind it."""
    assert find_left_out(hits((700, 900)), cached, 300) == [range(300 + MAX, 700)]
    assert find_left_out(hits((310, 500), (700, 900)), cached, 310) == [range(500 + MAX, 700)]


def test_a_long_prefix_is_not_copied_for_a_few_tokens() -> None:
    prefix = 100 * COPIED_PER_PASSED
    few, many = (hits((prefix, prefix + 50), (prefix + 50 + MAX + n, prefix + 900)) for n in (99, 100))
    assert find_left_out(few, 0, prefix) == []
    assert sum(map(len, find_left_out(many, 0, prefix))) == 100


@given(
    cuts=st.lists(st.integers(0, 2000), min_size=2, max_size=12, unique=True).map(sorted),
    start=st.integers(0, 500),
)
def test_by_position(cuts: list[int], start: int) -> None:
    spans = [(first, end) for first, end in zip(cuts[::2], cuts[1::2], strict=False) if end > start]
    loaded = {position for span in spans for position in range(*span)}
    expected, since = [], 0
    for position in range(start, max(loaded, default=0)):
        since = 0 if position in loaded else since + 1
        if since > MAX:
            expected.append(position)
    assert [position for gap in find_left_out(hits(*spans), start, 0) for position in gap] == expected


@pytest.mark.parametrize("selector", [SelectorName.QUERY, SelectorName.HYBRID])
@pytest.mark.parametrize("start", [0, 8])
def test_a_long_gap_passes_once(selector: SelectorName, start: int) -> None:
    scene = prompt()
    plan = scene.plan(0.4, selector, query_layers=(1, 2))
    with gaps_of(2):
        left_out = find_left_out(plan.hits, start, plan.exact_end)
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
    plan = scene.plan(0.4, selector, query_layers=(1, 2))
    expected, _ = blended(scene, plan)
    stack = ToyStack(model())
    stack.sees_order_alone = False
    with gaps_of(2):
        work, _ = blended(scene, plan, stack)
        closed, _ = blended(scene, plan)
    assert work.tally.active_positions == expected.tally.active_positions
    assert work.tally.token_layers == expected.tally.token_layers > closed.tally.token_layers


@pytest.mark.parametrize("forgets", [False, True])
def test_what_is_left_out_changes_no_write_of_the_blend(forgets: bool) -> None:
    """The question's own cache is written besides."""
    scene = prompt()
    plan = scene.plan(0.15, SelectorName.QUERY, query_layers=(1, 2))
    stack = ToyStack(model())
    stack.forgets = forgets
    with gaps_of(2):
        blended(scene, plan, stack)
    assert stack.writes == [(layer, 42) for layer in range(LAYERS)]
