"""The blend pass on one of several tensor-parallel ranks: all ranks take the same steps, whatever fails."""

from __future__ import annotations

import itertools
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from kintsugi.core.request import SelectorName
from kintsugi.fusor import blend, question
from kintsugi.fusor.blend import BlendPass
from kintsugi.fusor.sliced import PassStatus
from kintsugi.fusor.stack import Hidden
from tests.fakes.toy_chunks import Gate
from tests.fakes.toy_stack import ToyStack
from tests.unit.fusor.test_blend import (
    LAYERS,
    SPANS,
    assert_cache,
    begin,
    blended,
    cache_of,
    finish,
    model,
    prompt,
    scripted,
)


def test_ranks_agree_when_the_other_one_lost_a_chunk() -> None:
    scene = prompt()
    no, second = [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    flags = itertools.chain([no, second], itertools.repeat([0.0, 0.0]))
    stack = ToyStack(model(), world_size=2, other_ranks=scripted(flags))
    work, stack = blended(scene, scene.plan(0.0), stack)
    missed = prompt((SPANS[0], SPANS[2]))
    _, other = blended(missed, missed.plan(0.0))
    assert_cache(stack, *cache_of(other), 0.0)
    assert work.tally.restarts == 1
    assert (work.tally.failure or "").startswith("other_rank: a chunk was lost")


def test_a_layer_that_failed_on_this_rank_ends_the_pass_on_all() -> None:
    scene = prompt()
    stack = ToyStack(model(), world_size=2)
    stack.failure = "defect: ValueError: no"
    work, _ = begin(scene, scene.plan(0.0), stack)
    assert finish(work) is PassStatus.FAILED
    assert work.tally.failure == stack.failure
    assert work.tally.restarts == 0


def run_out_of_memory(*_arguments: object) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def costs_of(work: BlendPass) -> list[float]:
    """Run a pass to its end. Returns what each of its units cost."""
    costs: list[float] = []
    while work.status is PassStatus.RUNNING:
        costs.append(work.next_unit())
    work.close()
    return [cost for cost in costs if cost > 0]


@pytest.mark.parametrize(
    ("selector", "fails"),
    [
        (SelectorName.HKVD, (blend, "_square_distances")),
        (SelectorName.HKVD, (Hidden, "take")),
        (SelectorName.QUERY, (question, "attention_mass")),
    ],
)
def test_memory_that_runs_out_between_layer_calls_leaves_a_rank_in_step(
    monkeypatch: pytest.MonkeyPatch, selector: SelectorName, fails: tuple[object, str]
) -> None:
    """It computes as many tokens in each unit as the other ranks, which fail with it at the pass's end."""
    scene = prompt()
    plan = scene.plan(0.3, selector, query_layers=(1,) if selector is SelectorName.QUERY else ())
    sound, _ = begin(scene, plan, ToyStack(model(), world_size=2))
    expected = costs_of(sound)
    assert sound.status is PassStatus.DONE
    stack = ToyStack(model(), world_size=2)
    work, _ = begin(scene, plan, stack)
    if fails[1] == "take":
        own = Hidden.take

        def take(hidden: Hidden, index: Tensor | slice) -> Hidden:
            return own(hidden, index) if isinstance(index, slice) else run_out_of_memory()

        monkeypatch.setattr(Hidden, "take", take)
    else:
        monkeypatch.setattr(*fails, run_out_of_memory)
    assert costs_of(work) == expected
    assert work.status is PassStatus.FAILED
    assert "out of memory" in str(work.tally.failure)


def test_a_loader_that_does_not_open_on_a_rank_fails_the_pass_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = prompt()
    monkeypatch.setattr(scene, "open_loader", run_out_of_memory)
    work, _ = begin(scene, scene.plan(0.0), ToyStack(model(), world_size=2))
    assert finish(work) is PassStatus.FAILED
    assert "out of memory" in str(work.tally.failure)


def test_ranks_agree_when_this_one_lost_a_chunk() -> None:
    scene = prompt()
    scene.lost = frozenset({(1, scene.hits[1].key)})
    seen: list[list[float]] = []

    def other(values: Tensor) -> Tensor:
        seen.append(values.tolist())
        return torch.zeros_like(values)

    work, _ = blended(scene, scene.plan(0.0), ToyStack(model(), world_size=2, other_ranks=other))
    # Behind layer 0 and behind the last layer, not in every one.
    assert seen == [[0, 0, 0], [0, 1, 0], [0, 0], [0, 0]]
    assert "the test lost it" in str(work.tally.failure)


def test_a_rank_whose_load_is_late_counts_every_chunk_as_lost() -> None:
    scene, gate = prompt(), Gate()
    scene.gate = gate
    gate.event(0).set()
    work, _ = begin(scene, scene.plan(0.0), ToyStack(model(), world_size=2))
    while work.tally.token_layers == 0:
        work.next_unit()
    for loader in scene.loaders:
        loader.patience_s = 0.01
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kintsugi.fusor.loader.CLOSE_TIMEOUT_S", 0.05)
        assert finish(work) is PassStatus.FAILED
    for layer in range(LAYERS):
        gate.event(layer).set()
    scene.loaders[0]._threads[0].join(20)
    assert work.tally.failure == "load_timeout: layer 1 did not arrive within 0.01 s"


def test_deviation_is_summed_over_ranks() -> None:
    """The other rank's share decides here: it says that the last hit tokens deviate most."""
    scene = prompt()

    def other(values: Tensor) -> Tensor:
        return torch.arange(len(values), dtype=values.dtype) * 1e6 if len(values) == 42 else values * 0

    work, _ = blended(scene, scene.plan(0.1), ToyStack(model(), world_size=2, other_ranks=other))
    hit = [p for start, end in SPANS for p in range(start, end)]
    assert set(work.tally.active_positions[1]) & set(hit) == set(hit[-4:])
