"""The question's own pass against the same tokens run densely, and what the blend makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kintsugi.core.request import SelectorName
from kintsugi.fusor.control.controller import hits_beyond
from kintsugi.fusor.loader import LoadedLayer
from kintsugi.fusor.question import WEIGHTS_MAX, QuestionPass, attention_mass, find_places
from kintsugi.fusor.selectors import quota
from kintsugi.fusor.sliced import WAITING, PassStatus
from kintsugi.fusor.stack import AttentionRule
from tests.fakes.toy_chunks import Gate, ToyPrompt
from tests.fakes.toy_stack import HEAD_DIM, HEADS, VOCAB, ToyStack
from tests.unit.fusor.test_blend import (
    LAYERS,
    LENGTH,
    NEXT,
    SPANS,
    assert_cache,
    begin,
    blended,
    cache_of,
    finish,
    model,
    prompt,
    tokens,
)

HITS = [p for start, end in SPANS for p in range(start, end)]


def naive_mass(
    query: Tensor, query_positions: Tensor, key: Tensor, key_positions: Tensor, rule: AttentionRule
) -> Tensor:
    """One weight at a time."""
    group = query.shape[1] // key.shape[1]
    total = torch.zeros(len(key), dtype=torch.float64)
    for row, at in zip(query.double(), query_positions.tolist(), strict=True):
        for head in range(query.shape[1]):
            logits = key[:, head // group].double() @ row[head] * rule.scale
            if rule.softcap:
                logits = rule.softcap * torch.tanh(logits / rule.softcap)
            if rule.slopes is not None:
                logits -= rule.slopes[head].double() * (at - key_positions)
            for i, position in enumerate(key_positions.tolist()):
                if position > at or (rule.sliding_window and position <= at - rule.sliding_window):
                    logits[i] = float("-inf")
            if rule.sinks is not None:
                logits = torch.cat((logits, rule.sinks[head, None].double()))
            total += logits.softmax(0)[: len(key)]
    return total


@settings(deadline=None, max_examples=40)
@given(
    queries=st.integers(1, 5),
    keys=st.integers(1, 9),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(6, 12),
    softcap=st.none() | st.sampled_from([0.5, 30.0]),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_mass_is_the_sum_of_softmax_weights(
    queries: int,
    keys: int,
    kv_heads: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    has_slopes: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(queries, 4, 8, generator=generator)
    key = torch.randn(keys, kv_heads, 8, generator=generator)
    key_positions = torch.randperm(keys, generator=generator) + 3
    # Among the keys, so that some are masked; at least the first one is seen.
    query_positions = torch.arange(queries) + 3
    sinks, slopes = torch.randn(2, 4, generator=generator)
    rule = AttentionRule(
        0.6, window, softcap, None, sinks if has_sinks else None, slopes if has_slopes else None
    )
    got = attention_mass(query, query_positions, key, key_positions, rule)
    assert got.dtype == torch.float32
    expected = naive_mass(query, query_positions, key, key_positions, rule)
    assert torch.allclose(got.double(), expected, atol=1e-5)
    if has_sinks:
        assert float(got.sum()) < 4 * queries
    else:
        assert float(got.sum()) == pytest.approx(4 * queries, rel=1e-5)


def test_long_contexts_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(7, 4, 8), torch.randn(11, 2, 8)
    positions = torch.arange(11)
    arguments = (query, positions[4:], key, positions, AttentionRule(1.0))
    whole = attention_mass(*arguments)
    monkeypatch.setattr("kintsugi.fusor.question.WEIGHTS_MAX", 11 * 2 * 2)
    assert torch.allclose(attention_mass(*arguments), whole, atol=1e-6)
    assert WEIGHTS_MAX > 11 * 2 * 2


def _longer(loaded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Room for one token more."""
    key, value = (torch.cat((kv, kv.new_zeros(1, *kv.shape[1:]))) for kv in loaded)
    return key, value


