"""The blend pass on a toy decoder against the same decoder run densely."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.plan import BlendPlan
from kintsugi.core.request import SelectorName
from kintsugi.fusor.blend import BlendPass, PassRegion
from kintsugi.fusor.control.cost import PassWorkload, pass_work
from kintsugi.fusor.loader import Frames
from kintsugi.fusor.selectors import quota
from kintsugi.fusor.sliced import WAITING, PassStatus
from kintsugi.store.client.directory import ShardAddress
from kintsugi.store.client.merge import ShardStream, merge_streams
from tests.fakes.toy_chunks import Gate, ToyPrompt
from tests.fakes.toy_stack import HEAD_DIM, VOCAB, ToyModel, ToyStack

LENGTH = 60
SPANS = ((5, 20), (20, 33), (38, 52))
"""Two that touch, a gap, and a question of eight tokens."""
NEXT = 7
"""The token behind the prompt."""
LAYERS = 4
EVERY_SELECTOR = list(SelectorName)
WITHOUT_DEVIATION = (
    SelectorName.RANDOM,
    SelectorName.CHUNK_HEAD,
    SelectorName.QUERY,
)
STEPS_MAX = 100_000


@functools.cache
def model() -> ToyModel:
    return ToyModel(LAYERS)


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def prompt(spans: tuple[tuple[int, int], ...] = SPANS) -> ToyPrompt:
    return ToyPrompt(model(), tokens(), spans)


def begin(
    scene: ToyPrompt,
    plan: BlendPlan,
    stack: ToyStack | None = None,
    unit: int = 1000,
    start: int = 0,
    end: int = LENGTH,
) -> tuple[BlendPass, ToyStack]:
    stack = stack or ToyStack(model())
    work = BlendPass(
        PassRegion(scene.token_ids[start:end], start, int(scene.token_ids[end]) if end < LENGTH else NEXT),
        plan,
        stack,
        lambda plan: scene.open_loader(plan, start, end),
        unit_tokens_max=unit,
        explain=True,
    )
    return work, stack


def finish(work: BlendPass) -> PassStatus:
    for _ in range(STEPS_MAX):
        if work.status is not PassStatus.RUNNING:
            break
        work.advance(float("inf"))
    work.close()
    return work.status


def blended(
    scene: ToyPrompt, plan: BlendPlan, stack: ToyStack | None = None, unit: int = 1000
) -> tuple[BlendPass, ToyStack]:
    work, stack = begin(scene, plan, stack, unit)
    assert finish(work) is PassStatus.DONE
    assert stack.open_layer is None
    return work, stack


def stack_until(scene: ToyPrompt, end: int) -> ToyStack:
    """A cache that holds the prompt's beginning, as a full prefill leaves it."""
    stack, full = ToyStack(model()), model().dense(scene.token_ids)
    stack.keys[:, 0, :end], stack.values[:, 0, :end] = full.keys[:, :end], full.values[:, :end]
    stack.written[:, 0, :end] = True
    return stack


