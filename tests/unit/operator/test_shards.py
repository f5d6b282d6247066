"""Never more than one shard is away because of us."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi_operator.desired.shards import ShardStep, next_step, ready_shards
from kintsugi_operator.observed.views import HEAD, StorePod


def pods(
    *templates: str,
    down: tuple[int, ...] = (),
    leaving: tuple[int, ...] = (),
    idle: tuple[int, ...] = (),
) -> list[StorePod]:
    """`down`: not ready, but may come back. `idle`: never were ready."""
    return [
        StorePod(
            f"pod-{index}-{one}",
            index,
            one,
            index not in (*down, *idle),
            index in leaving,
            may_recover=index in down,
        )
        for index, one in enumerate(templates)
    ]


def step_of(templates: list[str], found: list[StorePod], head: str = "h") -> ShardStep:
    return next_step(templates, head, found)


def is_waiting(step: ShardStep) -> bool:
    """Whether pods are outdated, and none may be evicted now."""
    return step.outdated > 0 and not step.pods


def test_what_is_up_to_date_is_left_alone() -> None:
    assert step_of(["a", "a"], pods("a", "a")) == ShardStep()
    assert step_of(["a", "a"], pods("a", "a", down=(1,))) == ShardStep()
    assert step_of(["a"], []) == ShardStep()


def test_one_after_the_other() -> None:
    step = step_of(["b", "b"], pods("a", "a"))
    assert (step.pods, step.outdated) == (("pod-0-a",), 2)
    assert is_waiting(step_of(["b", "b"], pods("a", "a", leaving=(0,))))
    assert is_waiting(step_of(["b", "b"], pods("b", "a", down=(0,))))
    assert step_of(["b", "b"], pods("b", "a")).pods == ("pod-1-a",)


def test_a_shard_that_is_down_anyhow_goes_first() -> None:
    step = step_of(["b", "b"], pods("a", "a", down=(1,)))
    assert step.pods == ("pod-1-a",)


def test_two_that_are_down_are_not_made_three() -> None:
    step = step_of(["b"] * 3, pods("a", "a", "a", down=(1, 2)))
    assert is_waiting(step)
    assert "1, 2" in step.message


def test_pods_that_never_were_ready_are_replaced_at_once() -> None:
    """They hold nothing, whatever else is down."""
    step = step_of(["b"] * 3, pods("a", "a", "a", idle=(0, 2)))
    assert (step.pods, step.outdated) == (("pod-0-a", "pod-2-a"), 3)
    assert step_of(["b"] * 3, pods("a", "a", "a", idle=(0, 2), down=(1,))).pods == ("pod-0-a", "pod-2-a")
    assert is_waiting(step_of(["b"] * 2, pods("a", "a", idle=(0,), leaving=(0,))))


@pytest.mark.parametrize(("is_ready", "may_recover"), [(True, False), (False, True)])
def test_a_head_that_may_serve_is_left_alone(is_ready: bool, may_recover: bool) -> None:
    head = StorePod("head", HEAD, "old", is_ready, may_recover=may_recover)
    assert step_of(["a"], [head, *pods("a")]) == ShardStep()


def test_a_head_that_never_started_is_replaced() -> None:
    head = StorePod("head", HEAD, "old", False)
    assert step_of(["a"], [head, *pods("a", idle=(0,))]).pods == ("head",)
    assert step_of(["a"], [head, *pods("a", idle=(0,))], head="old") == ShardStep()


def test_a_group_without_a_shard_does_not_matter() -> None:
    assert step_of(["a"], pods("a", "old")) == ShardStep()


def test_ready_shards_are_counted_once() -> None:
    twice = [*pods("a", "a"), StorePod("again", 0, "a", True)]
    assert ready_shards(2, twice) == 2
    assert ready_shards(1, twice) == 1
    assert ready_shards(2, pods("a", "a", leaving=(1,))) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.booleans(), min_size=6, max_size=6), st.randoms())
def test_an_upgrade_ends_with_at_most_one_away(shards: int, outdated: list[bool], random: object) -> None:
    wanted = ["new"] * shards
    state = pods(*("old" if outdated[index] else "new" for index in range(shards)))
    for _ in range(2 * shards + 1):
        step = step_of(wanted, state)
        if step == ShardStep():
            break
        (name,) = step.pods
        gone = next(one for one in state if one.name == name)
        away = [one for one in state if one.name != name]
        assert ready_shards(shards, away) == shards - 1
        assert not step_of(wanted, away).pods
        state = [*away, StorePod(f"{gone.name}-n", gone.shard, "new", True)]
    assert all(one.template == "new" for one in state)