def expected_mass(scene: ToyPrompt, layers: tuple[int, ...], left_out: Sequence[range] = ()) -> Tensor:
    """Attention to the hit tokens, from a dense run in which they keep their loaded KV, and nothing sees what
    is left out."""
    hits = [p for start, end in scene.spans for p in range(start, end)]
    must = [p for p in range(LENGTH + 1) if p not in hits]
    asking = [p for p in must if p > hits[-1]]
    fresh = dict.fromkeys(range(LAYERS), must)
    prompt_and_next = torch.cat((scene.token_ids, torch.tensor([NEXT])))
    unseen = [position for gap in left_out for position in gap]
    run = model().dense(
        prompt_and_next, fresh=fresh, loaded=lambda layer: _longer(scene.loaded(layer)), unseen=unseen
    )
    positions = torch.tensor([p for p in range(hits[0], LENGTH + 1) if p not in unseen])
    total = torch.zeros(LENGTH + 1, dtype=torch.float64)
    for layer in layers:
        keys = run.keys[layer]
        total[positions] += naive_mass(
            run.queries[layer, asking],
            torch.tensor(asking),
            keys[positions],
            positions,
            AttentionRule(HEAD_DIM**-0.5),
        )
    return total[hits]


def passed(
    scene: ToyPrompt,
    layers: tuple[int, ...],
    unit: int = 1000,
    stack: ToyStack | None = None,
    left_out: Sequence[range] = (),
) -> QuestionPass:
    hits = torch.tensor([p for start, end in scene.spans for p in range(start, end)])
    absent = {*hits.tolist(), *(position for gap in left_out for position in gap)}
    others = torch.tensor([p for p in range(LENGTH + 1) if p not in absent])
    stack = stack or ToyStack(model())
    if left_out:
        stack = stack.with_own_cache(0, LENGTH + 1 - sum(map(len, left_out)))
    hidden = stack.embed(torch.cat((scene.token_ids, torch.tensor([NEXT])))[others], others)
    begins = int(hits[-1]) + 1
    question = QuestionPass(stack, hits, others, hidden, layers, unit, 0, begins, left_out)
    for layer in range(question.num_layers):
        key, value = (kv[hits] for kv in scene.loaded(layer))
        for _ in question.pass_layer(layer, LoadedLayer(layer, key, value, 0, 0.0, 0.0, None)):
            pass
    return question


@pytest.mark.parametrize("layers", [(0,), (1,), (3,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("unit", [5, 1000])
def test_it_is_what_the_question_attends_to(layers: tuple[int, ...], unit: int) -> None:
    scene, stack = prompt(), ToyStack(model())
    question = passed(scene, layers, unit, stack)
    expected = expected_mass(scene, layers)
    assert torch.allclose(question.attention.double(), expected, atol=1e-4)
    assert float(expected.max()) > 2 * float(expected.min())
    tokens = LENGTH + 1 - len(HITS)
    ran = [(what, layer) for what, layer, _ in stack.calls]
    assert set(ran) == {("run", layer) for layer in range(layers[-1])} | {("project", layers[-1])}
    assert sum(count for _, _, count in stack.calls) == tokens * (layers[-1] + 1)


LEFT_OUT = [range(4, 5), range(24, 30), range(43, 45)]


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 3)])
@pytest.mark.parametrize("unit", [5, 1000])
def test_what_is_left_out_is_neither_computed_nor_seen(layers: tuple[int, ...], unit: int) -> None:
    scene, stack = prompt(((5, 20), (30, 40), (45, 52))), ToyStack(model())
    question = passed(scene, layers, unit, stack, LEFT_OUT)
    expected = expected_mass(scene, layers, LEFT_OUT)
    assert torch.allclose(question.attention.double(), expected, atol=1e-4)
    assert not torch.allclose(expected, expected_mass(scene, layers), atol=1e-2)
    tokens = LENGTH + 1 - 32 - 9
    assert sum(count for _, _, count in stack.calls) == tokens * (layers[-1] + 1)
    assert not stack.written.any(), "it has a cache of its own"