@contextmanager
def kept_of(tokens: int) -> Iterator[None]:
    """So many tokens of a missed chunk pass with the question."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kintsugi.fusor.gaps.KEPT_TOKENS", tokens)
        yield


def cache_of(stack: ToyStack, end: int = LENGTH) -> tuple[Tensor, Tensor]:
    assert bool(stack.written[:, 0, :end].all())
    return stack.keys[:, 0, :end], stack.values[:, 0, :end]


def assert_cache(stack: ToyStack, key: Tensor, value: Tensor, tolerance: float) -> None:
    got_key, got_value = cache_of(stack, key.shape[1])
    assert float((got_key - key).abs().max()) <= tolerance
    assert float((got_value - value).abs().max()) <= tolerance


def assert_cache_until(stack: ToyStack, key: Tensor, value: Tensor) -> None:
    """The first positions are exact, to what storing in fp32 leaves."""
    got_key, got_value = cache_of(stack)
    assert float((got_key[:, : key.shape[1]] - key).abs().max()) <= 1e-4
    assert float((got_value[:, : key.shape[1]] - value).abs().max()) <= 1e-4


def measures_at(selector: str, layer: int, check_layer: int, ratio: float) -> bool:
    if not 0 < ratio < 1 or selector in WITHOUT_DEVIATION:
        return False
    check_layer = min(check_layer, LAYERS - 1)
    return layer >= check_layer if selector is SelectorName.HKVD_GRADUAL else layer == check_layer


def fresh_of(work: BlendPass, check_layer: int) -> dict[int, list[int]]:
    """Positions with fresh K and V per layer, from what the pass explains of itself."""
    active = work.tally.active_positions
    fresh = {}
    for layer, positions in active.items():
        selection = work.plan.selection
        measured = measures_at(selection.selector, layer, check_layer, selection.ratio)
        before = active[layer - 1] if layer else list(range(LENGTH))
        fresh[layer] = before if measured else positions
    return fresh


@pytest.mark.parametrize("selector", EVERY_SELECTOR)
@pytest.mark.parametrize("unit", [7, 1000])
def test_ratio_1_is_a_full_prefill(selector: SelectorName, unit: int) -> None:
    scene = prompt()
    work, stack = blended(scene, scene.plan(1.0, selector), unit=unit)
    full = model().dense(scene.token_ids)
    assert_cache(stack, full.keys, full.values, 1e-9)
    assert work.tally.tokens_recomputed == work.tally.tokens_hit == 42


def test_ratio_0_is_full_reuse() -> None:
    scene = prompt()
    work, stack = blended(scene, scene.plan(0.0))
    must = [p for p in range(LENGTH) if not any(start <= p < end for start, end in SPANS)]
    assert work.tally.active_positions == dict.fromkeys(range(LAYERS), must)
    expected = model().dense(scene.token_ids, fresh=dict.fromkeys(range(LAYERS), must), loaded=scene.loaded)
    assert_cache(stack, expected.keys, expected.values, 1e-5)
    assert work.tally.tokens_recomputed == 0
    full = model().dense(scene.token_ids)
    assert float((expected.keys - full.keys).abs().max()) > 0.1, "the test would not see a difference"


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_chunk_behind_its_own_prefix_is_exact(ratio: float) -> None:
    scene = prompt(((2, 45),))
    _, stack = blended(scene, scene.plan(ratio))
    full = model().dense(scene.token_ids)
    assert_cache(stack, full.keys, full.values, 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    selector=st.sampled_from(EVERY_SELECTOR),
    ratio=st.sampled_from([0.0, 0.01, 0.15, 0.5, 0.9, 1.0]),
    check_layer=st.integers(0, LAYERS),
    cuts=st.lists(st.integers(1, LENGTH), min_size=2, max_size=8, unique=True).map(sorted),
    unit=st.integers(1, 70),
    kept=st.integers(1, 20),
)
def test_any_blend_is_the_dense_blend(
    selector: SelectorName, ratio: float, check_layer: int, cuts: list[int], unit: int, kept: int
) -> None:
    spans = tuple(itertools.pairwise(cuts))[::2]
    scene = prompt(spans)
    missed = tuple(range(first, end) for first, end in itertools.pairwise(cuts))
    plan = replace(scene.plan(ratio, selector, check_layer), chunks=missed)
    with kept_of(kept):
        work, stack = blended(scene, plan, unit=unit)
    fresh = fresh_of(work, min(check_layer, LAYERS - 1))
    expected = model().dense(scene.token_ids, fresh=fresh, loaded=scene.loaded)
    assert_cache(stack, expected.keys, expected.values, 1e-5)


@settings(max_examples=20, deadline=None)
@given(selector=st.sampled_from(EVERY_SELECTOR), unit=st.integers(1, 59))
def test_units_of_any_size_give_the_same(selector: SelectorName, unit: int) -> None:
    scene = prompt()
    whole, one = blended(scene, scene.plan(0.2, selector))
    cut, many = blended(scene, scene.plan(0.2, selector), unit=unit)
    assert cut.tally.active_positions == whole.tally.active_positions
    assert cut.tally.token_layers == pytest.approx(whole.tally.token_layers)
    assert_cache(many, *cache_of(one), 1e-12)
    assert max(count for _, _, count in many.calls) <= unit


def test_hkvd_keeps_the_most_deviating_tokens() -> None:
    scene = prompt()
    work, _ = blended(scene, scene.plan(0.2, SelectorName.HKVD))
    full = model().dense(scene.token_ids)
    key, value = scene.loaded(1)
    by_key = (full.keys[1] - key).square().sum((1, 2))
    by_value = (full.values[1] - value).square().sum((1, 2))
    hit = torch.tensor([any(start <= p < end for start, end in SPANS) for p in range(LENGTH)])
    best = (by_key + by_value).masked_fill(~hit, -1).topk(quota(0.2, 42)).indices
    expected = sorted({*best.tolist(), *(~hit).nonzero()[:, 0].tolist()})
    assert work.tally.active_positions[1] == expected
    assert work.tally.active_positions[LAYERS - 1] == expected
    assert work.tally.active_positions[0] == list(range(LENGTH))


@pytest.mark.parametrize("selector", [SelectorName.HKVD, SelectorName.RANDOM])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_a_later_token_changes_nothing_before_it(selector: SelectorName, ratio: float) -> None:
    scene, changed = prompt(), prompt()
    changed.token_ids[57] = (changed.token_ids[57] + 1) % VOCAB
    one, before = blended(scene, scene.plan(ratio, selector))
    two, after = blended(changed, changed.plan(ratio, selector))
    assert one.tally.active_positions == two.tally.active_positions
    assert torch.equal(before.keys[:, 0, :57], after.keys[:, 0, :57])
    assert torch.equal(before.values[:, 0, :57], after.values[:, 0, :57])
    assert not torch.equal(before.values[:, 0, 57:LENGTH], after.values[:, 0, 57:LENGTH])


def test_behind_an_exact_prefix_hit() -> None:
    """Positions before the region are in the cache already; a chunk may begin among them."""
    scene, start = prompt(), 12
    full = model().dense(scene.token_ids)
    stack = ToyStack(model())
    stack.keys[:, 0, :start], stack.values[:, 0, :start] = full.keys[:, :start], full.values[:, :start]
    stack.written[:, 0, :start] = True
    work, stack = begin(scene, scene.plan(0.0), stack, start=start, end=LENGTH - 1)
    assert finish(work) is PassStatus.DONE
    must = [p for p in range(LENGTH) if p < start or not any(a <= p < b for a, b in SPANS)]
    expected = model().dense(scene.token_ids, fresh=dict.fromkeys(range(LAYERS), must), loaded=scene.loaded)
    assert_cache(stack, expected.keys[:, : LENGTH - 1], expected.values[:, : LENGTH - 1], 1e-5)
    assert not bool(stack.written[:, 0, LENGTH - 1].any())
    assert work.tally.tokens_hit == 42 - (start - 5)
    assert work.tally.active_positions[0] == [p for p in must if start <= p < LENGTH - 1]


def test_nothing_but_hits_and_ratio_0_computes_nothing() -> None:
    scene = prompt(((0, 31), (31, LENGTH)))
    work, stack = blended(scene, scene.plan(0.0))
    assert stack.calls == []
    assert work.tally.token_layers == 0
    keys, values = (torch.stack(kv) for kv in zip(*map(scene.loaded, range(LAYERS)), strict=True))
    assert_cache(stack, keys, values, 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    selector=st.sampled_from(EVERY_SELECTOR),
    ratio=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    check_layer=st.integers(0, LAYERS - 1),
    unit=st.integers(5, 70),
)
def test_the_tally_is_the_cost_formula(
    selector: SelectorName, ratio: float, check_layer: int, unit: int
) -> None:
    scene = prompt()
    plan = scene.plan(ratio, selector, check_layer, query_layers=(1, 2))
    work, stack = blended(scene, plan, unit=unit)
    must, hit = LENGTH - 42, 42
    active = [len(work.tally.active_positions[layer]) for layer in range(LAYERS)]
    if selector not in (SelectorName.HKVD_GRADUAL, SelectorName.HYBRID):
        full_width = 0 if selector in WITHOUT_DEVIATION or not 0 < ratio < 1 else check_layer
        kept = quota(ratio, hit)
        assert sum(active) == LAYERS * must + full_width * hit + (LAYERS - full_width) * kept
    measured = [
        LENGTH if layer == 0 else active[layer - 1]
        for layer in range(LAYERS)
        if measures_at(selector, layer, check_layer, ratio)
    ]
    asks = selector in (SelectorName.QUERY, SelectorName.HYBRID) and 0 < ratio < 1
    ran = sum(active) + (2 * (must + 1) if asks else 0)
    projected = sum(measured) + (must + 1 if asks else 0)
    assert sum(count for what, _, count in stack.calls if what == "run") == ran
    assert sum(count for what, _, count in stack.calls if what == "project") == projected
    expected = ran + stack.projection_share * projected
    assert work.tally.token_layers == pytest.approx(expected)
    workload = PassWorkload(hit, must, LAYERS, stack.projection_share)
    assert pass_work(plan.selection, workload).token_layers == pytest.approx(expected)
    assert work.tally.tokens_hit == hit
    assert work.tally.tokens_recomputed == active[-1] - must
    assert work.tally.bytes_loaded == LAYERS * 2 * hit * model().kv_heads * HEAD_DIM * 4
    assert len(work.tally.timeline) == LAYERS
    for timing in work.tally.timeline:
        assert timing.load_start_ms <= timing.load_end_ms
        assert timing.compute_start_ms <= timing.compute_end_ms


@pytest.mark.parametrize("forgets", [False, True])
def test_the_question_leaves_its_layers_written(forgets: bool) -> None:
    scene = prompt()
    plan = scene.plan(0.15, SelectorName.QUERY, query_layers=(1, 2))
    expected = blended(scene, plan)[0].tally.active_positions
    stack = ToyStack(model())
    stack.forgets = forgets
    work, _ = blended(scene, plan, stack)
    hits = 42
    # Layer 2 is only projected for the question.
    twice = [(0, hits), (1, hits)]
    assert stack.writes == [*twice, *(twice if forgets else []), (2, hits), (3, hits)]
    assert work.tally.active_positions == expected


@pytest.mark.parametrize("selector", EVERY_SELECTOR)
def test_sets_only_shrink_and_keep_the_question(selector: SelectorName) -> None:
    scene = prompt()
    work, _ = blended(scene, scene.plan(0.4, selector))
    must = {p for p in range(LENGTH) if not any(start <= p < end for start, end in SPANS)}
    sets = [set(work.tally.active_positions[layer]) for layer in range(LAYERS)]
    for earlier, later in itertools.pairwise(sets):
        assert must <= later <= earlier
    for positions in work.tally.active_positions.values():
        assert positions == sorted(positions)


BEHIND_PREFIX = ((2, 20), (20, 33), (38, 52))
"""The first chunk stands where it was prefilled: what is loaded of it is exact."""


@pytest.mark.parametrize("selector", EVERY_SELECTOR)
@pytest.mark.parametrize("check_layer", [0, 2])
def test_exact_tokens_are_neither_recomputed_nor_counted(selector: SelectorName, check_layer: int) -> None:
    scene, layers = prompt(BEHIND_PREFIX), (0, 1)
    plan = scene.plan(0.4, selector, check_layer, layers, exact_end=20)
    work, stack = blended(scene, plan)
    must, candidates, last = LENGTH - 45, 27, work.tally.active_positions[LAYERS - 1]
    for positions in work.tally.active_positions.values():
        assert not set(range(2, 20)) & set(positions)
    assert (len(last) - must) / candidates == pytest.approx(
        0.2 if selector is SelectorName.HKVD_GRADUAL else 0.4, abs=0.02
    )
    assert work.tally.tokens_hit == 45
    assert work.tally.tokens_recomputed == len(last) - must
    workload = PassWorkload(45, must, LAYERS, stack.projection_share, exact_tokens=18)
    assert pass_work(plan.selection, workload).token_layers == pytest.approx(work.tally.token_layers)
    full = model().dense(scene.token_ids)
    assert_cache_until(stack, full.keys[:, :20], full.values[:, :20])


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_where_everything_loaded_is_exact_so_is_the_blend(ratio: float) -> None:
    scene = prompt(BEHIND_PREFIX[:1])
    work, stack = blended(scene, scene.plan(ratio, exact_end=20))
    full = model().dense(scene.token_ids)
    assert_cache(stack, full.keys, full.values, 1e-4)
    assert work.tally.tokens_recomputed == (18 if ratio == 1 else 0)
    workload = PassWorkload(18, LENGTH - 18, LAYERS, 0.25, exact_tokens=18)
    expected = pass_work(work.plan.selection, workload).token_layers
    assert work.tally.token_layers == expected


def test_a_region_behind_some_exact_tokens_counts_the_others() -> None:
    """The prefix cache holds part of the exact chunk: the same tokens are chosen."""
    scene = prompt(BEHIND_PREFIX)
    plan = scene.plan(0.4, exact_end=20)
    whole, _ = blended(scene, plan)
    part, _ = begin(scene, plan, stack_until(scene, 10), start=10)
    assert finish(part) is PassStatus.DONE
    assert part.tally.active_positions[LAYERS - 1] == [
        p for p in whole.tally.active_positions[LAYERS - 1] if p >= 10
    ]


def test_work_is_handed_back_after_each_budget() -> None:
    scene = prompt()
    work, _ = begin(scene, scene.plan(1.0), unit=10)
    spent = []
    while work.status is PassStatus.RUNNING:
        spent.append(work.advance(15.0))
    work.close()
    assert max(spent) <= 15 + 10
    assert sum(spent) == work.tally.token_layers == LENGTH * LAYERS


def test_it_waits_for_a_slow_loader() -> None:
    scene, gate = prompt(), Gate()
    scene.gate = gate
    work, stack = begin(scene, scene.plan(0.0))
    assert work.next_unit() == WAITING
    assert work.advance(1e9) == 0
    assert stack.calls == []
    gate.event(0).set()
    while work.tally.token_layers == 0:
        work.advance(1e9)
    assert {layer for _, layer, _ in stack.calls} == {0}
    assert work.next_unit() == WAITING
    for layer in range(1, LAYERS):
        gate.event(layer).set()
    assert finish(work) is PassStatus.DONE
    assert work.tally.load_wait_s > 0


def test_a_store_that_never_answers_is_given_up() -> None:
    scene, gate = prompt(), Gate()
    scene.gate = gate
    gate.event(0).set()
    work, _ = begin(scene, scene.plan(0.0))
    while work.tally.token_layers == 0:
        work.next_unit()
    scene.loaders[0].patience_s = 0.01
    assert finish(work) is PassStatus.FAILED
    assert work.tally.failure == "load_timeout: layer 1 did not arrive within 0.01 s"
    for layer in range(LAYERS):
        gate.event(layer).set()
    scene.loaders[0]._threads[0].join(20)


def test_closing_early_lets_go_of_the_loader() -> None:
    scene = prompt()
    work, _ = begin(scene, scene.plan(0.5), unit=5)
    work.advance(20)
    work.close()
    work.close()
    scene.loaders[0]._threads[0].join(20)
    assert not scene.loaders[0]._threads[0].is_alive()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_lost_chunk_is_computed_instead(layer: int, ratio: float) -> None:
    scene = prompt()
    lost = scene.hits[1].key
    scene.lost = frozenset({(layer, lost)})
    work, stack = blended(scene, scene.plan(ratio), unit=16)
    missed = prompt((SPANS[0], SPANS[2]))
    expected, other = blended(missed, missed.plan(ratio), unit=16)
    assert_cache(stack, *cache_of(other), 0.0)
    assert work.tally.restarts == 1
    assert work.tally.failure is not None
    assert "the test lost it" in work.tally.failure
    assert work.tally.active_positions == expected.tally.active_positions
    assert work.tally.tokens_hit == expected.tally.tokens_hit
    assert work.tally.tokens_recomputed == expected.tally.tokens_recomputed
    assert work.tally.token_layers >= expected.tally.token_layers
    assert len(work.tally.timeline) == LAYERS
    assert [hit.key for hit in scene.opened[1].hits] == [scene.hits[0].key, scene.hits[2].key]
    for loader in scene.loaders:
        loader._threads[0].join(20)
        assert not loader._threads[0].is_alive()


def test_a_second_loss_fails() -> None:
    scene = prompt()
    scene.lost = frozenset({(1, scene.hits[0].key), (2, scene.hits[2].key)})
    work, _ = begin(scene, scene.plan(0.3))
    assert finish(work) is PassStatus.FAILED
    assert work.tally.restarts == 1
    assert str(scene.hits[2].key) in str(work.tally.failure)


def test_chunks_lost_together_cost_one_restart() -> None:
    scene = prompt()
    scene.lost = frozenset({(1, scene.hits[0].key), (1, scene.hits[2].key)})
    work, stack = blended(scene, scene.plan(0.3))
    missed = prompt((SPANS[1],))
    _, other = blended(missed, missed.plan(0.3))
    assert_cache(stack, *cache_of(other), 0.0)
    assert work.tally.restarts == 1


def test_losing_everything_fails_at_once() -> None:
    scene = prompt((SPANS[0],))
    scene.lost = frozenset({(2, scene.hits[0].key)})
    work, _ = begin(scene, scene.plan(0.3))
    assert finish(work) is PassStatus.FAILED
    assert work.tally.restarts == 0


def scripted(flags: Iterator[list[float]]) -> Callable[[Tensor], Tensor]:
    return lambda values: torch.tensor(next(flags), dtype=values.dtype)


def test_a_slice_ends_where_a_pass_restarts() -> None:
    """A step that has waited for one layer's deadline does not wait for another."""
    scene = prompt()
    scene.lost = frozenset({(1, scene.hits[1].key)})
    work, _ = begin(scene, scene.plan(0.0))
    while not work.tally.restarts:
        assert work.status is PassStatus.RUNNING
        work.advance(float("inf"))
    assert work.tally.timeline == [], "the slice went on with layer 0"
    work.close()


def test_chunks_may_lie_on_several_shards() -> None:
    """Within a layer, all chunks of one shard come before those of the next."""
    alone, split = prompt(), prompt()
    shards = (ShardAddress("even", "127.0.0.1:1"), ShardAddress("odd", "127.0.0.1:2"))

    def stream(plan: BlendPlan, share: slice = slice(None)) -> Frames:
        every_key = [hit.key for hit in plan.hits[share]]
        owners = [[shards[chunk % 2]] for chunk in range(len(every_key))]

        def open_parts(by_owner: Mapping[ShardAddress, Sequence[int]], first_layer: int) -> list[ShardStream]:
            return [
                ShardStream(chunks, ToyPrompt._stream(split, [every_key[c] for c in chunks], first_layer))
                for chunks in by_owner.values()
            ]

        return merge_streams(owners, range(LAYERS), open_parts, ())

    split.stream = stream  # type: ignore[method-assign]
    work, stack = blended(split, split.plan(0.3))
    expected, other = blended(alone, alone.plan(0.3))
    assert work.tally.active_positions == expected.tally.active_positions
    assert_cache(stack, *cache_of(other), 0.0)
