"""The blend pass on a toy decoder with the selector `prior`: what it waits for, and what it recomputes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kintsugi.core.layout import PRIOR_LAYER
from kintsugi.core.request import SelectorName
from kintsugi.fusor.selectors import quota
from kintsugi.fusor.sliced import WAITING, PassStatus
from tests.fakes.toy_chunks import Gate, ToyPrompt
from tests.fakes.toy_stack import ToyStack
from tests.unit.fusor.test_blend import (
    BEHIND_PREFIX,
    LAYERS,
    LENGTH,
    SPANS,
    begin,
    blended,
    finish,
    model,
    prompt,
    scripted,
    tokens,
)


def best_by_prior(scene: ToyPrompt, positions: list[int], count: int) -> set[int]:
    return set(sorted(positions, key=lambda p: (-scene.prior(p), p))[:count])


def test_the_tokens_with_the_highest_prior_are_recomputed_at_every_layer() -> None:
    scene = prompt()
    work, stack = blended(scene, scene.plan(0.2, SelectorName.PRIOR))
    hits = [p for start, end in SPANS for p in range(start, end)]
    expected = sorted(({*range(LENGTH)} - {*hits}) | best_by_prior(scene, hits, quota(0.2, 42)))
    assert work.tally.active_positions == dict.fromkeys(range(LAYERS), expected)
    assert {what for what, _, _ in stack.calls} == {"run"}, "nothing is projected, and no question asked"


def test_priors_are_read_for_a_pass_in_inference_mode() -> None:
    """As engines run them; the loader's threads are in no such mode."""
    scene = prompt()
    expected = blended(scene, scene.plan(0.2, SelectorName.PRIOR))[0].tally.active_positions
    with torch.inference_mode():
        work, _ = blended(scene, scene.plan(0.2, SelectorName.PRIOR))
    assert work.tally.active_positions == expected


def test_priors_of_part_of_a_chunk_and_of_an_exact_one_without() -> None:
    """The region begins inside a chunk that is exact and has no prior, another one is cut by its end."""
    scene = ToyPrompt(model(), tokens(), BEHIND_PREFIX, without_prior=frozenset({0}))
    start, end = 12, 47
    full = model().dense(scene.token_ids)
    stack = ToyStack(model())
    stack.keys[:, 0, :start], stack.values[:, 0, :start] = full.keys[:, :start], full.values[:, :start]
    stack.written[:, 0, :start] = True
    plan = scene.plan(0.4, SelectorName.PRIOR, exact_end=20)
    work, _ = begin(scene, plan, stack, start=start, end=end)
    assert finish(work) is PassStatus.DONE
    candidates = [*range(20, 33), *range(38, 47)]
    expected = {*range(33, 38)} | best_by_prior(scene, candidates, quota(0.4, 22))
    assert work.tally.active_positions == dict.fromkeys(range(LAYERS), sorted(expected))


@pytest.mark.parametrize("place", [0, 2])
def test_a_chunk_lost_with_its_prior_is_computed_instead(place: int) -> None:
    """The first one has no prior: the store still says that it is gone before it sends the others' priors."""
    scene = ToyPrompt(model(), tokens(), BEHIND_PREFIX, without_prior=frozenset({0}))
    scene.lost = frozenset({(PRIOR_LAYER, scene.hits[place].key)})
    work, _ = blended(scene, scene.plan(0.4, SelectorName.PRIOR, exact_end=20))
    assert work.tally.restarts == 1
    assert "the test lost it" in str(work.tally.failure)
    left = [span for index, span in enumerate(BEHIND_PREFIX) if index != place]
    hits = [p for start, end in left for p in range(start, end)]
    candidates = [p for p in hits if p >= 20]
    best = best_by_prior(scene, candidates, quota(0.4, len(candidates)))
    expected = sorted({*range(LENGTH)} - {*hits} | best)
    assert work.tally.active_positions == dict.fromkeys(range(LAYERS), expected)


def test_a_chunk_that_was_put_again_without_its_prior_is_computed_instead() -> None:
    """Its manifest, which was looked up before, names one."""
    scene = prompt()
    del scene.priors[scene.hits[2].key]
    work, _ = blended(scene, scene.plan(0.4, SelectorName.PRIOR))
    assert work.tally.restarts == 1
    assert str(work.tally.failure).startswith("prior_lost: ")
    best = best_by_prior(scene, [*range(5, 33)], quota(0.4, 28))
    expected = sorted({*range(LENGTH)} - {*range(5, 33)} | best)
    assert work.tally.active_positions == dict.fromkeys(range(LAYERS), expected)