def test_places_close_the_gaps() -> None:
    positions = torch.tensor([0, 3, 5, 23, 30, 42, 45, 60])
    assert find_places(positions, LEFT_OUT).tolist() == [0, 3, 4, 22, 23, 35, 36, 51]
    assert find_places(positions, []) is positions


def test_where_no_question_follows_the_last_token_asks_alone() -> None:
    scene = prompt(((5, 20), (30, LENGTH)))
    expected = expected_mass(scene, (0, 2))
    assert torch.allclose(passed(scene, (0, 2)).attention.double(), expected, atol=1e-4)
    assert float(expected.sum()) < 2 * HEADS


@pytest.mark.parametrize("seed", range(3))
def test_the_last_token_is_not_computed_for_the_blend(seed: int) -> None:
    scene = ToyPrompt(model(), tokens(seed), SPANS)
    work, stack = blended(scene, scene.plan(0.25, SelectorName.QUERY, query_layers=(2,)))
    assert all(max(positions) < LENGTH for positions in work.tally.active_positions.values())
    assert stack.written[:, 0, LENGTH].tolist() == [True, True, False, False], "its own, for the question"


def test_what_lies_between_chunks_is_seen() -> None:
    one, other = prompt(), prompt()
    other.token_ids[35] = (other.token_ids[35] + 1) % VOCAB
    assert not torch.equal(passed(one, (2,)).attention, passed(other, (2,)).attention)
    # The rest of the question's weights lies on the gap and on the question itself.
    assert 0 < float(passed(one, (2,)).attention.sum()) < HEADS * (LENGTH + 1 - 52)


@pytest.mark.parametrize("layers", [(0,), (1, 2), (3,)])
def test_the_query_selector_keeps_what_is_attended_to_most(layers: tuple[int, ...]) -> None:
    scene = prompt()
    work, _ = blended(scene, scene.plan(0.25, SelectorName.QUERY, query_layers=layers))
    mass = expected_mass(scene, layers)
    best = {HITS[i] for i in mass.topk(quota(0.25, len(HITS))).indices.tolist()}
    must = set(range(LENGTH)) - set(HITS)
    assert set(work.tally.active_positions[0]) == best | must
    assert work.tally.active_positions[LAYERS - 1] == work.tally.active_positions[0]
    assert work._fetched == {}


def test_every_layer_is_fetched_once() -> None:
    scene = prompt()
    work, _ = blended(scene, scene.plan(0.25, SelectorName.HYBRID, 2, query_layers=(1, 2)))
    assert len(scene.loaders) == 1
    assert work.tally.bytes_loaded == sum(m.chunk_bytes for m in scene.manifests.values())


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    ("selector", "needed"),
    [(SelectorName.QUERY, {2}), (SelectorName.HYBRID, {1, 2})],
    ids=["query", "hybrid"],
)
def test_only_what_the_blend_writes_or_compares_stays_in_memory(
    selector: SelectorName, needed: set[int], forgets: bool
) -> None:
    scene, stack = prompt(), ToyStack(model())
    stack.forgets = forgets
    plan = scene.plan(0.3, selector, 1, query_layers=(0, 2))
    work, _ = begin(scene, plan, stack)
    held: dict[int, bool] = {}
    for _ in range(100):
        if work.status is not PassStatus.RUNNING:
            break
        work.next_unit()
        held |= {layer: len(loaded.key) > 0 for layer, loaded in work._fetched.items()}
    work.close()
    assert work.status is PassStatus.DONE
    assert held == {layer: forgets or layer in needed for layer in range(3)}


