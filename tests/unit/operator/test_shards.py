"""Never more than one shard is away because of us."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi_operator.desired.shards import ShardStep, next_step, ready_shards
from kintsugi_operator.observed.views import ShardPod


def pods(*templates: str, down: tuple[int, ...] = (), leaving: tuple[int, ...] = ()) -> list[ShardPod]:
    return [
        ShardPod(f"pod-{index}-{one}", index, one, index not in down, index in leaving)
        for index, one in enumerate(templates)
    ]


def is_waiting(step: ShardStep) -> bool:
    """Whether pods are outdated, and none may be evicted now."""
    return step.outdated > 0 and not step.pod


def test_what_is_up_to_date_is_left_alone() -> None:
    assert next_step(["a", "a"], pods("a", "a")) == ShardStep()
    assert next_step(["a", "a"], pods("a", "a", down=(1,))) == ShardStep()
    assert next_step(["a"], []) == ShardStep()


def test_one_after_the_other() -> None:
    step = next_step(["b", "b"], pods("a", "a"))
    assert (step.pod, step.outdated) == ("pod-0-a", 2)
    assert is_waiting(next_step(["b", "b"], pods("a", "a", leaving=(0,))))
    assert is_waiting(next_step(["b", "b"], pods("b", "a", down=(0,))))
    assert next_step(["b", "b"], pods("b", "a")).pod == "pod-1-a"


def test_a_shard_that_is_down_anyhow_goes_first() -> None:
    step = next_step(["b", "b"], pods("a", "a", down=(1,)))
    assert step.pod == "pod-1-a"


def test_two_that_are_down_are_not_made_three() -> None:
    step = next_step(["b"] * 3, pods("a", "a", "a", down=(1, 2)))
    assert is_waiting(step)
    assert "1, 2" in step.message


def test_a_group_without_a_shard_does_not_matter() -> None:
    assert next_step(["a"], pods("a", "old")) == ShardStep()


def test_ready_shards_are_counted_once() -> None:
    twice = [*pods("a", "a"), ShardPod("again", 0, "a", True)]
    assert ready_shards(2, twice) == 2
    assert ready_shards(1, twice) == 1
    assert ready_shards(2, pods("a", "a", leaving=(1,))) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.booleans(), min_size=6, max_size=6), st.randoms())
def test_an_upgrade_ends_with_at_most_one_away(shards: int, outdated: list[bool], random: object) -> None:
    wanted = ["new"] * shards
    state = pods(*("old" if outdated[index] else "new" for index in range(shards)))
    for _ in range(2 * shards + 1):
        step = next_step(wanted, state)
        if step == ShardStep():
            break
        assert step.pod
        gone = next(one for one in state if one.name == step.pod)
        away = [one for one in state if one.name != step.pod]
        assert ready_shards(shards, away) == shards - 1
        assert not next_step(wanted, away).pod
        state = [*away, ShardPod(f"{gone.name}-n", gone.shard, "new", True)]
    assert all(one.template == "new" for one in state)
