"""What waits to be saved is bounded, and what saving computes as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kintsugi.core.spaces import ChunkSpace, ModelFingerprint, TokenIds
from kintsugi.discovery.backlog import (
    EARNED_MAX,
    NAMESPACE_TOKENS_MAX,
    SEGMENT_TOKENS_MIN,
    TOKENS_MAX,
    Backlog,
    Recurring,
)

SPACE = ChunkSpace(ModelFingerprint.of({"weights": "x"}), "acme")


def backlog_of(share: float) -> Backlog:
    backlog = Backlog()
    backlog.share = share
    return backlog


def segment(number: int, size: int = 64, namespace: str = "acme") -> Recurring:
    space = replace(SPACE, namespace=namespace)
    return Recurring(space, TokenIds.of([number] * size), "", namespace, 60.0, 0.0)


def test_segments_leave_in_the_order_of_arrival() -> None:
    backlog = backlog_of(1.0)
    assert all(backlog.add(segment(number)) for number in (3, 1, 2))
    assert [backlog.take(1)[0].token_ids[0] for _ in range(3)] == [3, 1, 2]


@pytest.mark.parametrize(("tokens_max", "together"), [(1, 1), (127, 1), (128, 2), (1000, 3)])
def test_alike_segments_leave_together_as_long_as_they_are_few_tokens(tokens_max: int, together: int) -> None:
    backlog = backlog_of(1.0)
    for number in range(3):
        backlog.add(segment(number))
    backlog.add(segment(3, namespace="others"))
    backlog.add(segment(4))
    assert [one.token_ids[0] for one in backlog.take(tokens_max)] == list(range(together))
    assert len(backlog) == 5 - together


def test_a_segment_waits_once() -> None:
    backlog = backlog_of(1.0)
    assert backlog.add(segment(1))
    assert not backlog.add(segment(1))
    assert len(backlog) == 1


def test_saving_computes_no_more_than_its_share() -> None:
    backlog = backlog_of(0.5)
    for number in range(100):
        backlog.add(segment(number))
    assert not backlog.is_due
    backlog.earn(prompt_tokens=1000)
    taken = 0
    while backlog.is_due:
        backlog.spend(len(backlog.take(1)[0].token_ids))
        taken += 64
    assert 500 <= taken < 500 + 64


def test_an_idle_time_is_not_made_up_for() -> None:
    backlog = backlog_of(1.0)
    backlog.earn(prompt_tokens=10 * EARNED_MAX)
    backlog.add(segment(1))
    backlog.spend(EARNED_MAX)
    assert not backlog.is_due


@pytest.mark.parametrize("size", [64, 256, 1000])
def test_what_waits_is_bounded_and_no_namespace_takes_all_the_room(size: int) -> None:
    backlog = backlog_of(1.0)
    most = NAMESPACE_TOKENS_MAX // max(size, SEGMENT_TOKENS_MIN)
    for namespace in ("flood", "others"):
        added = sum(backlog.add(segment(number, size, namespace)) for number in range(most + 10))
        assert added == most
    assert not backlog.add(segment(1, size, "third"))
    assert len(backlog) * size <= TOKENS_MAX
    backlog.take(1)
    assert backlog.add(segment(1, size, "third"))
    assert backlog.add(segment(1 << 20, size, "flood")) is False


def test_the_parts_of_a_namespace_have_no_more_room_than_it_has() -> None:
    backlog = backlog_of(1.0)
    most = NAMESPACE_TOKENS_MAX // SEGMENT_TOKENS_MIN
    parts = ("flood/-/one", "flood/-/two", "flood")
    added = sum(backlog.add(segment(number, namespace=parts[number % 3])) for number in range(3 * most))
    assert added == most
    assert backlog.add(segment(1, namespace="others"))
    backlog.take(1)
    assert backlog.add(segment(1 << 20, namespace="flood/-/three"))