@pytest.mark.parametrize("selector", [SelectorName.QUERY, SelectorName.HYBRID])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_chunk_lost_under_the_question_is_computed_instead(selector: SelectorName, layer: int) -> None:
    scene = prompt()
    scene.lost = frozenset({(layer, scene.hits[1].key)})
    work, stack = blended(scene, scene.plan(0.3, selector, query_layers=(2,)), unit=16)
    missed = prompt((SPANS[0], SPANS[2]))
    expected, other = blended(missed, missed.plan(0.3, selector, query_layers=(2,)), unit=16)
    assert_cache(stack, *cache_of(other), 0.0)
    assert work.tally.restarts == 1
    assert work.tally.active_positions == expected.tally.active_positions


def test_the_question_waits_for_its_layers_and_no_others() -> None:
    scene, gate = prompt(), Gate()
    scene.gate = gate
    work, stack = begin(scene, scene.plan(0.3, SelectorName.QUERY, query_layers=(1,)))
    gate.event(0).set()
    while work.tally.token_layers == 0:
        work.next_unit()
    assert work.next_unit() == WAITING
    assert {layer for _, layer, _ in stack.calls} == {0}
    gate.event(1).set()
    # Layer 1 serves the question's pass, then layers 0 and 1 of the blend; layer 2 is not here yet.
    while work.next_unit() != WAITING or len({layer for _, layer, _ in stack.calls}) < 2:
        pass
    assert max(work.tally.active_positions) == 1
    for layer in range(2, LAYERS):
        gate.event(layer).set()
    assert finish(work) is PassStatus.DONE


def test_attention_is_summed_over_ranks() -> None:
    """The other rank's heads decide here: they attend to the last hit tokens."""
    scene = prompt()

    def other(values: Tensor) -> Tensor:
        return torch.arange(len(values), dtype=values.dtype) * 1e6 if len(values) == 42 else values * 0

    stack = ToyStack(model(), world_size=2, other_ranks=other)
    work, _ = blended(scene, scene.plan(0.1, SelectorName.QUERY), stack)
    assert set(work.tally.active_positions[0]) & set(HITS) == set(HITS[-4:])


@pytest.mark.parametrize("selector", [SelectorName.QUERY, SelectorName.HYBRID])
@pytest.mark.parametrize("start", [8, 20])
def test_what_the_prefix_cache_holds_of_an_exact_chunk_does_not_change_the_choice(
    selector: SelectorName, start: int
) -> None:
    """Part of it, or all; several prompts, as few tokens are close to being chosen."""
    for seed in range(12):
        scene = ToyPrompt(model(), tokens(seed), ((2, 20), (20, 33), (38, 52)))
        plan = scene.plan(0.2, selector, 2, query_layers=(1, 2), exact_end=20)
        whole, stack = blended(scene, plan)
        cached = ToyStack(model())
        cached.keys[:, 0, :start] = stack.keys[:, 0, :start]
        cached.values[:, 0, :start] = stack.values[:, 0, :start]
        cached.written[:, 0, :start] = True
        rest = replace(plan, hits=hits_beyond(plan.hits, start))
        part, _ = begin(scene, rest, cached, start=start)
        assert finish(part) is PassStatus.DONE
        for layer, positions in part.tally.active_positions.items():
            assert positions == [p for p in whole.tally.active_positions[layer] if p >= start]


def test_a_lost_chunk_is_looked_at_like_text_before_the_first_hit() -> None:
    """As if it had not been marked: what the question attends to there is no part of the softmax."""
    for seed in range(12):
        scene = ToyPrompt(model(), tokens(seed), ((2, 20), (20, 33), (38, 52)))
        plan = scene.plan(0.2, SelectorName.QUERY, query_layers=(1, 2), exact_end=20)
        second = plan.hits[1]
        lost, _ = blended(scene, plan.without(frozenset({second.key})))
        unmarked, _ = blended(scene, replace(plan.without(frozenset({second.key})), exact_end=second.end))
        assert lost.tally.active_positions == unmarked.tally.active_positions