def test_priors_that_do_not_arrive_are_waited_for_and_given_up() -> None:
    scene, gate = prompt(), Gate()
    scene.gate = gate
    work, _ = begin(scene, scene.plan(0.4, SelectorName.PRIOR))
    assert work.next_unit() == WAITING
    scene.loaders[0].patience_s = 0.0
    while work.status is PassStatus.RUNNING:
        work.next_unit()
    assert work.status is PassStatus.FAILED
    assert "load_timeout: the priors did not arrive" in str(work.tally.failure)
    gate.event(PRIOR_LAYER).set()
    gate.event(0).set()


def test_ranks_agree_on_priors_before_they_choose() -> None:
    scene = prompt()
    losses = scripted(itertools.chain([[0.0, 1.0, 0.0]], itertools.repeat([0.0, 0.0])))

    def other(values: Tensor) -> Tensor:
        return losses(values) if len(values) <= len(SPANS) else torch.zeros_like(values)

    stack = ToyStack(model(), world_size=2, other_ranks=other)
    work, _ = blended(scene, scene.plan(0.3, SelectorName.PRIOR), stack)
    assert work.tally.restarts == 1
    assert work.tally.failure == "other_rank: a chunk could not be loaded there"
    assert set(range(*SPANS[1])) <= set(work.tally.active_positions[0])


def test_a_rank_that_lost_a_prior_tells_the_others() -> None:
    scene = prompt()
    scene.lost = frozenset({(PRIOR_LAYER, scene.hits[1].key)})
    seen: list[list[float]] = []

    def other(values: Tensor) -> Tensor:
        seen.append(values.tolist())
        return torch.zeros_like(values)

    work, _ = blended(
        scene, scene.plan(0.3, SelectorName.PRIOR), ToyStack(model(), world_size=2, other_ranks=other)
    )
    # At the priors; then, without the chunk, at the priors, behind layer 0 and behind the last layer.
    assert [values for values in seen if len(values) <= len(SPANS)] == [[0, 1, 0], [0, 0], [0, 0], [0, 0]]
    assert "the test lost it" in str(work.tally.failure)


def test_ranks_that_read_other_scores_choose_the_same_tokens() -> None:
    """Two replicas of a chunk may come from different engines, whose scores differ by a rounding."""
    chosen = []
    mine = {key: torch.tensor(list(frame)) for key, frame in prompt().priors.items()}
    theirs = {key: scores.flip(0) for key, scores in mine.items()}
    for here, there in ((mine, theirs), (theirs, mine)):
        scene = prompt()
        scene.priors = {key: memoryview(bytes(scores.tolist())) for key, scores in here.items()}
        other = torch.cat([there[hit.key] for hit in scene.hits])

        def answer(values: Tensor, other: Tensor = other) -> Tensor:
            return other.to(values.dtype) if len(values) > len(SPANS) else torch.zeros_like(values)

        work, _ = blended(
            scene, scene.plan(0.3, SelectorName.PRIOR), ToyStack(model(), world_size=2, other_ranks=answer)
        )
        chosen.append(work.tally.active_positions)
    assert chosen[0] == chosen[1]


def test_a_chunk_that_got_a_prior_since_it_was_looked_up_is_computed_instead() -> None:
    scene = ToyPrompt(model(), tokens(), BEHIND_PREFIX, without_prior=frozenset({0}))
    scene.priors[scene.hits[0].key] = memoryview(bytes(18))
    work, _ = blended(scene, scene.plan(0.4, SelectorName.PRIOR, exact_end=20))
    assert str(work.tally.failure).startswith("prior_lost: ")


def test_a_chunk_whose_prior_has_other_rows_since_it_was_looked_up_is_computed_instead() -> None:
    scene = prompt()
    key = scene.hits[2].key
    scene.priors[key] = memoryview(bytes(14) + bytes(scene.priors[key]))
    work, _ = blended(scene, scene.plan(0.4, SelectorName.PRIOR))
    assert work.tally.restarts == 1
    assert str(work.tally.failure).startswith("prior_lost: ")
    assert {*range(*SPANS[2])} <= {*work.tally.active_positions[0]}
